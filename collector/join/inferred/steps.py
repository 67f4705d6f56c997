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
from collector.join.window import Cells
from collector.telemetry import RowDrop
from online import Floats, Ints, Mask

if TYPE_CHECKING:
    from .calibration import EngineCalibration


class StepView:
    """Consecutive steps, shape (m,): their summaries, and what ran by journeys, counted as a summary counts.

    Asynchronous summaries count a request's first decode step as a one-token prefill (wire contract §5.6).
    """

    def __init__(self, steps: Cells, cells: Cells, *, asynchronous: bool) -> None:
        self.steps, self.cells, self.asynchronous = steps, cells, asynchronous
        self.seen: Mask = cells["seen"]
        first = cells["first_requests"] if asynchronous else 0.0
        self.prefill_requests: Floats = cells["prefill_requests"].astype(float) + first
        self.decode_requests: Floats = cells["decode_requests"].astype(float) - first
        self.prefill_tokens: Floats = cells["prefill_tokens"] + first
        self.context_tokens: Floats = cells["context_tokens"] - (cells["first_context_tokens"] if asynchronous else 0.0)
        self.requests = self.prefill_requests + self.decode_requests
        self.empty: Mask = np.where(self.seen, steps["scheduled_tokens"] == 0, self.requests == 0)

    @property
    def matched(self) -> Mask:
        """Steps whose journeys are all here: they count as the summary does (no false positive was seen)."""
        same_prefills = self.prefill_requests == self.steps["prefill_requests"]
        return np.asarray(self.seen & same_prefills & (self.decode_requests == self.steps["decode_requests"]))

    @property
    def snapped(self) -> Mask:
        """Steps whose request snapshots account for every scheduled token."""
        every_token = self.cells["snapshot_tokens"] == self.steps["scheduled_tokens"]
        return np.asarray(self.seen & every_token & (self.cells["snapshot_requests"] == self.steps["decode_requests"]))

    def overlaps(self) -> tuple[int, int]:
        """Count end stamps that show whether the engine waits for each step, and how many show that it does not.

        FIRST_TOKEN and FINISHED of step s come before ts_start(s + 1) if it does, after it if the next step is
        scheduled while s runs (wire contract §5.6). SCHEDULED of s + 1 tells the same where there is no summary.
        """
        completed_ns = self.cells["completed_ns"][:-1]
        next_ns = np.where(self.seen[1:], self.steps["ts_start_ns"][1:], self.cells["scheduled_ns"][1:])
        told = (completed_ns > 0) & (next_ns > 0)
        return int(np.count_nonzero(told)), int(np.count_nonzero(told & (completed_ns >= next_ns)))

    def stamps(self) -> Stamps:
        """The best stamp of every boundary 1..m-2 (the edges lack a neighbour)."""
        steps, cells = self.steps, self.cells
        inner, before = slice(1, len(steps) - 1), slice(0, len(steps) - 2)
        at = slice(2, len(steps)) if self.asynchronous else inner
        runs = ~self.empty[inner] if self.asynchronous else True
        start, scheduled = self.seen[at] & runs, (cells["scheduled_ns"][at] > 0) & runs
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


def completed_steps(view: StepView, *, by_journeys: bool, now_unix_ns: int, settings: Config) -> tuple[Mask, Ints]:
    """Whether each step is final, and when it was by the wall clock (0 = nobody said), shapes (m,).

    Args:
        view: steps in order.
        by_journeys: whether a step's context comes from its journeys.
        now_unix_ns: the newest event.
        settings: ``allowed_lateness_s`` and ``join_timeout_s``.
    """
    seen, unix_ns, cells = view.seen, view.steps["unix_ns"].copy(), view.cells
    final = view.matched if by_journeys else seen.copy()
    if not seen.all():
        before, after = neighbours(seen)
        old = unix_ns[after] <= now_unix_ns - settings.lateness_ns
        hole = np.where(before >= 0, final[before], True) & (after >= 0) & final[after] & old
        final = np.where(seen, final, hole)
        unix_ns = np.where(seen, unix_ns, np.maximum(cells["completed_unix_ns"], cells["scheduled_unix_ns"]))
    passed = np.flatnonzero((unix_ns > 0) & (unix_ns <= now_unix_ns - settings.timeout_ns))
    if len(passed):
        final[: passed[-1] + 1] = True
    return final, unix_ns


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


def drops(view: StepView, stamps: Stamps, usable: Mask, row_steps_max: int) -> list[tuple[RowDrop, Mask]]:
    """Masks of the intervals between consecutive stamps that give no row, by reason; (len(stamps.step) - 1,) each.

    Args:
        view: the steps that the stamps index.
        stamps: the stamped boundaries.
        usable: steps that have a summary, or of which journeys tell enough, shape (m,).
        row_steps_max: more steps make no row.
    """
    starts, here = stamps.step[:-1] - stamps.step[0], stamps.covered
    return [
        (RowDrop.INCOMPLETE, np.logical_or.reduceat(~usable[here], starts)),
        (RowDrop.IDLE, np.logical_or.reduceat(view.empty[here], starts)),
        (RowDrop.TIME_ORDER, stamps.elapsed_ns < 0),  # of none at all the learner says that the clock is too coarse
        (RowDrop.TOO_LONG, np.diff(stamps.step) > row_steps_max),
    ]


def trusted_missing_steps(view: StepView, *, sampled: bool) -> Mask:
    """Steps without a summary whose journeys can be trusted: those of the summaries around them are all here.

    Where journeys are ``sampled``, counts are scaled up, and none can be checked.
    """
    if sampled:
        return np.ones(len(view.seen), np.bool_)
    before, after = neighbours(view.seen)
    matched = view.matched
    return np.where(before >= 0, matched[before], True) & np.where(after >= 0, matched[after], True)
