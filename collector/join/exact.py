"""Rows of an engine process that tells every step exactly: our producer plugin (``steps+``).

A summary has the contexts of the requests that ran and when the step was done, so nothing has to be rebuilt. In the
order of step ids,

    y(n) = done(n) - done(n - 1)            if step n - 1 had tokens
    y(n) = done(n) - start(n)               if it had none: the engine was idle until step n began

with no lag in either scheduling mode. Where nobody tells when step n - 1 was done, it is when step n began, unless the
engine is known to schedule asynchronously. An engine that has nothing to do makes an empty step and waits. Where that
step is not in the telemetry, step n began late by what no step took:

    idle(n) = max(start(n) - done(n - 1), 0)     if nobody waited, nobody decodes in n, and all that ran before have
                                                 ended, or no prompt of theirs can go on in n

Steps up to the watermark, ``allowed_lateness_s`` behind the newest event, give their rows; a step that is missing by
then and the one behind it give none.
"""

from __future__ import annotations

import numpy as np

from collector.decode import MISSING, StepColumns
from collector.join.rows import START, Stamps
from collector.join.window import Cells, StepView
from online import Mask


def tell_all(steps: StepColumns, *, asynchronous: bool) -> bool:
    """Whether summaries tell contexts, and when a step was done: until the next one begins, unless ``asynchronous``."""
    ends_told = (steps["ts_done_ns"] > 0) | (not asynchronous)
    return bool(((steps["context_tokens_single"] != MISSING) & ends_told).any())


def final_steps(view: StepView, watermark_unix_ns: int) -> int:
    """How many of these steps, from the first on, are final: those up to the watermark."""
    old = np.flatnonzero(view.seen & (view.steps["unix_ns"] <= watermark_unix_ns))
    return int(old[-1]) + 1 if len(old) else 0


def done_stamps(view: StepView) -> Stamps:
    """The boundaries 1..m-2 that m consecutive steps stamp (the edges lack a neighbour): when the step before was done.

    In its place stands when the next step begins, where nobody tells when the one before was done, where that had no
    tokens, and after a pause that no step took. A first step begins so, too, where nobody tells when it was done.
    """
    steps, seen, empty = view.steps, view.seen, view.steps["scheduled_tokens"] == 0
    at, before = slice(1, len(steps) - 1), slice(0, len(steps) - 2)
    wall_offset = steps["unix_ns"] - steps["ts_end_ns"]
    busy = seen[before] & ~empty[before] & (steps["ts_done_ns"][before] > 0)
    begins = ~busy & seen[at] & (seen[before] | (steps["ts_done_ns"][at] <= 0))
    start_ns = steps["ts_start_ns"][at]
    ns = np.where(busy, steps["ts_done_ns"][before], start_ns)
    unix_ns = ns + np.where(busy, wall_offset[before], wall_offset[at])
    resumed = busy & seen[at] & ~empty[at] & _resumed(steps[at], steps[before])
    begin_ns = np.where(resumed, np.maximum(start_ns, ns), ns)
    index = np.flatnonzero(busy | begins)
    return Stamps(index + 1, ns[index], unix_ns[index], np.full(len(index), START), begin_ns[index])


def _resumed(steps: Cells, before: Cells) -> Mask:
    """Mask of steps before which the engine may have been idle: nothing of the step before was left to do."""
    tokens = steps["prefill_tokens"].astype(np.int64)
    prompts_begin = (steps["attention_pairs"] > 0) & (2 * steps["attention_pairs"] <= tokens * (tokens + 1))
    nobody_left = (before["running"] <= steps["finished"]) | (before["prefill_requests"] == 0) | prompts_begin
    return np.asarray(nobody_left & (steps["decode_requests"] == 0) & (before["waiting"] == 0))


def overlaps(view: StepView) -> tuple[int, int]:
    """Count pairs of steps that show how an engine schedules, and those whose second step overlaps the first.

    Pairs beside an idle moment show nothing.
    """
    steps, busy = view.steps, view.seen & (view.steps["scheduled_tokens"] > 0)
    told = busy[:-1] & busy[1:] & (steps["ts_done_ns"][:-1] > 0)
    early = told & (steps["ts_start_ns"][1:] < steps["ts_done_ns"][:-1])
    return int(np.count_nonzero(told)), int(np.count_nonzero(early))
