"""One engine process's steps by step id: what summaries said and what journeys rebuild, as dense columns.

Step ids are 1, 2, 3 ... per process, one per ``schedule()`` call, so the index of a step is its id minus a base.
Requests add themselves to slices of the columns as their journeys arrive (addition commutes: order of arrival does not
matter). Bounded by ``steps_max``; steps far older than the newest are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from collector.decode import SnapshotColumns, StepColumns
from collector.telemetry import JoinEvent
from online import Floats, Mask

Cells = NDArray[np.void]
"""One record per step of a window, of SUMMARY_DTYPE or REBUILT_DTYPE."""


def _columns(**fields: str) -> np.dtype[np.void]:
    """Names of columns by their kind."""
    return np.dtype([(name, kind) for kind, names in fields.items() for name in names.split()], align=True)


SUMMARY_DTYPE = _columns(
    i8="ts_start_ns ts_end_ns ts_done_ns unix_ns duration_us context_tokens_single attention_pairs",
    f8="kv_usage_ratio",
    i4="running waiting prefill_requests decode_requests scheduled_tokens prefill_tokens decode_tokens finished "
    "preempted kv_blocks_total kv_blocks_free",
)
"""Per step, from its summary, what rows are made of; counts fit (COUNT_MAX)."""

REBUILT_DTYPE = _columns(
    f8="prefill_tokens prefill_attention context_tokens recomputed_tokens first_context_tokens snapshot_tokens "
    "snapshot_context_tokens waiting_tokens",
    i8="completed_ns completed_unix_ns scheduled_ns scheduled_unix_ns",
    f4="prefill_requests decode_requests decode_tokens first_requests snapshot_requests waiting_requests",
    bool="seen",
)
"""Per step, from journeys: what ran; ``first_*`` is the part of decode that is a request's first decode step (counted
as prefill by asynchronous summaries); the newest FIRST_TOKEN/FINISHED stamp and the oldest SCHEDULED stamp, 0 = none.
Counts of requests are whole and small: single precision holds them exactly."""

_SUMMARY_FIELDS = SUMMARY_DTYPE.names or ()
_GROWTH_STEPS = 1024
_GROWTH_PARTS = 8
"""A window grows by an eighth: twice as large would stand half empty."""


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


class StepWindow:
    """Dense columns over step ids [base, base + size), of which the newest ``steps_max`` are kept."""

    def __init__(self, steps_max: int) -> None:
        self._steps_max = steps_max
        self.base = 1
        self.newest_step = 0
        """Largest step id held; base - 1 where none is."""
        self.steps: Cells = np.zeros(_GROWTH_STEPS, SUMMARY_DTYPE)
        self.rebuilt: Cells = np.zeros(_GROWTH_STEPS, REBUILT_DTYPE)

    @property
    def size(self) -> int:
        """How many step ids are held."""
        return self.newest_step - self.base + 1

    def reach(self, first_step: int, last_step: int, keep_from: int) -> None:
        """Extend the window to ids first_step..last_step.

        Ids below the window are added only where rows have not left: from ``keep_from`` on, if that is not 0.
        """
        if self.size == 0:
            self.base, self.newest_step = first_step, first_step - 1
        newest = max(last_step, self.newest_step)
        oldest = newest - self._steps_max + 1
        if self.base < oldest:
            self.forget_before(oldest)
        first = min(self.base, max(first_step, keep_from, oldest))
        if first < self.base or newest - first >= len(self.steps):
            self.hold(first, newest)
        self.newest_step = newest

    def view(self, first_step: int, stop_step: int, *, asynchronous: bool = False) -> StepView:
        """Steps first_step..stop_step-1; ids outside the window read as never seen."""
        low, high = first_step - self.base, stop_step - self.base
        inner = slice(max(0, low), min(high, len(self.steps)))
        columns = []
        for held in (self.steps, self.rebuilt):
            column = held[inner]
            if len(column) < high - low:
                column = np.zeros(high - low, held.dtype)
                column[inner.start - low : inner.stop - low] = held[inner]
            columns.append(column)
        return StepView(*columns, asynchronous=asynchronous)

    def forget_until(self, unix_ns: int, keep_from: int) -> None:
        """Drop ids below ``keep_from`` whose steps are no younger than that."""
        behind = slice(0, max(keep_from - self.base, 0))
        younger = np.flatnonzero(self.rebuilt["seen"][behind] & (self.steps["unix_ns"][behind] > unix_ns))
        self.forget_before(self.base + int(younger[0]) if len(younger) else keep_from)

    def forget_before(self, step: int) -> None:
        """Drop ids below ``step`` and the memory that they took, when that is half of the columns."""
        if step - self.base >= max(_GROWTH_STEPS, self.size // 2):
            self.hold(step, self.newest_step)

    def add_summaries(
        self, steps: StepColumns, snapshots: SnapshotColumns, keep_from: int, count: Callable[[JoinEvent, int], None]
    ) -> None:
        """Place step summaries (any order), each once, with their request snapshots.

        Rows of steps below ``keep_from`` have left: their summaries are counted as late, and those that contradict the
        start of a known step as another engine's under this instance id.
        """
        step_ids, given = steps["step_id"], len(steps)
        self.reach(int(step_ids.min()), int(step_ids.max()), keep_from)
        held = step_ids >= self.base
        behind = given - int(np.count_nonzero(held))
        steps = steps[held]
        steps = steps[np.unique(steps["step_id"], return_index=True)[1]]
        index = steps["step_id"] - self.base
        known = self.rebuilt["seen"][index]
        other = int(np.count_nonzero(known & (self.steps["ts_start_ns"][index] != steps["ts_start_ns"])))
        index, steps = index[~known], steps[~known]
        for name in _SUMMARY_FIELDS:
            self.steps[name][index] = steps[name]
        self.rebuilt["seen"][index] = True
        count(JoinEvent.STEP_LATE, behind + int(np.count_nonzero(steps["step_id"] < keep_from)))
        count(JoinEvent.ENGINE_CONFLICT, other)
        count(JoinEvent.DUPLICATE, given - behind - len(steps) - other)
        if len(snapshots):
            self._add_snapshots(snapshots[np.isin(snapshots["step_id"], steps["step_id"])])

    def _add_snapshots(self, snapshots: SnapshotColumns) -> None:
        """Sum request snapshots per step: requests with output, tokens scheduled, context of those with output."""
        index = snapshots["step_id"] - self.base
        decoding = (snapshots["output_tokens"] > 0) & (snapshots["scheduled_tokens"] > 0)
        context = np.where(decoding, snapshots["computed_tokens"] + snapshots["scheduled_tokens"], 0)
        np.add.at(self.rebuilt["snapshot_requests"], index, decoding)
        np.add.at(self.rebuilt["snapshot_tokens"], index, snapshots["scheduled_tokens"])
        np.add.at(self.rebuilt["snapshot_context_tokens"], index, context)

    def hold(self, first_step: int, last_step: int) -> None:
        """Reallocate the columns for these ids and some more; ids outside are dropped."""
        size = max(last_step - first_step + 1, 0)
        kept = slice(max(first_step, self.base), min(last_step, self.newest_step) + 1)
        for name in ("steps", "rebuilt"):
            old: Cells = getattr(self, name)
            new = np.zeros(size + max(_GROWTH_STEPS, size // _GROWTH_PARTS), old.dtype)
            if kept.stop > kept.start:
                there, here = (slice(kept.start - base, kept.stop - base) for base in (first_step, self.base))
                # as bytes: copied record by record, a column takes five to ten times as long
                new[there].view(np.uint8)[:] = old[here].view(np.uint8)
            setattr(self, name, new)
        self.base, self.newest_step = first_step, first_step + size - 1
