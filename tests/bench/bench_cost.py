"""What a sidecar costs: ``make bench WHAT=cost``, whole or by section.

recordings  CPU of ``tracefit replay`` of what vLLM sent, beside a reader that makes a dict of every event
memory      resident memory, idle and while four engines send, and the CPU of a start
latency     how long a sender waits for its acknowledgement, at 2,000 and 20,000 steps a second from four engines

The sidecar runs on CPU 0 and this process, which sends, on CPU 1. Steps are those of the simulated GPU server
(``tests/support/gpu_server.py``). The tables of README.md and docs/accuracy.md are made of what ``--record`` writes.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
from google.protobuf.internal.encoder import _VarintBytes as varint_bytes
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from tests.bench.board import Board, run
from tests.support.gpu_server import step_payloads
from tests.support.processes import Running, running_process
from tests.support.recordings import otlp_file
from tests.support.sidecars import get

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PROFILES: dict[str, tuple[str, ...]] = {"shipped default": (), "bulk": ("--profile", "bulk")}
RECORDINGS = ("c10_long", "c7_async_sim")
"""The largest of tests/data in which a step stands once: a server for eleven minutes, and an asynchronous scheduler."""
READINGS = 5
SERVERS_CPU = ("taskset", "-c", "0")
ENGINES, STEPS_PER_CALL, USUAL_STEPS_PER_S, STEPS_PER_S, SENT_S = 4, 100, 2000, 20_000, 5


@contextlib.contextmanager
def sidecar(*arguments: str) -> Iterator[Running]:
    """``tracefit run`` on CPU 0, once it is ready."""
    with (
        tempfile.TemporaryDirectory() as directory,
        running_process(Path(directory), *arguments, wrapper=SERVERS_CPU) as running,
    ):
        get(running.http_port, "/readyz")
        yield running


def resident_mb(process: subprocess.Popen[str]) -> float:
    """What a process has in memory now."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024


def send(port: int, steps_per_s: float, seconds: float) -> list[float]:
    """What four engines on connections of their own waited for each acknowledgement, in milliseconds."""
    waited_ms: list[float] = []

    def engine(payloads: list[bytes]) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(30)
            call, begun_s = channel.unary_unary(METHOD), time.monotonic()
            for number, payload in enumerate(payloads):
                due_s = begun_s + number * STEPS_PER_CALL * ENGINES / steps_per_s
                time.sleep(max(0.0, due_s - time.monotonic()))
                sent_s = time.monotonic()
                call(payload, timeout=10)
                waited_ms.append((time.monotonic() - sent_s) * 1e3)

    steps = int(steps_per_s * seconds / ENGINES)
    streams = [step_payloads(steps // STEPS_PER_CALL, STEPS_PER_CALL, number) for number in range(ENGINES)]
    threads = [threading.Thread(target=engine, args=(payloads,)) for payloads in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return waited_ms


def recordings(board: Board) -> None:
    """Replays of what vLLM sent, less the replay of an export without spans."""
    with tempfile.TemporaryDirectory() as directory:
        out, empty = Path(directory) / "snapshot.json", Path(directory) / "empty.pb.gz"
        nothing = ExportTraceServiceRequest(resource_spans=[ResourceSpans()]).SerializeToString()
        empty.write_bytes(gzip.compress(varint_bytes(len(nothing)) + nothing))
        starts_s = {name: replay_s(empty, out, *arguments) for name, arguments in PROFILES.items()}
        for recording in RECORDINGS:
            path = otlp_file(recording)
            reader_s = min(float(_said("-m", "tests.bench.plain_reader", path).split()[0]) for _ in range(READINGS))
            board.keep(f"{recording}: plain reader, s CPU", reader_s)
            for name, arguments in PROFILES.items():
                cpu_s = replay_s(path, out, *arguments) - starts_s[name]
                board.keep(f"{recording}, {name}: s CPU", cpu_s)
                board.keep(f"{recording}, {name}: ÷ plain reader", cpu_s / reader_s)


def replay_s(path: Path, out: Path, *arguments: str) -> float:
    """CPU of ``tracefit replay`` from its start to its exit, the least of several."""
    spent_s = []
    for _ in range(READINGS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _said("-m", "collector", "replay", path, "--snapshot", out, *arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent_s)


def _said(*command: object) -> str:
    words = [*SERVERS_CPU, sys.executable, *map(str, command)]
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout


def memory(board: Board) -> None:
    """Idle for ten seconds, then with 1,000 steps a second of four engines."""
    with sidecar() as (process, port, *_):
        board.at_most("start to ready, shipped default", time.clock_gettime((~process.pid << 3) | 2), 1.2, " s CPU")
        time.sleep(10)
        board.at_most("RSS idle, shipped default", resident_mb(process), 110, " MB")
        send(port, 1000, 15)
        board.at_most("RSS loaded, shipped default", resident_mb(process), 140, " MB")


def latency(board: Board) -> None:
    """Of every call while all of it is learned: by the default behind its first rows, and by the bulk profile."""
    with sidecar() as (_, port, *_):
        send(port, USUAL_STEPS_PER_S, SENT_S)  # the first rows import River
        p99 = np.percentile(send(port, USUAL_STEPS_PER_S, 4 * SENT_S), 99)
    board.at_most(f"{USUAL_STEPS_PER_S:,} steps/s while learning, shipped default: p99", float(p99), 10, " ms")
    with sidecar(*PROFILES["bulk"]) as (_, port, *_):
        p50, p99 = np.percentile(send(port, STEPS_PER_S, SENT_S), (50, 99))
    board.at_most(f"{STEPS_PER_S:,} steps/s while learning: p50", float(p50), 1, " ms")
    board.at_most(f"{STEPS_PER_S:,} steps/s while learning: p99", float(p99), 10, " ms")


SECTIONS = {section.__name__: section for section in (recordings, memory, latency)}

if __name__ == "__main__":
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.exit(run(__doc__, SECTIONS, recorded_as="cost "))
