"""Kill the real process under real load, whenever; compare with one that was never killed.

    python -m tests.torture.kills [--seed 1]

An exporter for each engine sends its exports in order and repeats each until it is acknowledged. The process ends
itself with SIGKILL in a stage of a start, a checkpoint, a change of segments or a stop, or it is killed at a random
moment; then the next one starts on what is left, with the next trouble of its disk. The last one is stopped in order.
With ``durability: log`` every acknowledged export is learned once: rows and coefficients are those of one pipeline that
was fed the same exports (relative 1e-9).
"""

import argparse
import asyncio
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import chain, cycle, product, repeat
from pathlib import Path

import grpc
import pytest

from collector.app import Sidecar
from collector.config.load import load
from collector.decode import Export
from collector.runtime import Clock, Health, serve
from collector.runtime.filesystem import SystemFiles
from collector.service import checkpoint
from collector.service.checkpoint import CheckpointFile, Directory
from collector.service.durability import Durability
from collector.service.log import Log
from collector.service.pipeline import Pipeline, make_pipeline
from collector.service.publish import SnapshotWriter
from exporters.snapshot_file import write_atomically
from tests.bench.figures import record
from tests.support.paths import ROOT
from tests.support.processes import environment
from tests.support.sidecars import call_export
from tests.support.step_exports import make_export

ENGINES = 2
STAGES = dict.fromkeys(("take", "release"), Directory) | dict.fromkeys(("load", "write"), CheckpointFile)
STAGES |= dict.fromkeys(("open", "_begin_segment", "_end_segment", "free"), Log)
STAGES |= {"read_unlearned": Durability, "set_serving": Health, "to_checkpoint": Pipeline, "flush": Pipeline}
STAGES |= {"fsync": os, "replace": Path, "stop": SnapshotWriter}
"""Where the process ends itself: right after a call of this."""
TROUBLES = {
    "none": {},
    "full": {"write": errno.ENOSPC, "truncate": errno.EIO, "write_atomically": errno.EDQUOT},
    "read-only": {"open": errno.EROFS, "write_atomically": errno.EROFS},
    "slow": {"write": 0, "write_atomically": 0},
    "clock": {},
}
"""Which calls of the file system fail at times, and how; 0: they wait."""
SETTINGS = {"LISTEN": "127.0.0.1:0", "LISTEN_HTTP": "", "PAGES": "127.0.0.1:0", "PUBLISH_INTERVAL_S": "0.2"}
SETTINGS |= {"CHECKPOINT_INTERVAL_S": "0.3", "DURABILITY": "log", "LOG_CAPACITY_MIB": "16", "LEARNERS": "[rls]"}
SETTINGS = {f"TRACEFIT_{key}": value for key, value in SETTINGS.items()}


# --- the process that gets killed -------------------------------------------------------------------------------------


class BadDisk(SystemFiles):
    """The real file system, of which some calls fail or wait at times; of a write that fails a part gets in."""

    write_atomically = staticmethod(write_atomically)

    def __init__(self, troubles, rng):
        for name, number in troubles.items():
            setattr(self, name, partial(self._at_times, rng, getattr(self, name), number))

    def _at_times(self, rng, call, number, *args):
        if rng.random() < 0.3:
            if number == errno.ENOSPC:
                call(args[0], args[1][: rng.choice((0, rng.randrange(len(args[1]))))])
            if number:
                raise OSError(number, os.strerror(number))
            time.sleep(0.02)
        return call(*args)


class JumpingClock(Clock):
    """A wall clock that jumps by hours, both ways."""

    def __init__(self, rng):
        self._rng, self._offset_ns = rng, 0

    def unix_nano(self):
        if self._rng.random() < 0.2:
            self._offset_ns = self._rng.randrange(-(10**14), 10**14)
        return super().unix_nano() + self._offset_ns


def be_a_victim(trouble, seed, stage):
    """Run a sidecar in this process until SIGTERM, or until so many calls in a stage; say the port on stdout."""
    rng = random.Random(int(seed))
    if stage:
        original, calls = getattr(STAGES[stage], stage), iter(range(rng.choice((0, 0, 1, 4))))

        def deadly(*args, **kwargs):
            result = original(*args, **kwargs)
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(STAGES[stage], stage, deadly)
    clock, disk = JumpingClock(rng) if trouble == "clock" else Clock(), BadDisk(TROUBLES[trouble], rng)
    checkpoint.write_atomically = disk.write_atomically

    class Victim(Sidecar):
        async def start(self):
            await super().start()
            print(self.grpc_port, flush=True)

    return 0 if asyncio.run(serve(lambda stop: Victim(load(None, os.environ), clock, stop, disk))) else 1


