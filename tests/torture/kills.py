"""Kill the real process under real load, whenever; compare with one that was never killed.

    python -m tests.torture.kills [--kills 100] [--seed 1] [--exports 2500]

An exporter for each engine sends its exports in order and repeats each until it is acknowledged. The process ends
itself with SIGKILL in a stage of a start, a checkpoint, a change of segments or a stop, or it is killed at a random
moment; then the next one starts on what is left, with the next trouble of its disk. The last one is stopped in order.
With ``durability: log`` every acknowledged export is learned once: rows and coefficients are those of one pipeline that
was fed the same exports (relative 1e-9).
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import grpc

from collector.app import Sidecar
from collector.config.load import load
from collector.ingest import Export
from collector.runtime.filesystem import SystemFiles
from collector.runtime.tasks import Stop, SystemClock, serve
from collector.service.checkpoint import CheckpointFiles, Directory
from collector.service.durability import Durability
from collector.service.log import Log
from collector.service.pipeline import Pipeline, make_pipeline
from collector.service.publish import SnapshotWriter
from tests.bench.figures import record
from tests.support.paths import ROOT
from tests.support.sidecars import call_export
from tests.support.step_exports import make_export

READY_S = 60.0
"""Generous: the machine may be busy."""
ENGINES = 2
STAGES = {
    "directory-taken": (Directory, "take"),
    "checkpoint-read": (CheckpointFiles, "load"),
    "log-opened": (Log, "open"),
    "log-read": (Durability, "backlog"),
    "started": (Sidecar, "start"),
    "segment-begun": (Log, "_begin_segment"),
    "segment-ended": (Log, "_end_segment"),
    "checkpoint-taken": (Pipeline, "to_checkpoint"),
    "checkpoint-half-written": (SystemFiles, "sync"),
    "checkpoint-half-renamed": (SystemFiles, "replace"),
    "checkpoint-written": (CheckpointFiles, "write"),
    "log-freed": (Log, "free"),
    "flushed": (Pipeline, "flush"),
    "snapshot-written": (SnapshotWriter, "stop"),
    "directory-released": (Directory, "release"),
}
"""Where the process ends itself: right after a call of this."""
TROUBLES = ("none", "full", "read-only", "slow", "clock")


class Report(NamedTuple):
    """What a run showed."""

    kills: int
    in_stages: int
    exports: int
    repeats: int
    rows: int
    expected_rows: int
    worst_difference: float
    slowest_start_s: float


# --- the process that gets killed -------------------------------------------------------------------------------------


class BadDisk(SystemFiles):
    """The real file system with spells of trouble: no room (half an entry gets in), read-only, slow."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self._kind = kind
        self._rng = rng

    def _hits(self, kind: str) -> bool:
        return self._kind == kind and self._rng.random() < 0.3

    def open(self, path):
        if self._hits("read-only"):
            raise OSError(errno.EROFS, "Read-only file system")
        return super().open(path)

    def write(self, descriptor, parts):
        if self._hits("slow"):
            time.sleep(0.02)
        if self._hits("full"):
            whole = b"".join(parts)
            if self._rng.random() < 0.5:
                super().write(descriptor, [whole[: self._rng.randrange(len(whole))]])
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, parts)

    def truncate(self, descriptor, size_bytes):
        if self._hits("full"):
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(descriptor, size_bytes)

    def replace(self, source, target):
        if self._hits("read-only"):
            raise OSError(errno.EROFS, "Read-only file system")
        super().replace(source, target)


class JumpingClock(SystemClock):
    """A wall clock that jumps by hours, both ways."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._offset_ns = 0

    def unix_nano(self) -> int:
        if self._rng.random() < 0.2:
            self._offset_ns = self._rng.randrange(-(10**14), 10**14)
        return super().unix_nano() + self._offset_ns


def die_in(stage: str, call: int) -> None:
    """End this process right after so many calls."""
    owner, name = STAGES[stage]
    original, calls = getattr(owner, name), iter(range(1, call))

    def deadly(*args, **kwargs):
        result = original(*args, **kwargs)
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def be_a_victim(trouble: str, seed: int, stage: str) -> int:
    """Run a sidecar in this process until SIGTERM, with this trouble; say the port on stdout."""
    rng = random.Random(seed)
    if stage:
        die_in(stage, rng.choice((1, 1, 2, 5)))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    clock = JumpingClock(rng) if trouble == "clock" else SystemClock()
    stop = Stop()
    sidecar = Sidecar(load(None, os.environ), clock, on_death=stop.ask, files=BadDisk(trouble, rng))

    def begin() -> None:
        sidecar.start()
        sys.stdout.write(f"{sidecar.grpc_port}\n")
        sys.stdout.flush()

    return 0 if asyncio.run(serve(begin, sidecar.stop, stop)) else 1


def environment(directory):
    """Of a victim: coverage stays out, because one that is killed while it writes leaves a file that cannot be read."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TRACEFIT_", "COVERAGE_"))}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "TRACEFIT_LISTEN": "127.0.0.1:0",
        "TRACEFIT_LISTEN_HTTP": "",
        "TRACEFIT_PAGES": "127.0.0.1:0",
        "TRACEFIT_DIRECTORY": str(directory),
        "TRACEFIT_PUBLISH_INTERVAL_S": "0.2",
        "TRACEFIT_CHECKPOINT_INTERVAL_S": "0.3",
        "TRACEFIT_DURABILITY": "log",
        "TRACEFIT_LOG_CAPACITY_MIB": "16",
        "TRACEFIT_LEARNERS": "[rls]",
    }


# --- the load ---------------------------------------------------------------------------------------------------------


