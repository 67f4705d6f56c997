"""Two emitters on one engine (an instrumented vLLM with the producer plugin): told by their stamps, counted once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .emitter import Key
from .engine import Engine

_STEPS_MIN = 20
_TOLERANCE_NS = 50_000
"""Both read CLOCK_MONOTONIC at entry of the same schedule() call; they differ by 0.5-1.6 us (wire contract §9)."""


def find_double(engine: Engine, engines: Mapping[Key, Engine]) -> tuple[Engine, Engine, Key] | None:
    """Which of two emitters goes on, which one falls silent, and the key of that one; None without a second one."""
    for key, other in engines.items():
        if other is engine or other.recording != engine.recording or not same_engine(engine, other):
            continue
        if other.quality <= engine.quality:
            return other, engine, next(k for k, e in engines.items() if e is engine)
        return engine, other, key
    return None


def same_engine(a: Engine, b: Engine) -> bool:
    """Whether the two agree on (step id, ts_start) for enough steps."""
    first, second = a.newest_window, b.newest_window
    if first is None or second is None:
        return False
    low, high = max(first.base, second.base), min(first.newest_step, second.newest_step) + 1
    if high - low < _STEPS_MIN:
        return False
    here, there = slice(low - first.base, high - first.base), slice(low - second.base, high - second.base)
    both = first.rebuilt["seen"][here] & second.rebuilt["seen"][there]
    apart = np.abs(first.steps["ts_start_ns"][here] - second.steps["ts_start_ns"][there])
    return int(np.count_nonzero(both & (apart <= _TOLERANCE_NS))) >= _STEPS_MIN