# --- the load ---------------------------------------------------------------------------------------------------------


def payload_of(engine, number):
    """Ten steps that take up where the export before ended; engines with equal steps would be taken for one."""
    first_step = 1 + 100_000 * engine + 10 * number
    request = make_export(2, steps_per_span=5, first_step=first_step, instance=f"engine-{engine}")
    for place, span in enumerate(request.resource_spans[0].scope_spans[0].spans):
        span.span_id = (1 + engine << 48 | number << 8 | place).to_bytes(8, "big")
    return request.SerializeToString()


def send_all(engine, exports, pause_s, process, over):
    """Send the exports of an engine, each until it is acknowledged by the process of the moment; how many repeats."""
    repeats = number = 0
    while number < exports and not over.wait(pause_s):
        try:
            call_export(process["port"], payload_of(engine, number), timeout_s=10, wait=False)
            number += 1
        except (grpc.RpcError, ValueError):  # nobody is there
            repeats += 1
            over.wait(0.05)
    return repeats


def started(directory, trouble, seed, stage):
    """A process on the directory, and its port; 0 where it ended before it said one."""
    command = [sys.executable, "-m", "tests.torture.kills", "--victim", trouble, str(seed), stage]
    # coverage stays out: one that is killed while it writes leaves a file that cannot be read
    kept = {key: value for key, value in environment().items() if not key.startswith("COVERAGE_")}
    ours = {**kept, **SETTINGS, "TRACEFIT_DIRECTORY": str(directory)}
    with (directory.parent / "stderr").open("ab") as stderr:
        process = subprocess.Popen(command, env=ours, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr)
    return process, int(process.stdout.readline() or 0)


def learned(document):
    """Rows and coefficients by configuration and target."""
    return {
        (config["config_id"], name): (model["rows"], [feature["coefficient"] for feature in model["features"]])
        for config in document["configs"]
        for name, target in config["targets"].items()
        for model in (target["models"]["portable"],)
    }


def expected(exports):
    """What one pipeline learns of the same exports."""
    pipeline = make_pipeline(load(None, SETTINGS))
    for number, engine in product(range(exports), range(ENGINES)):
        pipeline.process([Export(payload_of(engine, number), "peer", 2)])
    pipeline.flush()
    return learned(json.loads(pipeline.snapshot(1, 1).to_json()))


def run(directory, *, kills, seed, exports, pause_s=0.0):
    """Kill so often while the load goes on, then let it end; AssertionError if anything was lost or learned twice."""
    rng, now, over = random.Random(seed), {"port": 0}, threading.Event()
    stages = chain.from_iterable(zip(cycle(rng.sample(list(STAGES), len(STAGES))), repeat(""), strict=False))
    done = staged = 0
    with ThreadPoolExecutor(ENGINES) as pool:
        load_ = [pool.submit(send_all, engine, exports, pause_s, now, over) for engine in range(ENGINES)]
        try:
            for life, trouble, stage in zip(range(2 * kills + 5), cycle(TROUBLES), stages, strict=False):
                process, now["port"] = started(directory, trouble, seed + life, stage)
                if now["port"]:
                    time.sleep(rng.uniform(0.05, 2.0 if stage else 1.0))
                process.send_signal(signal.SIGTERM if stage else signal.SIGKILL)  # it may end itself in a stage of it
                process.communicate(timeout=60)
                killed = process.returncode == -signal.SIGKILL
                now["port"], done, staged = 0, done + killed, staged + bool(stage and killed)
                print(f"{done:4} {trouble:10} {stage or 'whenever':24} exit {process.returncode}", flush=True)
                if done == kills:
                    break
            assert done == kills, "starts fail; a disk in trouble may end one in order, but not each of them"
            process, now["port"] = started(directory, "none", 0, "")
            wait(load_, timeout=600)
            process.terminate()
            process.communicate(timeout=60)
            assert process.returncode == 0, (directory.parent / "stderr").read_text()[-3000:]
        finally:
            over.set()
    found, wanted = learned(json.loads((directory / "snapshot.json").read_bytes())), expected(exports)
    assert found == {name: (rows, pytest.approx(beta, rel=1e-9)) for name, (rows, beta) in wanted.items()}
    rows, repeats = sum(rows for rows, _ in found.values()), sum(each.result() for each in load_)
    return {"kills": done, "in_stages": staged, "exports": ENGINES * exports, "repeats": repeats, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write the figures to docs/figures.json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report = run(Path(name) / "life", kills=100, seed=asked.seed, exports=2500, pause_s=0.02)
    print(report)
    if asked.record:
        record("torture", report)


if __name__ == "__main__":
    sys.exit(be_a_victim(*sys.argv[2:]) if sys.argv[1:2] == ["--victim"] else main())
