"""Two emitters on one engine (an instrumented vLLM with the producer plugin): told by their stamps, counted once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .emitter import Key
from .engine import Engine
from .window import StepWindow

_STEPS_MIN = 20
_TOLERANCE_NS = 50_000
"""Both read CLOCK_MONOTONIC at entry of the same schedule() call; they differ by 0.5-1.6 us (wire contract §9)."""
_SHARE_MIN = 0.9
"""Of the steps that both tell: two engines that begin in the same moment run side by side for their first ones."""


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
    """Whether the two agree on (step id, ts_start) for enough steps, and for nearly all that both tell."""
    first, second = a.newest_window, b.newest_window
    if first is None or second is None:
        return False
    low, high = max(first.base, second.base), min(first.newest_step, second.newest_step) + 1
    if high - low < _STEPS_MIN or all(_apart(first, second, step) for step in (high - 1, (low + high) // 2)):
        return False
    here, there = slice(low - first.base, high - first.base), slice(low - second.base, high - second.base)
    both = first.rebuilt["seen"][here] & second.rebuilt["seen"][there]
    apart = np.abs(first.steps["ts_start_ns"][here] - second.steps["ts_start_ns"][there])
    agreed = int(np.count_nonzero(both & (apart <= _TOLERANCE_NS)))
    return agreed >= max(_STEPS_MIN, _SHARE_MIN * int(np.count_nonzero(both)))


def _apart(first: StepWindow, second: StepWindow, step: int) -> bool:
    """Whether both tell this step, and do not agree: of a thousand engines nearly all are told apart by two steps."""
    here, there = step - first.base, step - second.base
    if not (first.rebuilt["seen"][here] and second.rebuilt["seen"][there]):
        return False
    return bool(abs(first.steps["ts_start_ns"][here] - second.steps["ts_start_ns"][there]) > _TOLERANCE_NS)
