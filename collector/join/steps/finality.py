"""Which steps are final: nothing that could still arrive would change their rows.

A step is final when its summary and its journeys agree (or its context needs no journeys); a hole, when the summaries
around it are complete and ``grace_s`` has passed; any step, when event time has passed it by ``window_s``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collector.config import JoinConfig
from collector.decode import StepColumns
from collector.telemetry import Wait
from online import Ints

from .raw_features import Rebuilt, complete
from .row_blocks import neighbours


def finality(
    steps: StepColumns,
    cells: NDArray[np.void],
    *,
    counts: Rebuilt | None,
    now_unix_ns: int,
    settings: JoinConfig,
) -> tuple[NDArray[np.bool_], Ints]:
    """Whether each step is final, and when it was by the wall clock (0 = nobody said), shapes (n,).

    Args:
        steps: summaries of n steps in order.
        cells: the same steps as journeys rebuild them.
        counts: what journeys say ran, where a step's context comes from them; None where it does not.
        now_unix_ns: the newest event.
        settings: ``grace_s`` and ``window_s``.
    """
    seen = cells["seen"]
    whole = seen if counts is None else seen & complete(steps, cells, counts)
    if seen.all():
        final, unix_ns = whole.copy(), steps["unix_ns"].copy()
    else:
        before, after = neighbours(seen)
        settled_unix_ns = now_unix_ns - int(settings.grace_s * 1e9)
        around = np.where(before >= 0, whole[before], True) & np.where(
            after >= 0, whole[after] & (steps["unix_ns"][after] <= settled_unix_ns), False
        )
        final = np.where(seen, whole, around)
        unix_ns = np.where(seen, steps["unix_ns"], np.maximum(cells["completed_unix_ns"], cells["scheduled_unix_ns"]))
    passed = np.flatnonzero((unix_ns > 0) & (unix_ns <= now_unix_ns - int(settings.window_s * 1e9)))
    if len(passed):
        final[: passed[-1] + 1] = True
    return final, unix_ns


class Passed(NamedTuple):
    """How many steps can be passed, and what the first that cannot waits for."""

    steps: int
    waits_for: Wait | None


def first_open(
    cells: NDArray[np.void], final: NDArray[np.bool_], settled: NDArray[np.bool_], *, journeys_tell: bool
) -> Passed:
    """Where passing ends; ``settled``: final, and their batches of KV events have had time to arrive."""
    open_steps = np.flatnonzero(~settled)
    if len(open_steps) == 0:
        return Passed(len(settled), None)
    step = int(open_steps[0])
    if final[step]:
        return Passed(step, Wait.KV_EVENTS)
    return Passed(step, Wait.JOURNEYS if journeys_tell and cells["seen"][step] else Wait.LATE_SPANS)
