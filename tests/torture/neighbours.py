"""Hostile neighbours beside honest exporters, against the real process: is anybody kept waiting, and for how long?

    python -m tests.torture.neighbours [--seconds 8]

One honest exporter connects anew for each export, one stays connected. An attack is endured when no honest export fails
and none takes longer than ``WAIT_S``, the process stays alive and below its memory limit.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc

from collector.ingest.otlp_grpc import METHOD
from tests.support import otlp_bytes as otlp
from tests.support.paths import ROOT
from tests.support.sidecars import call_export, get
from tests.support.silent_calls import own_channel, silent_calls
from tests.support.step_exports import make_export

LIMIT_MIB = 410
"""80 % of the 512 MiB that our manifests give a sidecar."""
WAIT_S = 2.0
MIB = 1 << 20
SENDERS = 16


class Ports(NamedTuple):
    """Where the process listens."""

    grpc: int
    http: int
    pages: int


class Honest(threading.Thread):
    """Sends an export every fifth of a second until told to stop."""

    def __init__(self, port: int, instance: str, *, stays: bool) -> None:
        super().__init__(daemon=True)
        self.slowest_s = 0.0
        self.sent = self.failed = 0
        self.over = threading.Event()
        self._port, self._instance, self._stays = port, instance, stays

    def run(self) -> None:
        with own_channel(self._port) as kept:
            while not self.over.wait(0.2):
                payload = make_export(first_step=1 + 10 * self.sent, instance=self._instance).SerializeToString()
                begun_s = time.monotonic()
                try:
                    if self._stays:
                        kept.unary_unary(METHOD)(payload, timeout=10)
                    else:
                        call_export(self._port, payload, timeout_s=10, wait=False)
                except grpc.RpcError:
                    self.failed += 1
                self.sent += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)


# --- attacks: each does its worst for some seconds --------------------------------------------------------------------


def silent(ports: Ports, seconds: float) -> None:
    """100 connections with eight calls each that never bring a message."""
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(own_channel(ports.grpc)) for _ in range(100)]
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            with contextlib.ExitStack() as calls:
                for channel in channels:
                    calls.enter_context(silent_calls(channel, 8))
                time.sleep(1.0)


def dense(payload: bytes) -> Callable[[Ports, float], None]:
    """Sixteen senders of the same large export, without a pause."""

    def attack(ports: Ports, seconds: float) -> None:
        until_s = time.monotonic() + seconds

        def send() -> None:
            with own_channel(ports.grpc) as channel:
                while time.monotonic() < until_s:
                    with contextlib.suppress(grpc.RpcError):
                        channel.unary_unary(METHOD)(payload, timeout=10)

        senders = [threading.Thread(target=send) for _ in range(SENDERS)]
        for each in senders:
            each.start()
        for each in senders:
            each.join()

    return attack


def post(body: bytes) -> Callable[[Ports, float], None]:
    """The same body over HTTP, again and again."""

    def attack(ports: Ports, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
        while time.monotonic() < until_s:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", ports.http, timeout=30)) as connection:
                connection.request("POST", "/v1/traces", body, headers)
                connection.getresponse().read()

    return attack


def ahead(ports: Ports, seconds: float) -> None:
    """Engines of the year 2099, and the honest one's name with a step of tomorrow."""
    until_s = time.monotonic() + seconds
    for number in range(10_000):
        request = make_export(instance="stays" if number % 2 else f"of 2099, {number}")
        for span in request.resource_spans[0].scope_spans[0].spans:
            span.span_id = number.to_bytes(8, "big")
            for event in span.events:
                event.time_unix_nano = time.time_ns() + 86_400 * 10**9 if number % 2 else 4_090_000_000 * 10**9
        with contextlib.suppress(grpc.RpcError):
            call_export(ports.grpc, request.SerializeToString(), wait=False)
        if time.monotonic() > until_s:
            return


def in_span(content: bytes) -> bytes:
    """An export of one step span with this content."""
    scope = otlp.field(1, otlp.field(1, b"vllm.scheduler.step"))
    return otlp.field(1, otlp.field(2, scope + otlp.field(2, content)))


ATTACKS = {
    "100 connections of 8 silent calls": silent,
    "16 x 7 MiB of full steps": dense(make_export(2200, steps_per_span=5).SerializeToString()),
    "16 x 500,000 empty events": dense(in_span(b"\x5a\x00" * 500_000)),
    "16 x 250,000 attributes of a span": dense(in_span(otlp.field(9, otlp.field(1, b"name of it")) * 250_000)),
    "200,000 gzip members in a body": post(gzip.compress(b"") * 200_000),
    "a gigabyte, packed": post(gzip.compress(bytes(1 << 30), 1)),
    "times of 2099, and of tomorrow in the name of another": ahead,
}


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def process(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], Ports]]:
    """The real one, until the end of the block."""
    ports = Ports(free_port(), free_port(), free_port())
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRACEFIT_", "COVERAGE_"))}
    environment |= {
        "TRACEFIT_LISTEN": f"127.0.0.1:{ports.grpc}",
        "TRACEFIT_LISTEN_HTTP": f"127.0.0.1:{ports.http}",
        "TRACEFIT_PAGES": f"127.0.0.1:{ports.pages}",
        "TRACEFIT_DIRECTORY": str(directory),
        "TRACEFIT_MEMORY_LIMIT_MIB": str(LIMIT_MIB),
    }
    one = subprocess.Popen([Path(sys.executable).with_name("tracefit"), "run"], cwd=ROOT, env=environment)
    try:
        with own_channel(ports.grpc) as channel:
            grpc.channel_ready_future(channel).result(60)
        yield one, ports
    finally:
        one.terminate()
        one.wait(60)


def be_hostile(attack: str, ports: Ports, seconds: float) -> None:
    """In a process of its own, so that the honest wait for the sidecar alone."""
    ATTACKS[attack](ports, seconds)


def endure(attack: str, seconds: float) -> dict[str, float]:
    """What the honest saw of one attack, and what it cost the process."""
    with tempfile.TemporaryDirectory() as name, process(Path(name)) as (one, ports):
        honest = [Honest(ports.grpc, instance, stays=instance == "stays") for instance in ("comes anew", "stays")]
        for each in honest:
            each.start()
        hostile = multiprocessing.get_context("spawn").Process(target=be_hostile, args=(attack, ports, seconds))
        hostile.start()
        hostile.join()
        for each in honest:
            each.over.set()
            each.join(20)
        alive = b'"ok":true' in get(ports.pages, "/healthz")
        peak_kib = int(Path(f"/proc/{one.pid}/status").read_text().split("VmHWM:")[1].split()[0])
    return {
        "exports": sum(each.sent for each in honest),
        "failed": sum(each.failed for each in honest),
        "slowest_s": round(max(each.slowest_s for each in honest), 2),
        "peak_mib": peak_kib // 1024,
        "alive": alive,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    endured = True
    for name in ATTACKS:
        found = endure(name, args.seconds)
        well = found["alive"] and not found["failed"] and found["slowest_s"] <= WAIT_S
        endured = endured and well and found["peak_mib"] <= LIMIT_MIB
        sys.stdout.write(f"{name:56} {found}\n")
        sys.stdout.flush()
    return 0 if endured else 1


if __name__ == "__main__":
    sys.exit(main())
