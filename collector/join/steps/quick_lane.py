"""Rows of the quick lane: steps timed by summaries, at once, with what is known of them now.

Outside invariant 4: what is known of a step's context depends on what has come.
"""

from __future__ import annotations

import numpy as np

from collector.join.window import StepWindow
from online import RowBlock

from . import boundaries
from .process_context import ProcessContext
from .raw_features import ContextSource, step_features
from .row_blocks import Columns
from .scheduling import Scheduling


def quick_rows(
    window: StepWindow, context: ProcessContext, first_step: int, last_step: int, *, engine: int
) -> RowBlock | None:
    """Rows of steps first_step..last_step that have given none; None while boundaries cannot be told."""
    mode = context.votes.decided
    if mode is Scheduling.UNKNOWN and not context.has_done_stamps:
        return None
    first = max(first_step - 2, window.base) - 1
    asynchronous = mode is Scheduling.ASYNC
    around = Columns.of(*window.columns(first, last_step + 2), asynchronous=asynchronous)
    index, elapsed_us = boundaries.pairs(
        around.steps, around.cells, around.empty, asynchronous=asynchronous, done=context.has_done_stamps
    )
    new = ~around.cells["quick"][index]
    index, elapsed_us = index[new], elapsed_us[new]
    if len(index) == 0:
        return None
    window.own_from(first + int(index.min()))
    window.rebuilt["quick"][index + (first - window.base)] = True
    chosen = around.take(index)
    raw = step_features(
        chosen.steps,
        chosen.cells,
        chosen.counts,
        source=context.source or ContextSource.BLOCKS,
        ratio=context.habits.ratio,
        hole_scale=1.0,
        kv_events=False,
    )
    end_ns = chosen.steps["unix_ns"] + (elapsed_us * 1e3).astype(np.int64)
    return RowBlock.of_lines(raw, elapsed_us, end_ns=end_ns, engine=engine, quality=context.quality)
