"""Rows of a few steps are made together with those of the next ones, and no later than anybody could notice."""

from __future__ import annotations

import numpy as np
import pytest

from collector.config.learning_config import JoinConfig
from collector.decode.records import Telemetry
from collector.join.events import Rows
from collector.join.joiner import Joiner
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
            if isinstance(event, Rows):
                rows.setdefault(event.target, []).append(event.rows)
        return [
            (target, b"".join(each.end_ns.tobytes() for each in own), b"".join(each.raw.tobytes() for each in own))
            for target, own in sorted(rows.items())
        ]

    assert published(size) == published(10_000)
