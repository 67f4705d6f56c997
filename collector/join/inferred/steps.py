"""Steps that have to be rebuilt: what ran in them, when they are final, where their rows begin and end.

What is stamped at boundary b (wire contract §5.4, §5.6):

    kind        synchronous            asynchronous
    start       ts_start(b)            ts_start(b + 1), if step b has tokens     reference, no phase
    completed   end stamps of b - 1    end stamps of b - 1                       reference where there is no start stamp
    scheduled   SCHEDULED of b         SCHEDULED of b + 1, as start

Each boundary keeps its best stamp.

A step with a summary takes everything from it but the decode context, which most summaries do not carry: that comes
from the step's journeys if all are here, else from request snapshots, else from KV blocks in use. A step without a
summary is rebuilt from journeys: so are the requests that run in it. What is not known is NaN; nothing is interpolated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from collector.config import Config
from collector.join.rows import COLUMN, COMPLETED, SCHEDULED, START, Stamps, raw_features, summary_features
from collector.join.window import StepView
from online import Floats, Ints, Mask

if TYPE_CHECKING:
    from .calibration import EngineCalibration


def overlaps(view: StepView) -> tuple[int, int]:
    """Count end stamps that show whether the engine waits for each step, and how many show that it does not.

    FIRST_TOKEN and FINISHED of step s come before ts_start(s + 1) if it does, after it if the next step is scheduled
    while s runs (wire contract §5.6). SCHEDULED of s + 1 tells the same where there is no summary.
    """
    completed_ns = view.cells["completed_ns"][:-1]
    next_ns = np.where(view.seen[1:], view.steps["ts_start_ns"][1:], view.cells["scheduled_ns"][1:])
    told = (completed_ns > 0) & (next_ns > 0)
    return int(np.count_nonzero(told)), int(np.count_nonzero(told & (completed_ns >= next_ns)))


def best_stamps(view: StepView) -> Stamps:
    """The best stamp of every boundary 1..m-2 (the edges lack a neighbour)."""
    steps, cells = view.steps, view.cells
    inner, before = slice(1, len(steps) - 1), slice(0, len(steps) - 2)
    at = slice(2, len(steps)) if view.asynchronous else inner
    runs = ~view.empty[inner] if view.asynchronous else True
    start, scheduled = view.seen[at] & runs, (cells["scheduled_ns"][at] > 0) & runs
    completed = cells["completed_ns"][before] > 0
    begin_ns, wall_ns = steps["ts_start_ns"][at], steps["unix_ns"][at] - steps["ts_end_ns"][at]
    ns = np.where(start, begin_ns, np.where(completed, cells["completed_ns"][before], cells["scheduled_ns"][at]))
    unix_ns = np.where(completed, cells["completed_unix_ns"][before], cells["scheduled_unix_ns"][at])
    unix_ns = np.where(start, begin_ns + wall_ns, unix_ns)
    kind = np.where(start, START, np.where(completed, COMPLETED, SCHEDULED))
    index = np.flatnonzero(start | completed | scheduled)
    return Stamps(index + 1, ns[index], unix_ns[index], kind[index], ns[index])


def neighbours(seen: Mask) -> tuple[Ints, Ints]:
    """Index of the nearest seen step at or before, and at or after, each step; -1 where there is none."""
    index = np.arange(len(seen))
    before = np.maximum.accumulate(np.where(seen, index, -1))
    after = np.minimum.accumulate(np.where(seen, index, len(seen))[::-1])[::-1]
    return before, np.where(after == len(seen), -1, after)


def final_steps(view: StepView, settings: Config, now_unix_ns: int, *, by_journeys: bool, by_kv: bool) -> int:
    """How many of these steps, from the first on, are final at the time of the newest event.

    ``by_journeys``: a step's context comes from its journeys; ``by_kv``: KV events, which may come late, tell of moves.
    """
    seen, unix_ns, cells = view.seen, view.steps["unix_ns"].copy(), view.cells
    on_time_unix_ns = now_unix_ns - settings.lateness_ns
    final = view.matched if by_journeys else seen.copy()
    if not seen.all():
        before, after = neighbours(seen)
        old = unix_ns[after] <= on_time_unix_ns
        hole = np.where(before >= 0, final[before], True) & (after >= 0) & final[after] & old
        final = np.where(seen, final, hole)
        unix_ns = np.where(seen, unix_ns, np.maximum(cells["completed_unix_ns"], cells["scheduled_unix_ns"]))
    passed = np.flatnonzero((unix_ns > 0) & (unix_ns <= now_unix_ns - settings.timeout_ns))
    if len(passed):
        final[: passed[-1] + 1] = True
    return leading(final & (unix_ns <= on_time_unix_ns) if by_kv else final)


def leading(mask: Mask) -> int:
    """Number of true values before the first false one."""
    return len(mask) if mask.all() else int(mask.argmin())


def step_features(view: StepView, calibration: EngineCalibration) -> Floats:
    """Raw features, shape (m, len(STEP_FEATURES))."""
    steps, cells = view.steps, view.cells
    raw, matched = summary_features(steps), view.matched
    context = np.where(matched, view.context_tokens, calibration.context_by_blocks(steps))
    context = np.where(view.snapped, cells["snapshot_context_tokens"], context)
    context = np.where(steps["decode_requests"] == 0, 0.0, context)
    attention = np.where(matched | (steps["prefill_requests"] == 0), cells["prefill_attention"], np.nan)
    for name, inferred in (("decode_context_tokens", context), ("prefill_attention", attention)):
        told = raw[:, COLUMN[name]]
        raw[:, COLUMN[name]] = np.where(np.isnan(told), inferred, told)
    holes = np.flatnonzero(~view.seen)
    if len(holes):
        raw[holes] = _rebuilt_features(view, calibration)[holes]
    return raw


def _rebuilt_features(view: StepView, calibration: EngineCalibration) -> Floats:
    """The same by journeys alone; scaled up where they are sampled."""
    scale = calibration.missing_step_scale
    requests, decoding = view.requests * scale, view.decode_requests * scale
    return raw_features(
        {
            "prefill_tokens": view.prefill_tokens * scale + view.cells["recomputed_tokens"],
            "prefill_attention": view.cells["prefill_attention"] * scale,
            "prefill_requests": view.prefill_requests * scale,
            "decode_requests": decoding,
            "decode_tokens": decoding,
            "decode_context_tokens": view.context_tokens * scale,
            "requests": requests,
            "running": requests,
        }
    )


def trusted_missing_steps(view: StepView, *, sampled: bool) -> Mask:
    """Steps without a summary whose journeys can be trusted: those of the summaries around them are all here.

    Where journeys are ``sampled``, counts are scaled up, and none can be checked.
    """
    if sampled:
        return np.ones(len(view.seen), np.bool_)
    before, after = neighbours(view.seen)
    matched = view.matched
    return np.where(before >= 0, matched[before], True) & np.where(after >= 0, matched[after], True)
