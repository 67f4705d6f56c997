"""One engine process's telemetry in step order, and the rows it gives.

Rows leave strictly in step order, behind a frontier that passes what is final (finality.py). So the rows are a function
of the telemetry alone, not of the order or the pieces in which it came.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from collector.config import JoinConfig
from collector.decode import MISSING, CoreSpan, MarkKind, SnapshotColumns, StepColumns
from collector.join.block_ratio import BlockRatio
from collector.join.kv import KvSteps
from collector.join.requests import journeys
from collector.join.window import StepWindow
from collector.telemetry import Counts, JoinEvent, RowDrop, table
from online import Quality, RowBlock

from . import boundaries
from .finality import finality
from .habits import FIRST_BLOCK_STEPS, Habits
from .raw_features import ContextSource, complete, rebuilt_counts, step_features
from .row_blocks import Columns, Trust, drops, pack
from .scheduling import Scheduling, SchedulingVotes

_FORGET_FROM_STEPS = 4096


@dataclass(slots=True)
class Advance:
    """What moving the frontier gave: rows by target, in order."""

    rows: list[RowBlock] = field(default_factory=list)
    schedule_rows: list[RowBlock] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


class Sequence:
    """Steps of one engine process, from its first to its restart."""

    def __init__(self, settings: JoinConfig, engine: int, ratio: BlockRatio) -> None:
        self._settings = settings
        self._engine = engine
        self._habits = Habits(ratio)
        self.window: StepWindow | None = None
        self.frontier = 0
        self._learned_to = 0
        self._fresh: tuple[int, int] | None = None
        self.event_unix_ns = 0
        self.first_unix_ns = 0
        self.votes = SchedulingVotes()
        self.scheduling_fact = Scheduling.UNKNOWN
        self.budget_fact_tokens: float | None = None
        self.has_summaries = False
        self.has_journeys = False
        self.has_exact_context = False
        self.has_done_stamps = False
        self.kv = KvSteps()
        self._chunks: list[journeys.Chunks] = []
        self._scheduled_tokens_max = 0
        self._first_finish_unix_ns = 0
        self._longest_run_ns = 0

    # --- in ---------------------------------------------------------------------------------------------------------

    def add_summaries(self, steps: StepColumns, snapshots: SnapshotColumns) -> Counts:
        """Add step summaries (any order) and request snapshots of this process."""
        counts = Counts()
        if len(steps):
            ids = steps["step_id"].copy()
            low, high = int(ids.min()), int(ids.max())
            window = self._reach(low, high)
            fresh = steps
            if low < window.base or not (np.diff(ids) > 0).all():
                inside = np.flatnonzero(ids >= window.base)
                fresh = steps[inside[np.unique(ids[inside], return_index=True)[1]]]
                counts[table.JOIN_EVENTS, JoinEvent.STEP_LATE] += len(steps) - len(inside)
                counts[table.JOIN_EVENTS, JoinEvent.STEP_DUPLICATE] += len(inside) - len(fresh)
            new, other = window.add_summaries(fresh)
            counts[table.JOIN_EVENTS, JoinEvent.ENGINE_CONFLICT] += other
            counts[table.JOIN_EVENTS, JoinEvent.STEP_DUPLICATE] += len(fresh) - new - other
            self._note_times(int(steps["unix_ns"].min()), int(steps["unix_ns"].max()))
            self._note_summaries(steps)
            self._fresh = (low, high) if self._fresh is None else (min(low, self._fresh[0]), max(high, self._fresh[1]))
        if len(snapshots) and self.window is not None:
            self.window.add_snapshots(snapshots)
        return counts

    def add_request(self, span: CoreSpan, found: tuple[journeys.Run, ...] | None = None) -> Counts:
        """Add one finished request of this process; ``found``: its runs, where the caller has them already."""
        found = tuple(journeys.runs(span.marks)) if found is None else found
        counts = Counts()
        self.has_journeys = True
        last = span.marks[-1]
        self._note_times(last.ts_ns + span.unix_minus_mono_ns, last.ts_ns + span.unix_minus_mono_ns)
        extent = journeys.extent_of(found)
        if extent is None:
            counts[table.JOIN_EVENTS, JoinEvent.JOURNEY_UNSCHEDULED] += 1
            return counts
        if extent[1] - extent[0] >= self._settings.steps_max:
            counts[table.JOIN_EVENTS, JoinEvent.JOURNEY_LATE] += 1
            return counts
        window = self._reach(max(journeys.waits(span)[0], extent[1] - self._settings.steps_max + 1), extent[1])
        if extent[0] < window.base:
            counts[table.JOIN_EVENTS, JoinEvent.JOURNEY_LATE] += 1
            return counts
        if self.frontier and extent[0] < self.frontier and not self.has_exact_context:
            counts[table.JOIN_EVENTS, JoinEvent.JOURNEY_LATE] += 1
        self._chunks += self.kv.add(span, journeys.lay(span, window, found), found)
        first = next(mark for mark in span.marks if mark.kind is MarkKind.SCHEDULED)
        self._longest_run_ns = max(self._longest_run_ns, last.ts_ns - first.ts_ns)
        return counts

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
        if low <= last_step:  # else all of it is late: it must not stretch the window back to where it was
            window.reach(low, last_step)
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
        return Quality.SAMPLED if self._habits.sampled else Quality.STEPS

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
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        if self.window is None or not self.frontier:
            return self.first_unix_ns
        cells, steps = self.window.rebuilt, self.window.steps
        index = min(self.frontier - self.window.base, len(cells) - 1)
        if cells["seen"][index]:
            return int(steps["unix_ns"][index])
        before = max(0, index - 1)
        return int(max(cells["completed_unix_ns"][before], cells["scheduled_unix_ns"][index], self.first_unix_ns))

    # --- out --------------------------------------------------------------------------------------------------------

    def advance(self, *, flush: bool = False) -> Advance:
        """Move the frontier over every final step and return the rows passed; ``flush``: nothing more will come."""
        out = Advance()
        source = self.context_source or (ContextSource.BLOCKS if flush else None)
        window = self.window
        if window is None or window.size == 0 or source is None:
            return out
        self._give_up_before(window.base, out)
        first = self.frontier or window.base
        mode = self._mode(first, flush=flush)
        if mode is Scheduling.UNKNOWN:
            return out
        asynchronous = mode is Scheduling.ASYNC
        stop = window.newest_step + 2 if flush else self._final_stop(first, source, asynchronous=asynchronous)
        waited_s = 0 if self.has_summaries else self._settings.window_s - self._settings.grace_s
        self.kv.take_hits(window, stop, int(waited_s * 1e9), asynchronous=asynchronous)
        budget = self.budget_fact_tokens or (self._scheduled_tokens_max or None)
        passed = max(first, self._learned_to)
        while passed < stop:
            opening = not self._habits.settled
            block = FIRST_BLOCK_STEPS if opening else self._settings.block_steps
            end = min(stop, (passed // block + 1) * block)
            if opening and end % block and not flush:
                break  # what the first block teaches holds for its own rows
            self._chunks = journeys.split_chunks(self._chunks, window, end, budget, asynchronous=asynchronous)
            if opening:
                self._learn_habits(end, out, asynchronous=asynchronous)
            last = flush and end == stop
            settled = end if last or not asynchronous else end - 1
            self._pass(self.frontier or first, settled, source, out, asynchronous=asynchronous, last=last)
            if not opening:
                self._learn_habits(end, out, asynchronous=asynchronous)
            passed = end
        if flush:
            self.votes.decided = mode
        return out

    def quick(self) -> RowBlock | None:
        """Rows of steps timed by summaries that came since the last call, with what is known now: the quick lane.

        Outside invariant 4: what is known of a step's context depends on what has come.
        """
        fresh, self._fresh = self._fresh, None
        window, mode = self.window, self.votes.decided
        if fresh is None or window is None or (mode is Scheduling.UNKNOWN and not self.has_done_stamps):
            return None
        first = max(fresh[0] - 2, window.base)
        steps, cells = self._columns(first - 1, fresh[1] + 2)
        asynchronous = mode is Scheduling.ASYNC
        counts = rebuilt_counts(cells, asynchronous=asynchronous)
        empty = boundaries.empty_steps(steps, cells, counts.prefill_requests + counts.decode_requests)
        index, elapsed_us = boundaries.pairs(steps, cells, empty, asynchronous=asynchronous, done=self.has_done_stamps)
        new = ~cells["quick"][index]
        index, elapsed_us = index[new], elapsed_us[new]
        if len(index) == 0:
            return None
        window.rebuilt["quick"][index + (first - 1 - window.base)] = True
        raw = step_features(
            steps[index],
            cells[index],
            counts.take(index),
            source=self.context_source or ContextSource.BLOCKS,
            ratio=self._habits.ratio,
            hole_scale=1.0,
            kv_events=False,
        )
        end_ns = steps["unix_ns"][index] + (elapsed_us * 1e3).astype(np.int64)
        return RowBlock.of_lines(raw, elapsed_us, end_ns=end_ns, engine=self._engine, quality=self.quality)

    def _give_up_before(self, base: int, out: Advance) -> None:
        """Step ids have jumped: what lies before the window is lost, rows and unfinished prefills alike."""
        self._chunks = [chunk for chunk in self._chunks if chunk.first_step >= base]
        if self.frontier and self.frontier < base:
            self.frontier = self._learned_to = 0
            out.counts[table.DROPPED_ROWS, RowDrop.RESTART] += 1

    def _mode(self, first: int, *, flush: bool) -> Scheduling:
        """The scheduling mode; UNKNOWN while end stamps may still tell it."""
        if self.votes.decided is not Scheduling.UNKNOWN:
            return self.votes.decided
        steps, cells = self._columns(first, self.last_step + 1)
        mode = self.votes.provisional(steps, cells)
        if mode is not Scheduling.UNKNOWN:
            return mode
        waited = self.event_unix_ns >= self.first_unix_ns + int(self._settings.window_s * 1e9)
        if self.has_journeys and not (flush or waited):
            return Scheduling.UNKNOWN
        if self.scheduling_fact is not Scheduling.UNKNOWN:
            return self.scheduling_fact
        return self.votes.settle(steps, cells) if flush or self.has_journeys else Scheduling.SYNC

    def _columns(self, first: int, stop: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Columns of steps first..stop-1; ids outside the window read as never seen."""
        assert self.window is not None  # noqa: S101 callers hold it
        return self.window.columns(first, stop)

    def _final_stop(self, first: int, source: ContextSource, *, asynchronous: bool) -> int:
        """First step that is not final."""
        steps, cells = self._columns(first, self.last_step + 1)
        final, unix = finality(
            steps,
            cells,
            counts=rebuilt_counts(cells, asynchronous=asynchronous) if source is ContextSource.JOURNEYS else None,
            now_unix_ns=self.event_unix_ns,
            settings=self._settings,
        )
        open_steps = np.flatnonzero(~self.kv.settled(final, unix, self.event_unix_ns))
        stop = first + (int(open_steps[0]) if len(open_steps) else len(final))
        return self.kv.hold(self.window, stop, self.event_unix_ns)

    def _pass(
        self, first: int, stop: int, source: ContextSource, out: Advance, *, asynchronous: bool, last: bool
    ) -> None:
        """Rows between the stamped boundaries first..stop-1, all in one block; the frontier moves to the last."""
        _, latest = self._columns(max(first, stop - self._settings.block_steps) - 1, stop + 1)
        if not (latest["seen"] | (latest["completed_ns"] > 0) | (latest["scheduled_ns"] > 0)).any():
            return  # a hole: no boundary since the last call
        steps, cells = self._columns(first - 1, stop + 1)
        counts = rebuilt_counts(cells, asynchronous=asynchronous)
        empty = boundaries.empty_steps(steps, cells, counts.prefill_requests + counts.decode_requests)
        around = Columns(steps, cells, counts, empty)
        if self.has_done_stamps:
            found = boundaries.done_stamps(steps, cells, empty)
        else:
            found = boundaries.stamps(steps, cells, empty, asynchronous=asynchronous)
        if self.has_summaries and self._habits.hole_scale != 1.0:
            # Journey stamps pick intervals around the requests that are traced: scaled up, those would count too much.
            found = found.take(found.kind == boundaries.START)
        if len(found.step) == 0:
            return
        self.frontier = first - 1 + int(found.step[-1])
        if len(found.step) == 1:
            return
        here = slice(int(found.step[0]), int(found.step[-1]))
        covered = around.cut(here)
        self.kv.fill(steps, cells, here, first - 1, self._habits.ratio, asynchronous=asynchronous)
        hole_scale = self._habits.hole_scale
        raw = step_features(
            covered.steps,
            covered.cells,
            covered.counts,
            source=source,
            ratio=self._habits.ratio,
            hole_scale=hole_scale,
            kv_events=self.kv.known,
        )
        trust = Trust(
            has_journeys=self.has_journeys,
            journeys_sampled=hole_scale != 1.0,
            open_after_unix_ns=self.event_unix_ns - self._longest_run_ns if last else None,
            row_steps_max=self._settings.row_steps_max,
        )
        rows, dropped = pack(
            raw,
            covered.cells["seen"],
            found,
            drops(around, found, trust),
            engine=self._engine,
            quality=self.quality,
        )
        out.rows.append(rows)
        out.counts.merge(dropped)
        timed = np.flatnonzero(covered.cells["seen"] & ~covered.empty)
        out.schedule_rows.append(
            RowBlock.of_lines(
                raw[timed],
                covered.steps["duration_us"][timed].astype(float),
                end_ns=covered.steps["unix_ns"][timed],
                engine=self._engine,
                quality=self.quality,
            )
        )

    def _learn_habits(self, stop: int, out: Advance, *, asynchronous: bool) -> None:
        """Steps below ``stop`` have passed: what those of this block teach, each once."""
        first, self._learned_to = max(self._learned_to, stop - self._settings.block_steps), stop
        if first >= stop:
            return
        steps, cells = self._columns(first, stop + 1)
        self.votes.add(steps, cells)
        steps, cells = steps[:-1], cells[:-1]
        counts = rebuilt_counts(cells, asynchronous=asynchronous)
        self._habits.learn(steps, cells, counts)
        out.counts[table.JOIN_EVENTS, JoinEvent.SPECULATIVE_STEP] += self._speculative_steps(steps, cells, stop)
        if self.has_journeys and not self.has_exact_context:
            busy = cells["seen"] & (steps["scheduled_tokens"] > 0)
            matched = int(np.count_nonzero(busy & complete(steps, cells, counts)))
            out.counts[table.JOIN_EVENTS, JoinEvent.STEP_MATCHED] += matched
            out.counts[table.JOIN_EVENTS, JoinEvent.STEP_MISMATCHED] += int(np.count_nonzero(busy)) - matched
        if stop % self._settings.block_steps == 0 or not self._habits.settled:
            self._habits.settle()
            self.votes.settle_block()

    def _speculative_steps(self, steps: NDArray[np.void], cells: NDArray[np.void], stop: int) -> int:
        """Steps with more decode tokens than decoding requests, unless a preemption in the window explains them.

        A request that was preempted computes its tokens anew, several in a step; without one, they were speculated.
        """
        excess = cells["seen"] & (steps["decode_tokens"] > steps["decode_requests"])
        if not excess.any() or self.window is None:
            return 0
        preempted = self.window.steps["preempted"][: max(0, stop - self.window.base)].any()
        return 0 if preempted else int(np.count_nonzero(excess))

    def forget(self, keep_unix_ns: int) -> None:
        """Drop steps behind the frontier; with journeys, only those older than ``keep_unix_ns`` and ``window_s``.

        Requests that still wait look back at the queue they met, so their engine says what to keep.
        """
        window = self.window
        if window is None or not self.frontier or window.size < _FORGET_FROM_STEPS:
            return
        horizon_ns = self.event_unix_ns
        if self.has_journeys:
            horizon_ns = min(keep_unix_ns, horizon_ns - int(self._settings.window_s * 1e9))
        seen = window.rebuilt["seen"][: window.size]
        recent = np.flatnonzero(seen & (window.steps["unix_ns"][: window.size] > horizon_ns))
        oldest = window.base + int(recent[0]) if len(recent) else self.frontier
        window.forget_before(min(oldest, self.frontier - 2))
