"""Rows of a few steps are made together with those of the next ones, and no later than anybody could notice."""

from __future__ import annotations

import numpy as np
import pytest

from collector.config.learning_config import JoinConfig
from collector.decode.records import Telemetry
from collector.join.events import Rows
from collector.join.joiner import Joiner
from online import Lane
from tests.support.toy_engine import MONO_NS, many_jobs, run_engine
from tests.support.toy_spans import columns_of

SETTINGS = JoinConfig(warm_up_rows=8, grace_s=8, window_s=60)
PIECE = 10


def told(name: str, *, start_s: float = 0.0, seed: int = 1) -> list[Telemetry]:
    """An engine's steps, which say all, ten an export: a tenth of a second of event time."""
    steps = columns_of(run_engine(many_jobs(150, seed=seed), start_ns=MONO_NS + int(start_s * 1e9)))
    steps["context_tokens_single"] = 100 * steps["decode_requests"]
    steps["ts_done_ns"] = np.append(steps["ts_start_ns"][1:], steps["ts_end_ns"][-1] + 1000) - 1000
    return [
        Telemetry(name, {"vllm.model": "m"}, steps=steps[first : first + PIECE])
        for first in range(0, len(steps), PIECE)
    ]


def rows_told(joiner: Joiner, *exports: Telemetry, flush: bool = False) -> int:
    """Rows of the quick lane that these exports give at once."""
    for export in exports:
        joiner.add(export)
    events = joiner.drain(flush=flush)
    return sum(len(event.rows) for event in events if isinstance(event, Rows) and event.lane is Lane.QUICK)


def grown(joiner: Joiner, exports: list[Telemetry]) -> list[Telemetry]:
    """The exports that come after the engine's first block and a drain in which nothing was left."""
    assert rows_told(joiner, *exports[:40])
    return exports[40:]


def test_a_few_steps_wait_for_the_next_ones():
    joiner = Joiner(SETTINGS)
    exports = grown(joiner, told("a"))
    made = [rows_told(joiner, export) for export in exports[:60]]
    assert made.count(0) >= 50, "most exports of ten steps are put off"
    assert sum(made) >= 59 * PIECE - 512
    waited = np.diff(np.flatnonzero([*made, 1]))
    duration_s = [float(np.ptp(export.steps["unix_ns"])) / 1e9 for export in exports[:60]]
    assert waited.max() * max(duration_s) < 5.0, "no longer than four seconds and an export"


def test_many_steps_wait_for_nobody():
    joiner = Joiner(SETTINGS)
    exports = grown(joiner, told("a"))
    assert rows_told(joiner, *exports[:53]) >= 53 * PIECE - 2


def test_who_falls_silent_is_not_put_off_for_ever():
    joiner = Joiner(SETTINGS)
    mine, others = told("a"), told("b", seed=2)
    silent = grown(joiner, mine)
    others = grown(joiner, others)
    assert rows_told(joiner, silent[0]) == 0
    engine = joiner.engine_of("a")
    assert engine is not None
    before = engine.safe_unix_ns
    until_ns = before + int(SETTINGS.grace_s * 1e9)
    for export in others:
        rows_told(joiner, export)
        if export.steps["unix_ns"][-1] > until_ns:
            break
    assert engine.safe_unix_ns > before, "others' time has passed half of what rows wait for each other"


@pytest.mark.parametrize("size", [1, 3, 40])
def test_published_rows_are_the_same_however_they_come(size):
    def published(size: int) -> list[tuple[str, bytes, bytes]]:
        joiner, events = Joiner(SETTINGS), []
        exports = [export for pair in zip(told("a"), told("b", seed=2), strict=False) for export in pair]
        for first in range(0, len(exports), size):
            for export in exports[first : first + size]:
                joiner.add(export)
            events += joiner.drain()
        events += joiner.drain(flush=True)
        rows: dict[str, list[Rows]] = {}
        for event in events:
            if isinstance(event, Rows) and event.lane is Lane.PUBLISHED:
                rows.setdefault(event.target, []).append(event.rows)
        return [
            (target, b"".join(each.end_ns.tobytes() for each in own), b"".join(each.raw.tobytes() for each in own))
            for target, own in sorted(rows.items())
        ]

    assert published(size) == published(10_000)
