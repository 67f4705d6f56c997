"""One engine process's steps by step id: what summaries said and what journeys rebuild, as dense columns.

Step ids are 1, 2, 3 ... per process, one per ``schedule()`` call, so the index of a step is its id minus a base.
Requests add themselves to slices of the columns as their journeys arrive (addition commutes: order of arrival does not
matter). Bounded by ``steps_max``; steps far older than the newest are forgotten.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collector.decode import SnapshotColumns, StepColumns

Cells = NDArray[np.void]
"""One record per step of a window, of SUMMARY_DTYPE or REBUILT_DTYPE."""

SUMMARY_DTYPE = np.dtype(
    [
        *((name, "i8") for name in ("ts_start_ns", "ts_end_ns", "ts_done_ns", "unix_ns", "duration_us")),
        ("context_tokens_single", "i8"),
        ("attention_pairs", "i8"),
        ("kv_usage_ratio", "f8"),
        *((name, "i4") for name in ("running", "waiting", "prefill_requests", "decode_requests", "multi_requests")),
        *((name, "i4") for name in ("scheduled_tokens", "prefill_tokens", "decode_tokens", "finished", "preempted")),
        ("kv_blocks_total", "i4"),
        ("kv_blocks_free", "i4"),
    ]
)
"""Per step, from its summary, what rows are made of; counts fit (COUNT_MAX). Wide fields first, so that all are
aligned."""

REBUILT_DTYPE = np.dtype(
    [
        *((name, "f8") for name in ("prefill_tokens", "prefill_attention", "context_tokens", "recomputed_tokens")),
        *((name, "f8") for name in ("first_context_tokens", "snapshot_tokens", "snapshot_context_tokens")),
        *((name, "f8") for name in ("waiting_tokens", "offload_blocks", "restore_blocks", "evicted_blocks")),
        *((name, "i8") for name in ("completed_ns", "completed_unix_ns", "scheduled_ns", "scheduled_unix_ns")),
        *((name, "f4") for name in ("prefill_requests", "decode_requests", "decode_tokens", "first_requests")),
        *((name, "f4") for name in ("snapshot_requests", "waiting_requests")),
        ("seen", "?"),
        ("unused", "u1", (7,)),
    ]
)
"""Per step, from journeys: what ran; ``first_*`` is the part of decode that is a request's first decode step (counted
as prefill by asynchronous summaries); the newest FIRST_TOKEN/FINISHED stamp and the oldest SCHEDULED stamp, 0 = none.
Counts of requests are whole and small: single precision holds them exactly."""

_SUMMARY_FIELDS = SUMMARY_DTYPE.names or ()
_GROWTH_STEPS = 1024
_GROWTH_PARTS = 8
"""A window grows by an eighth: twice as large would stand half empty."""


class StepWindow:
    """Dense columns over step ids [base, base + size)."""

    def __init__(self, first_step: int) -> None:
        self.base = first_step
        self.size = 0
        self.steps: Cells = np.zeros(_GROWTH_STEPS, SUMMARY_DTYPE)
        self.rebuilt: Cells = np.zeros(_GROWTH_STEPS, REBUILT_DTYPE)

    # --- columns ------------------------------------------------------------------------------------------------------

    @property
    def newest_step(self) -> int:
        """Largest step id held."""
        return self.base + self.size - 1

    def reach(self, first_step: int, last_step: int) -> None:
        """Make ids first_step..last_step addressable."""
        if self.size == 0:
            self.base = first_step
        if first_step < self.base:
            self._shift(first_step - self.base)
        needed = last_step - self.base + 1
        if needed > len(self.steps):
            capacity = needed + max(_GROWTH_STEPS, needed // _GROWTH_PARTS)
            self.steps = _grown(self.steps, capacity)
            self.rebuilt = _grown(self.rebuilt, capacity)
        self.size = max(self.size, needed)

    def reach_within(self, first_step: int, last_step: int, steps_max: int, *, keep_from: int) -> None:
        """As :meth:`reach`, of the newest ``steps_max`` ids; back only where rows have not left (``keep_from``)."""
        low = max(first_step, last_step - steps_max + 1)
        if self.size and low < self.base:
            oldest = max(keep_from, self.newest_step - steps_max + 1) if keep_from else low
            low = max(low, min(oldest, self.base))
        if last_step - self.base >= steps_max and self.size:
            self.forget_before(last_step - steps_max + 1)
            low = max(low, self.base)
        if low <= last_step:  # else all of it is late: it must not stretch the window back to where it was
            self.reach(low, last_step)

    def columns(self, first_step: int, stop_step: int) -> tuple[Cells, Cells]:
        """Summaries and rebuilt columns of first_step..stop_step-1; ids outside the window read as never seen."""
        low, high = first_step - self.base, stop_step - self.base
        if low >= 0 and high <= len(self.steps):
            return self.steps[low:high], self.rebuilt[low:high]
        front, back = max(0, -low), max(0, high - len(self.steps))
        inner = slice(max(0, low), min(high, len(self.steps)))
        no_steps = np.zeros(front + back, SUMMARY_DTYPE)
        no_cells = np.zeros(front + back, REBUILT_DTYPE)
        return (
            np.concatenate((no_steps[:front], self.steps[inner], no_steps[front:])),
            np.concatenate((no_cells[:front], self.rebuilt[inner], no_cells[front:])),
        )

    def speculative_steps(self, first_step: int, stop_step: int) -> int:
        """Steps of first_step..stop_step-1 with more decode tokens than decoding requests, if those were speculated.

        A request that was preempted computes its tokens anew, several in a step: a preemption in the window explains
        them too.
        """
        steps, cells = self.columns(first_step, stop_step)
        excess = cells["seen"] & (steps["decode_tokens"] > steps["decode_requests"])
        if not excess.any() or self.steps["preempted"][: max(0, stop_step - self.base)].any():
            return 0
        return int(np.count_nonzero(excess))

    def boundary_unix_ns(self, step: int, earliest_unix_ns: int) -> int:
        """Wall clock of the boundary at which ``step`` begins, as far as stamps tell; no earlier than the default."""
        index = min(step - self.base, len(self.rebuilt) - 1)
        if self.rebuilt["seen"][index]:
            return int(self.steps["unix_ns"][index])
        if index > 0 and self.rebuilt["seen"][index - 1] and (done_ns := int(self.steps["ts_done_ns"][index - 1])) > 0:
            return int(self.steps["unix_ns"][index - 1]) - int(self.steps["ts_end_ns"][index - 1]) + done_ns
        completed_unix_ns = self.rebuilt["completed_unix_ns"][max(0, index - 1)]
        return int(max(completed_unix_ns, self.rebuilt["scheduled_unix_ns"][index], earliest_unix_ns))

    def forget_until(self, unix_ns: int, otherwise: int, keep_from: int) -> None:
        """Drop ids below ``keep_from`` whose steps are no younger; where none is younger, those below ``otherwise``."""
        last = max(_GROWTH_STEPS, self.size // 2) - 1
        if last < self.size and not (self.rebuilt["seen"][last] and self.steps["unix_ns"][last] > unix_ns):
            younger = self.rebuilt["seen"][: self.size] & (self.steps["unix_ns"][: self.size] > unix_ns)
            first = self.base + int(np.argmax(younger)) if younger.any() else otherwise
            self.forget_before(min(first, keep_from))

    def forget_before(self, step: int) -> None:
        """Drop ids below ``step``; done lazily, when half of the columns would go."""
        gone = step - self.base
        if gone >= max(_GROWTH_STEPS, self.size // 2):
            self._shift(gone)

    def give_up_before(self, step: int) -> None:
        """Drop ids below ``step`` now, and the memory that they and others took."""
        if step > self.base:
            self._shift(step - self.base)
        capacity = max(_GROWTH_STEPS, self.size)
        if capacity < len(self.steps):
            self.steps, self.rebuilt = (_grown(column[:capacity], capacity) for column in (self.steps, self.rebuilt))

    def seen_before(self, step: int) -> int:
        """Summaries held of ids below ``step``."""
        return int(np.count_nonzero(self.rebuilt["seen"][: max(step - self.base, 0)]))

    def add_summaries(self, steps: StepColumns) -> tuple[int, int]:
        """Place summaries by id, which must be reachable and growing.

        Returns how many were new, and how many tell another start of a known step: another engine's, under one
        instance id.
        """
        index = steps["step_id"] - self.base
        known = self.rebuilt["seen"][index]
        other = 0
        if known.any():
            apart = self.steps["ts_start_ns"][index] != steps["ts_start_ns"]
            other = int(np.count_nonzero(known & apart))
            index, steps = index[~known], steps[~known]
        if len(index) == 0:
            return 0, other
        first, last = int(index[0]), int(index[-1])
        here: slice | NDArray[np.int64] = slice(first, last + 1) if last - first + 1 == len(index) else index
        for name in _SUMMARY_FIELDS:
            self.steps[name][here] = steps[name]
        self.rebuilt["seen"][here] = True
        return len(index), other

    def add_snapshots(self, snapshots: SnapshotColumns) -> None:
        """Sum request snapshots per step: requests with output, tokens scheduled, context of those with output."""
        index = snapshots["step_id"] - self.base
        inside = (index >= 0) & (index < self.size)
        index, snapshots = index[inside], snapshots[inside]
        decoding = (snapshots["output_tokens"] > 0) & (snapshots["scheduled_tokens"] > 0)
        context = np.where(decoding, snapshots["computed_tokens"] + snapshots["scheduled_tokens"], 0)
        np.add.at(self.rebuilt["snapshot_requests"], index, decoding)
        np.add.at(self.rebuilt["snapshot_tokens"], index, snapshots["scheduled_tokens"])
        np.add.at(self.rebuilt["snapshot_context_tokens"], index, context)

    def _shift(self, by: int) -> None:
        """Move the base by ``by`` ids (negative: make room in front)."""
        if by >= 0:
            kept = max(0, self.size - by)
            for column in (self.steps, self.rebuilt):
                _bytes(column[:kept])[:] = _bytes(column[by : by + kept])
                _bytes(column[kept : self.size])[:] = 0
            self.base, self.size = self.base + by, kept
            return
        self.steps = np.concatenate((np.zeros(-by, SUMMARY_DTYPE), self.steps))
        self.rebuilt = np.concatenate((np.zeros(-by, REBUILT_DTYPE), self.rebuilt))
        self.base, self.size = self.base + by, self.size - by


def _grown(array: NDArray[np.void], capacity: int) -> NDArray[np.void]:
    out = np.zeros(capacity, array.dtype)
    _bytes(out[: len(array)])[:] = _bytes(array)
    return out


def _bytes(cells: Cells) -> NDArray[np.uint8]:
    """The same memory: copied record by record, a column takes five to ten times as long."""
    return cells.view(np.uint8)
