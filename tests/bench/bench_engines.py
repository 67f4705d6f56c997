"""A gateway's join: what each held step takes, how long the worker is away to save the state, and the state's size.

    make bench WHAT=engines ARGS="--engines 500 --steps 4000"

Every engine's steps wait for their context to be known, so that all of them are held. Memory is what the process grows
by between the first engine and the last.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from collector.config import Config, DedupeConfig, JoinConfig
from collector.decode import STEP_DTYPE, Telemetry
from collector.runtime import resident_bytes, tune_malloc
from collector.worker import make_pipeline

STEP_NS = 20_000_000
PIECE_STEPS = 500


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=500)
    parser.add_argument("--steps", type=int, default=4000)
    given = parser.parse_args()
    tune_malloc()
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
    begun_s = time.process_time()
    state = pipeline.whole_state()
    state_s = time.process_time() - begun_s
    lines = (
        ("held steps", f"{held:,}", f"{given.engines * given.steps:,}"),
        ("bytes per held step", f"{grown / held:.0f}", "300"),
        ("resident memory in all", f"{resident_bytes() / 1e6:.0f} MB (with the state's bytes)", "900 MB"),
        ("grown by what is held", f"{grown / 1e6:.0f} MB", ""),
        ("the worker is away for the state", f"{state_s * 1e3:.0f} ms CPU, in one piece", "50 ms"),
        ("state", f"{len(state) / 1e6:.0f} MB", ""),
        ("adding, CPU per step", f"{added_s / held * 1e6:.2f} us", ""),
    )
    for name, measured, target in lines:
        sys.stdout.write(f"{name:35} {measured:45} {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
