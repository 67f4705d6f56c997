"""A gateway's join: what each held step takes, how long the worker is away to save the state, and the state's size.

    make bench WHAT=engines ARGS="--engines 500 --steps 4000 --requests 50"

Every engine's steps wait for their context to be known, so that all of them are held; so do its requests, which come
after the memory was looked at. Memory is what the process grows by between the first engine and the last. While a
thread of its own writes the state, every engine goes on sending: exports of 50 steps, and a finished request each,
which changes columns that are being saved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from collector.config import Config, DedupeConfig, JoinConfig
from collector.decode import STEP_DTYPE, CoreSpan, Finish, Mark, MarkKind, Telemetry
from collector.durable.store import StateStore
from collector.runtime import resident_bytes
from collector.worker import Pipeline, make_pipeline

STEP_NS = 20_000_000
PIECE_STEPS = 500
FRESH_STEPS = 50


def steps_of(engine: int, first: int, count: int) -> np.ndarray:
    """Steps of one busy engine, which finish no request."""
    steps = np.zeros(count, STEP_DTYPE)
    steps["step_id"] = np.arange(first, first + count)
    steps["ts_start_ns"] = 10**12 + engine * 1_000_003 + steps["step_id"] * STEP_NS
    steps["ts_end_ns"] = steps["ts_start_ns"] + 90_000
    steps["unix_ns"] = 1_790_000_000 * 10**9 + steps["ts_end_ns"]
    steps["running"] = steps["decode_requests"] = steps["decode_tokens"] = steps["scheduled_tokens"] = 8
    for name in ("ts_output_ns", "ts_done_ns", "context_tokens", "context_tokens_single", "context_tokens_multi"):
        steps[name] = -1
    for name in ("multi_requests", "multi_tokens", "attention_pairs"):
        steps[name] = -1
    steps["kv_blocks_total"], steps["kv_blocks_free"] = 60_000, 30_000
    return steps


def request_of(engine: int, last_step: int) -> CoreSpan:
    """A request of 20 steps, the last of which this is."""
    steps = (last_step - 20, last_step - 19, last_step - 19, last_step)
    kinds = (MarkKind.QUEUED, MarkKind.SCHEDULED, MarkKind.FIRST_TOKEN, MarkKind.FINISHED)
    times_ns = [10**12 + engine * 1_000_003 + step * STEP_NS for step in steps]
    marks = tuple(map(Mark, kinds, steps, times_ns, (0, 0, 1, 20)))
    identity = (engine << 32 | last_step).to_bytes(8, "big")
    wall_ns = 1_790_000_000 * 10**9
    return CoreSpan(identity, b"", identity * 2, "r", 100, marks, Finish.STOPPED, wall_ns, wall_ns + times_ns[-1])


def turn(pipeline: Pipeline, engine: int, last_step: int) -> float:
    """CPU seconds that an engine's next steps and a request of older ones take; nobody asks who it is."""
    steps, request = steps_of(engine, last_step + 1, FRESH_STEPS), request_of(engine, last_step)
    name = f"engine-{engine}"
    begun_s = time.thread_time()
    known = pipeline.joiner.engine_of(name)
    assert known is not None
    known.add(Telemetry(name, {}, steps=steps, core=[request]))
    return time.thread_time() - begun_s


class Saving:
    """The state is taken, then written by a thread of its own while the memory that the process takes is watched."""

    def __init__(self, pipeline: Pipeline, directory: Path) -> None:
        begun_s = time.thread_time()
        self._state = pipeline.whole_state()
        self.away_s = time.thread_time() - begun_s
        self._store = StateStore(directory)
        self._before = resident_bytes()
        self.grown_bytes = self.size_bytes = 0
        self.writer_s = 0.0
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        self.size_bytes = self._store.write(self._pieces(), 1)
        self.writer_s = time.thread_time()

    def _pieces(self) -> Iterator[bytes]:
        for piece in self._state.pieces():
            self.grown_bytes = max(self.grown_bytes, resident_bytes() - self._before)
            yield piece

    @property
    def over(self) -> bool:
        """Whether the state is on the disk."""
        return not self._thread.is_alive()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=500)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--requests", type=int, default=50)
    given = parser.parse_args()
    join = JoinConfig(engines_max=given.engines)
    pipeline = make_pipeline(Config(join=join, dedupe=DedupeConfig(emitters_max=given.engines), learners=("rls",)))
    before = resident_bytes()
    begun_s = time.process_time()
    for engine in range(given.engines):
        for first in range(1, given.steps + 1, PIECE_STEPS):
            count = min(PIECE_STEPS, given.steps + 1 - first)
            facts = {"vllm.model": "m"}
            pipeline.joiner.add(Telemetry(f"engine-{engine}", facts, steps=steps_of(engine, first, count)))
    pipeline.joiner.drain()
    added_s = time.process_time() - begun_s
    grown = resident_bytes() - before
    held = sum(one.steps for one in pipeline.waiting())
    whole_mb = resident_bytes() / 1e6
    for engine in range(given.engines):
        core = [request_of(engine, 30 + number) for number in range(given.requests)]
        pipeline.joiner.add(Telemetry(f"engine-{engine}", {}, core=core))
    waiting = sum(one.requests for one in pipeline.waiting())
    idle_s = [turn(pipeline, engine, given.steps) for engine in range(given.engines)]
    last_step, busy_s = given.steps + FRESH_STEPS, []
    with tempfile.TemporaryDirectory() as directory:
        saving = Saving(pipeline, Path(directory))
        while not saving.over:
            busy_s += [turn(pipeline, engine, last_step) for engine in range(given.engines) if not saving.over]
            last_step += FRESH_STEPS
    lines = (
        ("held steps", f"{held:,}", f"{given.engines * given.steps:,}"),
        ("requests that wait", f"{waiting:,}", f"{given.engines * given.requests:,}"),
        ("bytes per held step", f"{grown / held:.0f}", "300"),
        ("resident memory in all", f"{whole_mb:.0f} MB", "900 MB"),
        ("grown by what is held", f"{grown / 1e6:.0f} MB", ""),
        ("the worker is away to take the state", f"{saving.away_s * 1e3:.0f} ms CPU", "50 ms"),
        ("longest turn of an engine meanwhile", f"{max(busy_s) * 1e3:.1f} ms CPU of {len(busy_s)}", "50 ms"),
        ("the same without saving", f"{max(idle_s) * 1e3:.1f} ms CPU of {len(idle_s)}", ""),
        ("all of them longer by", f"{(np.mean(busy_s) - np.mean(idle_s)) * 1e3:.2f} ms CPU each", ""),
        ("writer, CPU", f"{saving.writer_s:.1f} s", ""),
        ("memory grows while saving by", f"{saving.grown_bytes / 1e6:.0f} MB", f"{grown / 1e6:.0f} MB"),
        ("state", f"{saving.size_bytes / 1e6:.0f} MB", ""),
        ("adding, CPU per step", f"{added_s / held * 1e6:.2f} us", ""),
    )
    for name, measured, target in lines:
        sys.stdout.write(f"{name:35} {measured:45} {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
