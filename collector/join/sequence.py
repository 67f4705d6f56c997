"""One engine process's telemetry in step order, and the rows it gives.

Rows leave strictly in step order, behind a frontier. A step is final when nothing that could still arrive would change
its row: its summary and its journeys agree (or its context needs no journeys); a hole, when the summaries around it are
complete and ``grace_s`` has passed; any step, when event time has passed it by ``window_s``. So the rows are a function of
the telemetry alone, not of the order or the pieces in which it came.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from collector.decode.records import MISSING, CoreSpan, MarkKind, SnapshotColumns, StepColumns
from online.rows import STEP_FEATURES, Ints, Quality, RowBlock

from . import boundaries, journeys
from .features import (
    BlockRatio,
    ContextSource,
    Rebuilt,
    complete,
    rebuilt_counts,
    snapshot_complete,
    step_features,
)
from .reasons import JoinEvent, RowDrop
from .scheduling import Scheduling, SchedulingVotes
from .settings import JoinSettings
from .window import StepWindow

Bools = NDArray[np.bool_]

_PARTIAL_SHARE = 0.97
"""Below this share of rebuilt requests in summaries, journeys are sampled: rebuilt counts are scaled up."""
_RATIO_DECAY = 0.98
_PARTIAL_DECAY = 0.98
_PARTIAL_REQUESTS_MIN = 32.0


@dataclass(slots=True)
class Advance:
    """What one step of the frontier gave."""

    rows: RowBlock
    schedule_rows: RowBlock
    drops: Counter[RowDrop] = field(default_factory=Counter)
    events: Counter[JoinEvent] = field(default_factory=Counter)


class Sequence:
    """Steps of one engine process, from its first to its restart."""

    def __init__(self, settings: JoinSettings, engine: int, ratio: BlockRatio) -> None:
        self._settings = settings
        self._engine = engine
        self.ratio = ratio
        self.window: StepWindow | None = None
        self.frontier = 0
        self.event_unix_ns = 0
        self.first_unix_ns = 0
        self.votes = SchedulingVotes()
        self.scheduling_fact = Scheduling.UNKNOWN
        self.budget_fact_tokens: float | None = None
        self.has_summaries = False
        self.has_journeys = False
        self.has_exact_context = False
        self.has_done_stamps = False
        self.has_kv_events = False
        self._chunks: list[journeys.Chunks] = []
        self._scheduled_tokens_max = 0
        self._first_finish_unix_ns = 0
        self._longest_run_ns = 0
        self._rebuilt_requests = 0.0
        self._summary_requests = 0.0
        self._holes = 0.0
        self._steps = 0.0

    # --- in ---------------------------------------------------------------------------------------------------------

    def add_summaries(self, steps: StepColumns, snapshots: SnapshotColumns) -> Counter[JoinEvent]:
        """Add step summaries (any order) and request snapshots of this process."""
        events: Counter[JoinEvent] = Counter()
        if len(steps):
            window = self._reach(int(steps["step_id"].min()), int(steps["step_id"].max()))
            fresh = steps[steps["step_id"] >= window.base]
            unique = np.unique(fresh["step_id"], return_index=True)[1]
            new = window.add_summaries(fresh[unique])
            events[JoinEvent.STEP_LATE] += len(steps) - len(fresh)
            events[JoinEvent.STEP_DUPLICATE] += len(fresh) - new
            self._note_times(int(steps["unix_ns"].min()), int(steps["unix_ns"].max()))
            self._note_summaries(steps)
        if len(snapshots) and self.window is not None:
            self.window.add_snapshots(snapshots)
        return events

    def add_request(self, span: CoreSpan) -> Counter[JoinEvent]:
        """Add one finished request of this process."""
        events: Counter[JoinEvent] = Counter()
        self.has_journeys = True
        last = span.marks[-1]
        self._note_times(last.ts_ns + span.unix_minus_mono_ns, last.ts_ns + span.unix_minus_mono_ns)
        extent = journeys.steps_of(span)
        if extent is None:
            events[JoinEvent.JOURNEY_UNSCHEDULED] += 1
            return events
        if extent[1] - extent[0] >= self._settings.steps_max:
            events[JoinEvent.JOURNEY_LATE] += 1
            return events
        window = self._reach(*extent)
        if extent[0] < window.base:
            events[JoinEvent.JOURNEY_LATE] += 1
            return events
        if self.frontier and extent[0] < self.frontier:
            events[JoinEvent.JOURNEY_LATE] += 1
        self._chunks += journeys.lay(span, window)
        first = next(mark for mark in span.marks if mark.kind is MarkKind.SCHEDULED)
        self._longest_run_ns = max(self._longest_run_ns, last.ts_ns - first.ts_ns)
        return events

    def _reach(self, first_step: int, last_step: int) -> StepWindow:
        if self.window is None:
            self.window = StepWindow(first_step)
            self.frontier = 0
        window = self.window
        low = max(first_step, last_step - self._settings.steps_max + 1)
        if window.size and low < window.base:
            oldest = max(self.frontier, window.newest_step - self._settings.steps_max + 1) if self.frontier else low
            low = max(low, min(oldest, window.base))
        if last_step - window.base >= self._settings.steps_max and window.size:
            window.forget_before(last_step - self._settings.steps_max + 1)
            low = max(low, window.base)
        window.reach(min(low, last_step), last_step)
        return window

    def _note_times(self, oldest_unix_ns: int, newest_unix_ns: int) -> None:
        self.event_unix_ns = max(self.event_unix_ns, newest_unix_ns)
        self.first_unix_ns = min(self.first_unix_ns or oldest_unix_ns, oldest_unix_ns)

    def _note_summaries(self, steps: StepColumns) -> None:
        self.has_summaries = True
        self.has_exact_context = self.has_exact_context or bool((steps["context_tokens_single"] != MISSING).any())
        self.has_done_stamps = self.has_done_stamps or bool((steps["ts_done_ns"] > 0).any())
        self._scheduled_tokens_max = max(self._scheduled_tokens_max, int(steps["scheduled_tokens"].max()))
        finishing = steps["unix_ns"][steps["finished"] > 0]
        if len(finishing):
            earliest = int(finishing.min())
            self._first_finish_unix_ns = min(self._first_finish_unix_ns or earliest, earliest)

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """Newest step id heard of."""
        return self.window.newest_step if self.window is not None else 0

    @property
    def quality(self) -> Quality:
        """Telemetry quality: what the rows of this process are made from."""
        if not self.has_summaries:
            return Quality.JOURNEYS
        if self.has_exact_context:
            return Quality.STEPS_PLUS
        return Quality.SAMPLED if self._holes > (1 - _STEPS_SHARE) * self._steps else Quality.STEPS

    @property
    def context_source(self) -> ContextSource | None:
        """None while it cannot be told yet whether journeys will come."""
        if self.has_exact_context:
            return ContextSource.EXACT
        if self.has_journeys:
            return ContextSource.JOURNEYS
        grace_ns, window_ns = self._settings.grace_s * 1e9, self._settings.window_s * 1e9
        finished = self._first_finish_unix_ns and self.event_unix_ns >= self._first_finish_unix_ns + grace_ns
        if finished or self.event_unix_ns >= self.first_unix_ns + window_ns:
            return ContextSource.BLOCKS
        return None

    @property
    def hole_scale(self) -> float:
        """1 ÷ the share of requests whose journeys are sent; 1 while it looks complete."""
        if self._summary_requests < _PARTIAL_REQUESTS_MIN or self._rebuilt_requests <= 0:
            return 1.0
        share = self._rebuilt_requests / self._summary_requests
        return 1.0 / share if share < _PARTIAL_SHARE else 1.0

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        if self.window is None or not self.frontier:
            return self.first_unix_ns
        cells, steps = self.window.rebuilt, self.window.steps
        index = self.frontier - self.window.base
        if cells["seen"][index]:
            return int(steps["unix_ns"][index])
        before = max(0, index - 1)
        return int(max(cells["completed_unix_ns"][before], cells["scheduled_unix_ns"][index], self.first_unix_ns))

    # --- out --------------------------------------------------------------------------------------------------------

    def advance(self, *, flush: bool = False) -> Advance:
        """Move the frontier over every final step and return the rows passed; ``flush``: nothing more will come."""
        nothing = RowBlock.empty(STEP_FEATURES)
        out = Advance(nothing, nothing)
        source = self.context_source or (ContextSource.BLOCKS if flush else None)
        window = self.window
        if window is None or window.size == 0 or source is None:
            return out
        first = self.frontier or window.base
        mode = self._mode(first, flush=flush)
        if mode is Scheduling.UNKNOWN:
            return out
        asynchronous = mode is Scheduling.ASYNC
        stop = window.newest_step + 2 if flush else self._final_stop(first, source, asynchronous=asynchronous)
        if stop <= first:
            return out
        budget = self.budget_fact_tokens or (self._scheduled_tokens_max or None)
        self._chunks = journeys.split_chunks(self._chunks, window, stop, budget, asynchronous=asynchronous)
        settled = stop if flush or not asynchronous else stop - 1
        self._emit(first, settled, source, out, asynchronous=asynchronous, flush=flush)
        self._forget()
        return out

    def _mode(self, first: int, *, flush: bool) -> Scheduling:
        if self.votes.decided is not Scheduling.UNKNOWN:
            return self.votes.decided
        steps, cells = self._columns(first, self.last_step + 1)
        mode = self.votes.provisional(steps, cells)
        if mode is Scheduling.UNKNOWN and (flush or not self.has_journeys):
            mode = self.scheduling_fact
            if mode is Scheduling.UNKNOWN:
                self.votes.settle(steps, cells) if flush else None
                mode = self.votes.decided if flush else Scheduling.SYNC
        return mode

    def _columns(self, first: int, stop: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Copies-on-need of the columns of steps first..stop-1; ids outside the window read as never seen."""
        window = self.window
        assert window is not None  # noqa: S101 callers hold it
        low, high = first - window.base, stop - window.base
        if low >= 0 and high <= len(window.steps):
            return window.steps[low:high], window.rebuilt[low:high]
        front, back = max(0, -low), max(0, high - len(window.steps))
        inner = slice(max(0, low), min(high, len(window.steps)))
        pad = [(front, back)]
        zero_steps = np.zeros(front + back, window.steps.dtype)
        zero_cells = np.zeros(front + back, window.rebuilt.dtype)
        del pad
        return (
            np.concatenate((zero_steps[:front], window.steps[inner], zero_steps[front:])),
            np.concatenate((zero_cells[:front], window.rebuilt[inner], zero_cells[front:])),
        )

    def _final_stop(self, first: int, source: ContextSource, *, asynchronous: bool) -> int:
        """First step that is not final."""
        steps, cells = self._columns(first, self.last_step + 1)
        seen = cells["seen"]
        whole = seen.copy()
        if source is ContextSource.JOURNEYS:
            whole &= complete(steps, cells, rebuilt_counts(cells, asynchronous=asynchronous))
        before, after = _neighbours(seen)
        settled_unix = self.event_unix_ns - int(self._settings.grace_s * 1e9)
        around = np.where(before >= 0, whole[before], True) & np.where(
            after >= 0, whole[after] & (steps["unix_ns"][after] <= settled_unix), False
        )
        final = np.where(seen, whole, around)
        unix = np.where(seen, steps["unix_ns"], np.maximum(cells["completed_unix_ns"], cells["scheduled_unix_ns"]))
        passed = np.flatnonzero((unix > 0) & (unix <= self.event_unix_ns - int(self._settings.window_s * 1e9)))
        if len(passed):
            final[: passed[-1] + 1] = True
        open_steps = np.flatnonzero(~final)
        return first + int(open_steps[0]) if len(open_steps) else first + len(final)

    def _emit(
        self, first: int, stop: int, source: ContextSource, out: Advance, *, asynchronous: bool, flush: bool
    ) -> None:
        """Rows between the stamped boundaries first..stop-1."""
        steps, cells = self._columns(first - 1, stop + 1)
        counts = rebuilt_counts(cells, asynchronous=asynchronous)
        empty = boundaries.empty_steps(steps, cells, counts.prefill_requests + counts.decode_requests)
        if self.has_done_stamps:
            found = boundaries.done_stamps(steps, cells, empty)
        else:
            found = boundaries.stamps(steps, cells, empty, asynchronous=asynchronous)
        if len(found.step) == 0:
            return
        self._learn_from(steps, cells, counts, found, out)
        self.frontier = first - 1 + int(found.step[-1])
        low, high = int(found.step[0]), int(found.step[-1])
        if high == low:
            return
        here = slice(low, high)
        raw = step_features(
            steps[here],
            cells[here],
            _cut(counts, here),
            source=source,
            ratio=self.ratio,
            hole_scale=self.hole_scale,
            kv_events=self.has_kv_events,
        )
        offsets = found.step - low
        bad = self._drops(steps, cells, counts, empty, found, offsets, here, flush=flush)
        self._pack(raw, offsets, found, cells[here]["seen"], bad, out)
        timed = cells["seen"][here] & ~empty[here]
        lines = np.flatnonzero(timed)
        out.schedule_rows = RowBlock.of_lines(
            raw[lines],
            steps["duration_us"][here][lines].astype(float),
            end_ns=steps["unix_ns"][here][lines].copy(),
            engine=self._engine,
            quality=self.quality,
        )

    def _pack(
        self,
        raw: NDArray[np.float64],
        offsets: Ints,
        found: boundaries.Stamps,
        seen: Bools,
        bad: list[tuple[RowDrop, Bools]],
        out: Advance,
    ) -> None:
        n = len(offsets) - 1
        keep = np.ones(n, bool)
        for reason, mask in bad:
            out.drops[reason] += int(np.count_nonzero(mask & keep))
            keep &= ~mask
        seen_in_row = np.add.reduceat(seen.astype(np.int64), offsets[:-1])
        whole = seen_in_row == np.diff(offsets)
        quality = np.where(whole, int(min(self.quality, Quality.STEPS)), int(Quality.SAMPLED))
        if not self.has_summaries:
            quality[:] = int(Quality.JOURNEYS)
        block = RowBlock(
            raw=raw,
            offsets=offsets.astype(np.int64),
            elapsed_us=np.diff(found.ns) / 1e3,
            phase=boundaries.phase_columns(found.kind, has_start=self.has_summaries),
            weight=np.ones(n),
            end_ns=found.unix_ns[1:].astype(np.int64),
            engine=np.full(n, self._engine, np.int64),
            quality=quality.astype(np.int64),
        )
        out.rows = block if keep.all() else block.take(keep)

    def _drops(
        self,
        steps: NDArray[np.void],
        cells: NDArray[np.void],
        counts: Rebuilt,
        empty: Bools,
        found: boundaries.Stamps,
        offsets: Ints,
        here: slice,
        *,
        flush: bool,
    ) -> list[tuple[RowDrop, Bools]]:
        """Which rows give no equation, by reason, first reason first."""
        starts = offsets[:-1]
        idle = np.logical_or.reduceat(empty[here], starts)
        holes = ~cells["seen"][here]
        doubtful = holes & ~self._credible(steps, cells, counts)[here]
        incomplete = np.logical_or.reduceat(doubtful, starts)
        if flush:
            _, after = _neighbours(cells["seen"])
            beyond = np.logical_or.reduceat(holes & (after[here] < 0), starts)
            incomplete |= beyond & (found.unix_ns[1:] > self.event_unix_ns - self._longest_run_ns)
        elapsed = np.diff(found.ns)
        return [
            (RowDrop.IDLE, idle & ~incomplete),
            (RowDrop.INCOMPLETE, incomplete),
            (RowDrop.TIME_ORDER, elapsed <= 0),
            (RowDrop.TOO_LONG, np.diff(offsets) > self._settings.row_steps_max),
        ]

    def _credible(self, steps: NDArray[np.void], cells: NDArray[np.void], counts: Rebuilt) -> Bools:
        """Holes whose rebuilt batch can be trusted: the summaries around them agree with their journeys."""
        seen = cells["seen"]
        if not self.has_journeys:
            return np.zeros(len(seen), bool)
        if self.hole_scale != 1.0:
            return np.ones(len(seen), bool)
        matched = complete(steps, cells, counts)
        before, after = _neighbours(seen)
        return np.where(before >= 0, matched[before], True) & np.where(after >= 0, matched[after], True)

    def _learn_from(
        self,
        steps: NDArray[np.void],
        cells: NDArray[np.void],
        counts: Rebuilt,
        found: boundaries.Stamps,
        out: Advance,
    ) -> None:
        """What passed steps teach about the engine itself: its mode, its block ratio, how many journeys are sent."""
        passed = slice(1, max(1, int(found.step[-1])))
        self.votes.add(steps[: passed.stop + 1], cells[: passed.stop + 1])
        steps, cells, counts = steps[passed], cells[passed], _cut(counts, passed)
        seen = cells["seen"] & (steps["scheduled_tokens"] > 0)
        self._steps = _PARTIAL_DECAY * self._steps + len(steps)
        self._holes = _PARTIAL_DECAY * self._holes + int(np.count_nonzero(~cells["seen"]))
        if not self.has_journeys or not seen.any():
            return
        matched = complete(steps, cells, counts)
        out.events[JoinEvent.STEP_MATCHED] += int(np.count_nonzero(seen & matched))
        out.events[JoinEvent.STEP_MISMATCHED] += int(np.count_nonzero(seen & ~matched))
        rebuilt = counts.prefill_requests + counts.decode_requests
        summary = steps["prefill_requests"] + steps["decode_requests"]
        self._rebuilt_requests = _PARTIAL_DECAY * self._rebuilt_requests + float(rebuilt[seen].sum())
        self._summary_requests = _PARTIAL_DECAY * self._summary_requests + float(summary[seen].sum())
        snapped = snapshot_complete(steps, cells)
        exact = seen & (steps["prefill_requests"] == 0) & (matched | snapped)
        if exact.any():
            context = np.where(snapped, cells["snapshot_context_tokens"], counts.context_tokens)
            used = steps["kv_blocks_total"] - steps["kv_blocks_free"]
            self.ratio.learn(float(context[exact].sum()), float(used[exact].sum()), _RATIO_DECAY)

    def _forget(self) -> None:
        """Steps behind the frontier stay for ``window_s``: requests look back at the queue they met."""
        window = self.window
        if window is None or not self.frontier or window.size < _FORGET_FROM_STEPS:
            return
        horizon_ns = self.event_unix_ns - int(self._settings.window_s * 1e9)
        seen = window.rebuilt["seen"][: window.size]
        recent = np.flatnonzero(seen & (window.steps["unix_ns"][: window.size] > horizon_ns))
        oldest = window.base + int(recent[0]) if len(recent) else self.frontier
        window.forget_before(min(oldest, self.frontier - 2))


_FORGET_FROM_STEPS = 4096
_STEPS_SHARE = 0.7
"""Share of steps with a summary from which on the telemetry counts as ``steps`` rather than ``sampled``."""


def _cut(counts: Rebuilt, here: slice) -> Rebuilt:
    return Rebuilt(
        counts.prefill_requests[here],
        counts.prefill_tokens[here],
        counts.decode_requests[here],
        counts.decode_tokens[here],
        counts.context_tokens[here],
    )


def _neighbours(seen: Bools) -> tuple[Ints, Ints]:
    """Index of the nearest seen step at or before, and at or after, each step; -1 where there is none."""
    index = np.arange(len(seen))
    before = np.maximum.accumulate(np.where(seen, index, -1))
    after = np.minimum.accumulate(np.where(seen, index, len(seen))[::-1])[::-1]
    return before, np.where(after == len(seen), -1, after)