def payload_of(engine: int, number: int) -> bytes:
    """Ten steps that take up where the export before ended; engines with equal steps would be taken for one."""
    first_step = 1 + 100_000 * engine + 10 * number
    request = make_export(2, steps_per_span=5, first_step=first_step, instance=f"engine-{engine}")
    for place, span in enumerate(request.resource_spans[0].scope_spans[0].spans):
        span.span_id = (1 + engine << 48 | number << 8 | place).to_bytes(8, "big")
    return request.SerializeToString()


class Load:
    """Exporters in threads; ``port`` is where the process of the moment listens, 0 for nowhere."""

    def __init__(self, exports: int, pause_s: float) -> None:
        self.port = self.repeats = 0
        self._exports = exports
        self._pause_s = pause_s
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(n,), daemon=True) for n in range(ENGINES)]
        for thread in self._threads:
            thread.start()

    def _send(self, engine: int) -> None:
        for number in range(self._exports):
            payload = payload_of(engine, number)
            while not self._over.is_set():
                try:
                    call_export(self.port, payload, timeout_s=10, wait=False)
                    break
                except (grpc.RpcError, ValueError):
                    self.repeats += 1
                    self._over.wait(0.05)
            self._over.wait(self._pause_s)

    @property
    def is_sent(self) -> bool:
        """Everything was acknowledged."""
        return not any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """Give up."""
        self._over.set()


def start(directory, trouble, seed, stage, load_):
    """A process on the directory and the port it said, or none if it ended before; how long that took."""
    command = [sys.executable, "-m", "tests.torture.kills", "--victim", trouble, str(seed), stage]
    begun_s = time.monotonic()
    with (directory.parent / "stderr").open("ab") as stderr:
        process = subprocess.Popen(command, env=environment(directory), cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr)
    line = process.stdout.readline()
    load_.port = int(line.split()[0]) if line else 0
    return process, time.monotonic() - begun_s


def rows_and_coefficients(document):
    """By configuration and target."""
    return {
        (config["config_id"], name): (model["rows"], [f["coefficient"] for f in model["features"]])
        for config in document["configs"]
        for name, target in config["targets"].items()
        for model in (target["models"]["portable"],)
    }


def expected(directory, exports):
    """What one pipeline learns of the same exports."""
    pipeline = make_pipeline(load(None, {k: v for k, v in environment(directory).items() if k.startswith("TRACEFIT_")}))
    for number in range(exports):
        for engine in range(ENGINES):
            pipeline.process([Export(payload_of(engine, number), "peer", "grpc", 2)])
    pipeline.flush()
    return rows_and_coefficients(json.loads(pipeline.snapshot(1, 1).to_json()))


def run(directory, *, kills, seed, exports, pause_s=0.0, say=lambda _: None):
    """Kill so often while the load goes on, then let it end; AssertionError if anything was lost or learned twice."""
    rng = random.Random(seed)
    load_, slowest_s, lives, done, staged = Load(exports, pause_s), 0.0, 0, 0, 0
    stages = [stage for stage in STAGES for _ in range(1 + kills // 30)]
    rng.shuffle(stages)
    try:
        while done < kills:
            trouble = TROUBLES[lives % len(TROUBLES)]
            stage = stages.pop() if stages and lives % 2 == 0 else ""
            process, took_s = start(directory, trouble, seed + lives, stage, load_)
            lives += 1
            assert lives <= 2 * kills + 5, "starts fail"
            if load_.port:
                slowest_s = max(slowest_s, took_s)
                if stage:
                    try:
                        process.wait(2.0)
                    except subprocess.TimeoutExpired:
                        process.send_signal(signal.SIGTERM)  # it may end itself in a stage of the stop
                        process.wait(READY_S)
                else:
                    time.sleep(rng.uniform(0.05, 1.0))
            process.kill() if not stage else None
            code = process.wait(READY_S)
            process.stdout.close()
            load_.port = 0
            killed = code == -signal.SIGKILL  # a disk in trouble may also end a start in order
            done, staged = done + killed, staged + bool(stage and killed)
            say(f"{done:4} {trouble:10} {stage or 'whenever':24} exit {code}")
        process, took_s = start(directory, "none", 0, "", load_)
        while not load_.is_sent and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(READY_S) == 0, (directory.parent / "stderr").read_text()[-3000:]
        process.stdout.close()
    finally:
        load_.end()
    found = rows_and_coefficients(json.loads((directory / "snapshot.json").read_bytes()))
    wanted = expected(directory, exports)
    counted = [{name: rows for name, (rows, _) in each.items()} for each in (found, wanted)]
    assert counted[0] == counted[1], counted
    differences = [
        abs(a - b) / max(abs(b), 1e-12)
        for name, (_, coefficients) in wanted.items()
        for a, b in zip(found[name][1], coefficients, strict=True)
    ]
    rows, expected_rows = (sum(count for count, _ in each.values()) for each in (found, wanted))
    report = Report(*(done, staged, ENGINES * exports, load_.repeats, rows, expected_rows, max(differences), slowest_s))
    assert max(differences) <= 1e-9, report
    return report


def main():
    if sys.argv[1:2] == ["--victim"]:
        return be_a_victim(sys.argv[2], int(sys.argv[3]), "".join(sys.argv[4:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exports", type=int, default=2500)
    parser.add_argument("--record", action="store_true", help="write the figures to docs/figures.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "life"
        report = run(
            directory,
            kills=args.kills,
            seed=args.seed,
            exports=args.exports,
            pause_s=0.02,
            say=lambda text: sys.stdout.write(text + "\n") and sys.stdout.flush(),
        )
    for key, value in report._asdict().items():
        sys.stdout.write(f"{key:18} {value}\n")
    if args.record:
        record("torture", report._asdict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
