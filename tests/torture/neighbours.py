"""Hostile neighbours beside honest exporters, against the real process: is anybody kept waiting, and for how long?

    python -m tests.torture.neighbours

Honest exporters connect anew for each export, over gRPC and over HTTP; a third one stays connected. An attack is
endured when no honest export fails and none takes longer than ``WAIT_S``, the process stays alive and below its limit.
"""

import contextlib
import http.client
import math
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc

from collector.ingest.otlp_grpc import METHOD
from tests.support import otlp_bytes as otlp
from tests.support.processes import free_port, running_process
from tests.support.sidecars import call_export, get
from tests.support.silent_calls import own_channel, silent_calls
from tests.support.step_exports import make_export

LIMIT_MIB = 410
"""80 % of the 512 MiB that our manifests give a sidecar."""
WAIT_S, SECONDS, SENDERS = 2.0, 8.0, 16


def post_once(port, payload):
    """An export over HTTP on a connection of its own."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("POST", "/v1/traces", payload, {"Content-Type": "application/x-protobuf"})
        if connection.getresponse().status != http.HTTPStatus.OK:
            raise OSError


def be_honest(ports, instance, over):
    """Send an export every fifth of a second until told to stop: how long each took, and inf for one that failed."""
    took_s = []
    with own_channel(ports[0]) as kept:
        send = {
            "stays": partial(kept.unary_unary(METHOD), timeout=10),
            "comes anew": partial(call_export, ports[0], timeout_s=10, wait=False),
            "posts": partial(post_once, ports[1]),
        }[instance]
        while not over.wait(0.2):
            payload = make_export(first_step=1 + 10 * len(took_s), instance=instance).SerializeToString()
            begun_s = time.monotonic()
            try:
                send(payload)
                took_s.append(time.monotonic() - begun_s)
            except (grpc.RpcError, OSError, http.client.HTTPException):
                took_s.append(math.inf)
    return took_s


# --- attacks: each does its worst until its time is over, at these ports of gRPC and HTTP -----------------------------


def silent(ports, until_s):
    """100 connections with eight calls each that never bring a message."""
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(own_channel(ports[0])) for _ in range(100)]
        while time.monotonic() < until_s:
            with contextlib.ExitStack() as calls:
                for channel in channels:
                    calls.enter_context(silent_calls(channel, 8))
                time.sleep(1.0)


def dense(payload, ports, until_s):
    """The same large export, by as many senders as there are."""

    def send(_):
        with own_channel(ports[0]) as channel:
            while time.monotonic() < until_s:
                with contextlib.suppress(grpc.RpcError):
                    channel.unary_unary(METHOD)(payload, timeout=10)

    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(send, range(SENDERS)))


def held(ports, until_s):
    """70 requests over HTTP whose bodies never come."""
    head = b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\nContent-Length: 8388608\r\n\r\n"

    def hold(_):
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports[1]), 10) as client:
                client.sendall(head)
                client.recv(1)

    with ThreadPoolExecutor(70) as pool:
        list(pool.map(hold, range(70)))


def ahead(ports, until_s):
    """Engines of the year 2099, and the honest one's name with a step of tomorrow."""
    number = 0
    while time.monotonic() < until_s:
        number += 1
        instance = "stays" if number % 2 else f"of 2099, {number}"
        begin_ns = time.time_ns() + 86_400 * 10**9 if number % 2 else 4_090_000_000 * 10**9
        request = make_export(first_step=10 * number, instance=instance, begin_ns=begin_ns)
        with contextlib.suppress(grpc.RpcError):
            call_export(ports[0], request.SerializeToString(), wait=False)


ATTRIBUTE = otlp.field(9, otlp.field(1, b"name of it"))
SUMMARY = otlp.field(11, otlp.field(2, b"step.BATCH_SUMMARY"))
ATTACKS = {
    "100 connections of 8 silent calls": silent,
    "16 x 7 MiB of full steps": partial(dense, make_export(2200, steps_per_span=5).SerializeToString()),
    "16 x 370,000 summaries of nothing": partial(dense, otlp.in_step_span(SUMMARY * 370_000)),
    "16 x 250,000 attributes of a span": partial(dense, otlp.in_step_span(ATTRIBUTE * 250_000)),
    "70 requests over HTTP without their bodies": held,
    "16 x 7 MiB of name": partial(dense, make_export(instance="x" * (7 << 20)).SerializeToString()),
    "times of 2099, and of tomorrow in the name of another": ahead,
}


def be_hostile(attack, ports):
    """In a process of its own, so that the honest wait for the sidecar alone."""
    ATTACKS[attack](ports, time.monotonic() + SECONDS)


def is_endured(attack):
    """Print what the honest saw of one attack, and what it cost the process."""
    http_port, over = free_port(), threading.Event()
    settings = {"LISTEN_HTTP": f"127.0.0.1:{http_port}", "MEMORY_LIMIT_MIB": str(LIMIT_MIB)}
    with (
        tempfile.TemporaryDirectory() as name,
        running_process(Path(name), **settings) as sidecar,
        ThreadPoolExecutor(3) as pool,
    ):
        ports = sidecar.grpc_port, http_port
        honest = [pool.submit(be_honest, ports, each, over) for each in ("comes anew", "stays", "posts")]
        hostile = multiprocessing.get_context("spawn").Process(target=be_hostile, args=(attack, ports))
        hostile.start()
        hostile.join()
        over.set()  # first: the pool waits for the honest
        assert hostile.exitcode == 0, "it was endured only if it took place"
        took_s = [one_s for each in honest for one_s in each.result()]
        alive = b'"ok":true' in get(sidecar.http_port, "/healthz")
        peak_kib = int(Path(f"/proc/{sidecar.process.pid}/status").read_text().split("VmHWM:")[1].split()[0])
    print(
        f"{attack:56} {len(took_s)} exports, {took_s.count(math.inf)} failed, slowest {max(took_s):.1f} s,"
        f" peak {peak_kib // 1024} MiB, {'alive' if alive else 'NOT ALIVE'}",
        flush=True,
    )
    return alive and max(took_s) <= WAIT_S and peak_kib // 1024 <= LIMIT_MIB


if __name__ == "__main__":
    sys.exit(not all([is_endured(attack) for attack in ATTACKS]))  # noqa: C419 -- look at all
