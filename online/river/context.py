"""What a step's row carries beside the work that coefficients are about: the columns of the corrector.

    share of steps in which requests wait, are preempted, finish           kv usage, 0 to 1
    log2(1 + v) / 8, at most 1: requests waiting, running but not scheduled, blocks offloaded, restored, evicted

Every column is made with fixed numbers, so that its weight means the same in every process and at any time, and lies
between 0 and 1, so that one step of gradient descent cannot overshoot. What a row does not know is 0.
"""

from __future__ import annotations

import numpy as np

from online.features import Column, FeatureSet, Formula, Raw
from online.rows import Floats, Target

_LOG_SCALE = 8.0  # log2 of 255 + 1


def _share(name: str) -> Formula:
    return lambda raw: (np.nan_to_num(raw[name]) > 0.0).astype(np.float64)


def _many(value: Floats) -> Floats:
    known = np.maximum(np.nan_to_num(value, posinf=0.0), 0.0)
    return np.minimum(np.log2(1.0 + known) / _LOG_SCALE, 1.0)


def _log(name: str) -> Formula:
    return lambda raw: _many(raw[name])


def _idle(raw: Raw) -> Floats:
    return _many(raw["running"] - raw["requests"])


def _usage(raw: Raw) -> Floats:
    return np.minimum(np.maximum(np.nan_to_num(raw["kv_usage_ratio"]), 0.0), 1.0)


_COLUMNS: tuple[tuple[str, Formula], ...] = (
    ("queued", _share("waiting")),
    ("waiting", _log("waiting")),
    ("idle", _idle),
    ("kv_usage", _usage),
    ("preempted", _share("preempted")),
    ("finished", _share("finished")),
    ("offloaded", _log("offload_blocks")),
    ("restored", _log("restore_blocks")),
    ("evicted", _log("evicted_blocks")),
)

CONTEXT = FeatureSet("context", Target.STEP_TIME, tuple(Column(name, "", formula) for name, formula in _COLUMNS))
"""No feature set to choose: nothing is fitted to it but the corrector."""
