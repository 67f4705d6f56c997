"""Passing on and records of forward passes: ``make bench WHAT=wires``, whole or by section.

acknowledged  how much longer a sender waits for its acknowledgement where its telemetry is passed on, in turns
records       what a record of a forward pass costs, at 10,000 a second

Sidecars run in processes of their own.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import msgspec
import numpy as np
import zmq

from collector.ingest.forward import METHODS
from collector.telemetry import Signal
from tests.bench.board import Board, run
from tests.support.clocks import eventually
from tests.support.gpu_server import serve, step_payloads
from tests.support.otlp_backend import Backend
from tests.support.processes import running_process
from tests.support.sidecars import get, metric
from tests.support.vllm_senders import fpm_lines

CALLS = 2000
PER_S = 10_000
SENT = 'tracefit_forward_exports_total{outcome="sent",signal="traces"}'
MISSING = 'tracefit_join_events_total{event="missing"}'
LEARNED = 'tracefit_rows_total{outcome="learned",target="step_time"}'


def acknowledged(board: Board) -> None:
    """An export of 100 steps every 20 ms, to a sidecar that passes it on and to one that does not, in turns.

    The backend is a process of its own that takes what it gets and does nothing with it.
    """
    spawning = multiprocessing.get_context("spawn")
    reader, writer = spawning.Pipe(duplex=False)
    backend = spawning.Process(target=_take_all, args=(writer,), daemon=True)
    backend.start()
    with (
        tempfile.TemporaryDirectory() as directory,
        running_process(Path(directory) / "plain") as plain,
        running_process(
            Path(directory) / "passing", FORWARD=f"grpc://127.0.0.1:{reader.recv()}", FORWARD_DROP_SCOPES="[]"
        ) as passing,
        grpc.insecure_channel(f"127.0.0.1:{plain.grpc_port}") as to_plain,
        grpc.insecure_channel(f"127.0.0.1:{passing.grpc_port}") as to_passing,
    ):
        calls = [channel.unary_unary(METHODS[Signal.TRACES]) for channel in (to_plain, to_passing)]
        waited_ms: list[list[float]] = [[], []]
        begun_s = time.monotonic()
        for number, payload in enumerate(step_payloads(CALLS, 100)):
            time.sleep(max(0.0, begun_s + number / 50 - time.monotonic()))
            for which in (number % 2, 1 - number % 2):
                sent_s = time.monotonic()
                calls[which](payload, timeout=10, wait_for_ready=True)
                waited_ms[which].append(1e3 * (time.monotonic() - sent_s))
        eventually(lambda: metric(passing.http_port, SENT) == CALLS)
    backend.kill()
    for percent in (50, 99):
        without_ms, with_ms = (float(np.percentile(each, percent)) for each in waited_ms)
        board.keep(f"p{percent} of the acknowledgement, ms", without_ms)
        board.at_most(f"p{percent}: more where it is passed on", with_ms - without_ms, 2.0, " ms")


def _take_all(port: Connection) -> None:
    """Be a backend, in a process of its own."""
    port.send(Backend().port)
    threading.Event().wait()


def records(board: Board) -> None:
    """CPU of the sidecar once it learns and has imported what that needs, and what became of every record."""
    told = [json.loads(line) for line in fpm_lines(serve("llama8b-h100", 120.0, 11))]
    told = [record for record in told if record["wall_time"]]  # a heartbeat gives no row
    warm, counted = 4 * PER_S, 10 * PER_S
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.setsockopt(zmq.SNDHWM, 20_000)  # as the plugin for vLLM
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        settings = {"FPM": f"tcp://127.0.0.1:{port}", "MODEL": "m"}
        with tempfile.TemporaryDirectory() as directory, running_process(Path(directory), **settings) as running:
            clock = (~running.process.pid << 3) | 2
            publisher.poll(60_000)
            bodies = [
                msgspec.msgpack.encode({**told[number % len(told)], "counter_id": number})
                for number in range(warm + counted)
            ]
            for first, last in ((0, warm), (warm, len(bodies))):
                before_s, begun_s = time.clock_gettime(clock), time.monotonic()
                for number in range(first, last):
                    publisher.send_multipart([b"", number.to_bytes(8, "big"), bodies[number]])
                    ahead_s = begun_s + (number - first) / PER_S - time.monotonic()
                    if ahead_s > 0.002:
                        time.sleep(ahead_s)
                sent_s = time.monotonic()
                _await_told(running.http_port, last)
            spent_s, waited_s = time.clock_gettime(clock) - before_s, time.monotonic() - sent_s
            lost = metric(running.http_port, MISSING)
    board.at_most("records lost on the way or dropped, each counted", lost, 0)
    board.at_most("until the last is learned from", waited_s, 5, " s")
    board.at_most("CPU of a record, learned from", 1e6 * spent_s / counted, 15, " us")


def _page(port: int) -> list[str]:
    return get(port, "/metrics").decode().splitlines()


def _await_told(port: int, number: int) -> None:
    """Until so many records were learned from or are known to be missing; seldom asked, since a page costs CPU too."""
    until_s = time.monotonic() + 60
    while sum(float(line.split()[1]) for line in _page(port) if line.startswith((LEARNED, MISSING))) != number:
        assert time.monotonic() < until_s, "records that nobody knows of"
        time.sleep(0.5)


SECTIONS = {section.__name__: section for section in (acknowledged, records)}

if __name__ == "__main__":
    sys.exit(run(__doc__, SECTIONS))
