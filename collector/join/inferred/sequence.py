"""One engine process's telemetry in step order, and the rows it gives.

Rows leave strictly in step order, behind what is final: a step is, when nothing that could still arrive would change
its rows. That is when its summary and its journeys agree (or its context needs no journeys); for a hole, when the
summaries around it are complete and ``allowed_lateness_s`` has passed; for any step, when event time has passed it by
``join_timeout_s``. So the rows are a function of the telemetry alone, not of the order or the pieces in which it came.

Steps are passed in blocks (step ids divisible by the block's length), because what a block teaches comes into force at
its end. Whenever the sequence has advanced, emitted_to = 0 or base <= emitted_to < learned_to, with ``base`` the
window's first step. Rows lag behind blocks: a block whose last boundaries are not stamped leaves them to the row of a
later one.

The first step after start-up carries 10-21 s of compilation against 25 ms of work (wire contract §9), which must not be
learned: the first ``rows_min`` rows are held; among the first three, those longer than 2 s and 20 times the median pace
are dropped, and so is every request that spans one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from collector.config import Config
from collector.decode import CoreSpan, MarkKind, SnapshotColumns, StepColumns
from collector.join import exact
from collector.join.exact import Advance
from collector.join.window import Cells, StepWindow
from collector.telemetry import Counts, JoinEvent, RowDrop, table
from online import STEP_FEATURES, Ints, Mask, Quality, RowBlock, median_of

from .context import FIRST_BLOCK_STEPS, ProcessContext, Scheduling
from .journeys import Chunks, Run, extent_of, lay_journey, runs_of, split_chunks, waiting_steps
from .kv import KvSteps
from .row_blocks import (
    BlockRatio,
    Columns,
    ContextSource,
    Rebuilt,
    Trust,
    complete,
    drops,
    neighbours,
    pack,
    schedule_rows,
    step_features,
)

_FIRST_ROWS = 3
_LONG_US = 2e6
_LONG_RATIO = 20.0


@dataclass(slots=True)
class WarmUp:
    """Holds rows until the pace of the engine is known, then passes them through."""

    rows_min: int
    over: bool = False
    dropped: int = 0
    spans_unix_ns: list[tuple[int, int]] = field(default_factory=list)
    _held: list[RowBlock] = field(default_factory=list)

    def pass_through(self, rows: list[RowBlock], *, flush: bool) -> RowBlock:
        """Rows free to be learned now; none while they are held."""
        if not self.over:
            self._held += rows
            if sum(len(block) for block in self._held) < self.rows_min and not flush:
                rows = []
            else:
                rows, self._held = self._held, []
        block = RowBlock.concatenate(rows) if rows else RowBlock.empty(STEP_FEATURES)
        return block if self.over or not rows else self._judge(block)

    def _judge(self, block: RowBlock) -> RowBlock:
        self.over = True
        if len(block) == 0:
            return block
        pace_us = block.elapsed_us / block.steps
        compiling = (block.elapsed_us > _LONG_US) & (pace_us > _LONG_RATIO * median_of(pace_us))
        compiling[_FIRST_ROWS:] = False
        for end_ns, elapsed_us in zip(block.end_ns[compiling], block.elapsed_us[compiling], strict=True):
            self.spans_unix_ns.append((int(end_ns - elapsed_us * 1e3), int(end_ns)))
        self.dropped = int(np.count_nonzero(compiling))
        return block.take(~compiling)

    def spanned(self, start_unix_ns: int, end_unix_ns: int) -> bool:
        """Whether a request ran through a dropped row."""
        return any(start < end_unix_ns and end > start_unix_ns for start, end in self.spans_unix_ns)


def finality(
    steps: Cells, cells: Cells, *, counts: Rebuilt | None, now_unix_ns: int, settings: Config
) -> tuple[Mask, Ints]:
    """Whether each step is final, and when it was by the wall clock (0 = nobody said), shapes (n,).

    Args:
        steps: summaries of n steps in order.
        cells: the same steps as journeys rebuild them.
        counts: what journeys say ran, where a step's context comes from them; None where it does not.
        now_unix_ns: the newest event.
        settings: ``allowed_lateness_s`` and ``join_timeout_s``.
    """
    seen, unix_ns = cells["seen"], steps["unix_ns"].copy()
    final = seen.copy() if counts is None else seen & complete(steps, cells, counts)
    if not seen.all():
        before, after = neighbours(seen)
        old = steps["unix_ns"][after] <= now_unix_ns - int(settings.allowed_lateness_s * 1e9)
        hole = np.where(before >= 0, final[before], True) & (after >= 0) & final[after] & old
        final = np.where(seen, final, hole)
        unix_ns = np.where(seen, unix_ns, np.maximum(cells["completed_unix_ns"], cells["scheduled_unix_ns"]))
    passed = np.flatnonzero((unix_ns > 0) & (unix_ns <= now_unix_ns - int(settings.join_timeout_s * 1e9)))
    if len(passed):
        final[: passed[-1] + 1] = True
    return final, unix_ns


_FORGET_FROM_STEPS = 4096
_STEPS_BEFORE = 2
"""Steps behind the rows that the next row needs: they may say when it begins."""


class _Reading(NamedTuple):
    """How steps are read while rows are made of them."""

    window: StepWindow
    source: ContextSource
    asynchronous: bool
    flush: bool


class StepSequence:
    """Steps of one engine process, from its first to its restart."""

    def __init__(self, settings: Config, engine: int, ratio: BlockRatio) -> None:
        self._settings = settings
        self._engine = engine
        self.context = ProcessContext(settings, ratio)
        self.emitted_to = 0
        """Boundary at which the newest row ends, and the next one begins; 0 before the first stamped boundary."""
        self.learned_to = 0
        """One past the last step of the newest block that was passed."""
        self.window: StepWindow | None = None
        self.kv = KvSteps()
        self.resumed_from = 0
        """Step at which an earlier process of ours left off; 0 where none did."""
        self._chunks: list[Chunks] = []

    def add_summaries(self, steps: StepColumns, snapshots: SnapshotColumns) -> Counts:
        """Add step summaries (any order) and request snapshots of this process."""
        counts = Counts()
        if len(steps):
            ids = steps["step_id"]
            growing = bool((ids[1:] > ids[:-1]).all())
            low, high = (int(ids[0]), int(ids[-1])) if growing else (int(ids.min()), int(ids.max()))
            window, unique = self._reach(low, high), steps
            if low < window.base or not growing:
                inside = np.flatnonzero(ids >= window.base)
                unique = steps[inside[np.unique(ids[inside], return_index=True)[1]]]
                counts[table.JOIN_EVENTS, JoinEvent.STEP_LATE] += len(steps) - len(inside)
                counts[table.JOIN_EVENTS, JoinEvent.STEP_DUPLICATE] += len(inside) - len(unique)
            late = self.emitted_to if low < self.emitted_to else 0  # those rows left without it
            seen = window.seen_before(late)
            new, other = window.add_summaries(unique)
            counts[table.JOIN_EVENTS, JoinEvent.STEP_LATE] += window.seen_before(late) - seen
            counts[table.JOIN_EVENTS, JoinEvent.ENGINE_CONFLICT] += other
            counts[table.JOIN_EVENTS, JoinEvent.STEP_DUPLICATE] += len(unique) - new - other
            self.context.record_summaries(steps)
        if len(snapshots) and self.window is not None:
            self.window.add_snapshots(snapshots)
        return counts

    def add_request(self, span: CoreSpan, runs: tuple[Run, ...] | None = None) -> Counts:
        """Add one finished request of this process; ``runs``: its runs, where the caller has them already."""
        runs = tuple(runs_of(span.marks)) if runs is None else runs
        counts = Counts()
        context, last = self.context, span.marks[-1]
        context.has_journeys = True
        end_unix_ns = last.ts_ns + span.unix_minus_mono_ns
        context.record_times(end_unix_ns, end_unix_ns)
        extent = extent_of(runs)
        if extent is None:
            counts[table.JOIN_EVENTS, JoinEvent.JOURNEY_UNSCHEDULED] += 1
            return counts
        if extent[1] - extent[0] >= self._settings.steps_max:
            counts[table.JOIN_EVENTS, JoinEvent.JOURNEY_LATE] += 1
            return counts
        window = self._reach(max(waiting_steps(span)[0], extent[1] - self._settings.steps_max + 1), extent[1])
        if extent[0] < window.base:
            counts[table.JOIN_EVENTS, JoinEvent.JOURNEY_LATE] += 1
            return counts
        if extent[0] < self.emitted_to and not context.has_exact_context:
            counts[table.JOIN_EVENTS, JoinEvent.JOURNEY_LATE] += 1
        chunks = lay_journey(span, window, runs)
        self.kv.add_request(span, chunks, runs)
        self._chunks += chunks
        first = next(mark for mark in span.marks if mark.kind is MarkKind.SCHEDULED)
        context.longest_run_ns = max(context.longest_run_ns, last.ts_ns - first.ts_ns)
        return counts

    def learn_facts(self, budget_tokens: float | None, scheduling: Scheduling) -> None:
        """What the engine's configuration says; UNKNOWN leaves the mode as it was said before."""
        self.context.budget_fact_tokens = budget_tokens
        if scheduling is not Scheduling.UNKNOWN:
            self.context.scheduling_fact = scheduling

    def _reach(self, first_step: int, last_step: int) -> StepWindow:
        self.window = window = self.window or StepWindow(first_step)
        window.reach_within(first_step, last_step, self._settings.steps_max, keep_from=self.emitted_to)
        return window

    @property
    def event_unix_ns(self) -> int:
        """Newest event heard of."""
        return self.context.event_unix_ns

    @property
    def last_step(self) -> int:
        """Newest step id heard of."""
        return max(self.window.newest_step if self.window is not None else 0, self.resumed_from)

    @property
    def quality(self) -> Quality:
        """Telemetry quality: what the rows of this process are made from."""
        return self.context.quality

    @property
    def scheduling(self) -> Scheduling:
        """The mode that was decided."""
        return self.context.votes.decided

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        emitted_to, first_unix_ns = self.emitted_to, self.context.first_unix_ns
        if self.window is None or not emitted_to:
            return first_unix_ns
        return self.window.boundary_unix_ns(emitted_to, first_unix_ns)

    def advance(self, *, flush: bool = False) -> Advance:
        """Pass every final step and return its rows; ``flush``: nothing more will come."""
        out, window = Advance(), self.window
        source = self.context.source or (ContextSource.BLOCKS if flush else None)
        if window is None or window.size == 0 or source is None:
            return out
        self._give_up_before(window.base, out)
        first = self.emitted_to or window.base
        if self.context.is_exact:
            self._advance_exact(window, first, out, flush=flush)
            return out
        mode = self.context.mode(*window.columns(first, window.newest_step + 1), flush=flush)
        if mode is Scheduling.UNKNOWN:
            return out
        reading = _Reading(window, source, asynchronous=mode is Scheduling.ASYNC, flush=flush)
        stop = window.newest_step + 2 if flush else self._final_stop(first, reading)
        hits = self.kv.take_hits(window, stop, self.context.waited_ns, asynchronous=reading.asynchronous)
        out.counts[table.KV_HIT_TOKENS] += hits
        self._pass_blocks(stop, reading, out)
        if flush:
            self.context.votes.decided = mode
        return out

    def _advance_exact(self, window: StepWindow, first: int, out: Advance, *, flush: bool) -> None:
        """Summaries say all: the steps up to the first that is not final give their rows."""
        event_unix_ns = self.event_unix_ns
        stop = window.newest_step + 1
        if not flush:
            late_ns = max(int(self._settings.allowed_lateness_s * 1e9), self.kv.lateness_ns)
            stop = exact.final_stop(window, first, event_unix_ns - late_ns)
        self.kv.take_hits(window, stop, self.context.waited_ns, asynchronous=False)
        begin = max(self.learned_to, window.base)
        if stop <= begin and not flush:
            return
        around = window.columns(first - 1, stop + 2)
        around = (around[0].copy(), around[1].copy()) if self.kv.known else around
        overlapping = exact.overlaps(*around)
        if overlapping is not None:
            self.context.votes.decided = Scheduling.ASYNC if overlapping else Scheduling.SYNC
        out.counts.merge(exact.missing_steps(window, begin, stop))
        self.learned_to = max(self.learned_to, stop)
        stamps = exact.done_stamps(*around)
        if len(stamps.step) == 0:
            return
        self.emitted_to = first - 1 + int(stamps.step[-1])
        if len(stamps.step) > 1:
            here = slice(int(stamps.step[0]), int(stamps.step[-1]))
            self.kv.fill(*around, here, first - 1, self.context.habits.ratio, asynchronous=False)
            exact.add_rows(out, *around, stamps, engine=self._engine, with_kv=self.kv.known)

    def _give_up_before(self, base: int, out: Advance) -> None:
        """Step ids have jumped: what lies before the window is lost, rows and unfinished prefills alike."""
        self._chunks = [chunk for chunk in self._chunks if chunk.first_step >= base]
        if 0 < self.emitted_to < base:
            out.counts[table.JOIN_EVENTS, JoinEvent.STEP_MISSING] += max(base - (self.learned_to or base), 0)
            out.counts[table.DROPPED_ROWS, RowDrop.RESTART] += 1
            self.emitted_to, self.learned_to = 0, base

    def _final_stop(self, first: int, reading: _Reading) -> int:
        """First step that is not final."""
        window, event_unix_ns = reading.window, self.event_unix_ns
        steps, cells = window.columns(first, window.newest_step + 1)
        journeys_tell = reading.source is ContextSource.JOURNEYS
        counts = Rebuilt(cells, asynchronous=reading.asynchronous) if journeys_tell else None
        final, unix_ns = finality(steps, cells, counts=counts, now_unix_ns=event_unix_ns, settings=self._settings)
        open_steps = np.flatnonzero(~self.kv.arrived(final, unix_ns, event_unix_ns))
        stop = first + (int(open_steps[0]) if len(open_steps) else len(final))
        return self.kv.final_stop(window, stop, event_unix_ns)

    def _pass_blocks(self, stop: int, reading: _Reading, out: Advance) -> None:
        """Pass the steps below ``stop`` block by block: their rows leave, and what they teach comes into force."""
        window, context, asynchronous = reading.window, self.context, reading.asynchronous
        step = max(window.base, self.learned_to)
        while step < stop:
            opening = not context.habits.learned
            block_steps = FIRST_BLOCK_STEPS if opening else self._settings.block_rows
            end = min(stop, (step // block_steps + 1) * block_steps)
            if opening and end % block_steps and not reading.flush:
                break  # what the block teaches holds for its own rows
            self._chunks = split_chunks(self._chunks, window, end, context.budget_tokens, asynchronous=asynchronous)
            if opening:
                self._learn_habits(end, reading, out)
            last = reading.flush and end == stop
            self._emit_rows(end if last or not asynchronous else end - 1, reading, out, last=last)
            if not opening:
                self._learn_habits(end, reading, out)
            step = end

    def _emit_rows(self, stop: int, reading: _Reading, out: Advance, *, last: bool) -> None:
        """Rows between the stamped boundaries below ``stop``, all in one block."""
        window, context = reading.window, self.context
        first = self.emitted_to or window.base
        _, latest = window.columns(max(first, stop - self._settings.block_rows) - 1, stop + 1)
        if not (latest["seen"] | (latest["completed_ns"] > 0) | (latest["scheduled_ns"] > 0)).any():
            return  # a hole: no boundary since the last call
        around = Columns.of(*window.columns(first - 1, stop + 1), asynchronous=reading.asynchronous)
        stamps = context.stamps(around, asynchronous=reading.asynchronous)
        if len(stamps.step) == 0:
            return
        self.emitted_to = first - 1 + int(stamps.step[-1])
        if len(stamps.step) == 1:
            return
        here = slice(int(stamps.step[0]), int(stamps.step[-1]))
        ratio, hole_scale = context.habits.ratio, context.habits.hole_scale
        self.kv.fill(around.steps, around.cells, here, first - 1, ratio, asynchronous=reading.asynchronous)
        covered = around.cut(here)
        raw = step_features(
            covered.steps,
            covered.cells,
            covered.counts,
            source=reading.source,
            ratio=ratio,
            hole_scale=hole_scale,
            kv_events=self.kv.known,
        )
        trust = Trust(
            has_journeys=context.has_journeys,
            journeys_sampled=hole_scale != 1.0,
            open_after_unix_ns=self.event_unix_ns - context.longest_run_ns if last else None,
            row_steps_max=self._settings.row_steps_max,
        )
        dropped = drops(around, stamps, trust)
        rows, counts = pack(raw, covered.cells["seen"], stamps, dropped, engine=self._engine, quality=self.quality)
        out.rows.append(rows)
        out.counts.merge(counts)
        out.schedule_rows.append(schedule_rows(raw, covered, engine=self._engine, quality=self.quality))

    def _learn_habits(self, stop: int, reading: _Reading, out: Advance) -> None:
        """Steps below ``stop`` have passed: what those of this block teach, each once."""
        block_steps = self._settings.block_rows
        first, self.learned_to = max(self.learned_to, stop - block_steps), stop
        if first >= stop:
            return
        steps, cells = reading.window.columns(first, stop + 1)
        heard_of = cells[: min(stop, reading.window.newest_step + 1) - first]
        out.counts[table.JOIN_EVENTS, JoinEvent.STEP_MISSING] += self.context.habits.missing_steps(heard_of)
        out.counts[table.JOIN_EVENTS, JoinEvent.SPECULATIVE_STEP] += reading.window.speculative_steps(first, stop)
        out.counts.merge(self.context.learn_steps(steps, cells, asynchronous=reading.asynchronous))
        if stop % block_steps == 0 or not self.context.habits.learned:
            self.context.habits.end_block()

    @property
    def pending_steps(self) -> int:
        """Steps that have given no rows, but for the newest, which waits for the next one to begin."""
        window = self.window
        if window is None or not window.size:
            return 0
        return max(window.newest_step - (self.emitted_to or window.base), 0)

    def shed_memory(self) -> None:
        """Let go of steps whose rows have left, and of the memory that they and others took."""
        if self.window is not None and self.emitted_to:
            self.window.give_up_before(self.emitted_to - _STEPS_BEFORE)

    def forget_steps(self, keep_unix_ns: int) -> None:
        """Drop steps whose rows have left; with journeys, only those older than the timeout and ``keep_unix_ns``.

        Requests that still wait look back at the queue they met, so their engine says what to keep.
        """
        window, emitted_to = self.window, self.emitted_to
        if window is None or not emitted_to or window.size < _FORGET_FROM_STEPS:
            return
        horizon_ns = self.event_unix_ns
        if self.context.has_journeys:
            horizon_ns = min(keep_unix_ns, horizon_ns - int(self._settings.join_timeout_s * 1e9))
        window.forget_until(horizon_ns, emitted_to, emitted_to - 2)
