"""What acknowledging after a write costs: the append file against SQLite in WAL mode.

    python -m tests.bench.bench_journal [--calls 200] [--fsync]
    python -m tests.bench.bench_journal --recovery

CPU microseconds per step at 1,000 steps per call, and the latency of one append.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from collector.app import Sidecar
from collector.durable.journal import Journal
from collector.receive.export_request import Export
from collector.runtime.clock import SystemClock
from collector.telemetry.table import DECODED_SPANS
from tests.support.sidecars import make_config
from tests.support.step_exports import make_export

STEPS = 1000


def append_file(directory, payload, calls, fsync):
    journal = Journal(directory, capacity_bytes=2**34, segment_bytes=8 * 2**20, fsync=fsync)
    journal.open(0)

    def one(number):
        journal.sync(journal.append(Export(payload, "peer", "grpc", STEPS // 10)).seq)
        if number % 50 == 49:
            journal.applied(number - 5)

    out = timed(one, calls)
    journal.close()
    return out


def sqlite_wal(directory, payload, calls, fsync):
    db = sqlite3.connect(directory / "journal.db", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'OFF'}")
    db.execute("CREATE TABLE entries (seq INTEGER PRIMARY KEY, peer TEXT, transport TEXT, spans INTEGER, payload BLOB)")

    def one(number):
        db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", (number + 1, "peer", "grpc", STEPS // 10, payload))
        if number % 50 == 49:
            db.execute("DELETE FROM entries WHERE seq <= ?", (number - 5,))

    out = timed(one, calls)
    db.close()
    return out


def timed(one, calls):
    waits_s = []
    cpu_s = time.process_time()
    for number in range(calls):
        start_s = time.perf_counter()
        one(number)
        waits_s.append(time.perf_counter() - start_s)
    cpu_s = time.process_time() - cpu_s
    waits_s.sort()
    return cpu_s / calls / STEPS * 1e6, waits_s[len(waits_s) // 2] * 1e3, waits_s[int(len(waits_s) * 0.99)] * 1e3


def recovery(directory, size_mib=100):
    """Seconds from the start of a sidecar to ready, and until all of a left-behind journal is learned."""
    journal = Journal(directory, capacity_bytes=2**34, segment_bytes=8 * 2**20, fsync=False)
    journal.open(0)
    while journal.size_bytes < size_mib * 2**20:
        first = 1 + journal.last_seq * STEPS
        one = make_export(STEPS // 10, steps_per_span=10, first_step=first).SerializeToString()
        journal.append(Export(one, "peer", "grpc", STEPS // 10))
    spans = journal.last_seq * (STEPS // 10)
    journal.close()
    sidecar = Sidecar(make_config(directory, DURABILITY="journal"), SystemClock())
    start_s = time.perf_counter()
    sidecar.start()
    while not sidecar.health.ready():
        time.sleep(0.001)
    ready_s = time.perf_counter() - start_s
    while sidecar.metrics.value(DECODED_SPANS) < spans:
        time.sleep(0.01)
    learned_s = time.perf_counter() - start_s
    sidecar.stop()
    return ready_s, learned_s


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--directory")
    parser.add_argument("--recovery", action="store_true")
    args = parser.parse_args()
    payload = make_export(STEPS // 10, steps_per_span=10).SerializeToString()
    if args.recovery:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            ready_s, learned_s = recovery(Path(directory))
        sys.stdout.write(f"100 MiB of journal: ready after {ready_s:.2f} s, all learned after {learned_s:.1f} s\n")
        return
    sys.stdout.write(f"{STEPS} steps per call, {len(payload)} bytes, fsync {args.fsync}\n")
    for name, run in (("append file", append_file), ("SQLite WAL", sqlite_wal)):
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            cpu_us, median_ms, p99_ms = run(Path(directory), payload, args.calls, args.fsync)
        sys.stdout.write(f"{name:12} {cpu_us:.2f} us CPU per step, median {median_ms:.2f} ms, p99 {p99_ms:.2f} ms\n")


if __name__ == "__main__":
    main()
