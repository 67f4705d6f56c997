"""One engine process, from its first step to its restart: its telemetry in step order, and the rows made of it.

Rows leave strictly in step order, behind what is final: a step is, when nothing that could still arrive would change
its rows. Where summaries say all, that is when ``allowed_lateness_s`` has passed (:mod:`collector.join.exact`). Else it
is when its summary and its journeys agree; for a hole, when the summaries around it are complete and
``allowed_lateness_s`` has passed; for any step, when event time has passed it by ``join_timeout_s``. So the rows are a
function of the telemetry alone, not of the order or the pieces in which it came.

Steps are passed in blocks (:mod:`collector.join.inferred.calibration`). Whenever the process has advanced,
emitted_step = 0 or base <= emitted_step < calibrated_step, with ``base`` the window's first step. Rows lag behind
blocks: a block whose last boundaries are not stamped leaves them to the row of a later one.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from collector.config import Config
from collector.decode import CoreSpan, SnapshotColumns, StepColumns
from collector.identity import FactSource
from collector.telemetry import JoinEvent, RowDrop
from online import Floats, Mask, Quality, RowBlock, Target
from online.transfer import HIDES_HITS

from . import exact
from .emitter import Emitter, Liveness, Scheduling, TargetRows, Waiting
from .inferred import (
    EngineCalibration,
    KvTimeline,
    PrefillChunks,
    best_stamps,
    final_steps,
    find_residencies,
    leading,
    overlaps,
    project_onto_steps,
    schedule_starts,
    split_chunks,
    step_features,
    trusted_missing_steps,
    waiting_steps,
)
from .requests import PendingRequest, request_rows
from .rows import KV_COLUMNS, START, Stamps, WarmUp, row_block, schedule_block, summary_features
from .window import StepView, StepWindow

_FIRST_BLOCK_STEPS = 256
"""A new engine waits for its first block; the later ones only cost per block."""
_VOTES_MIN = 8
"""Steps needed to decide how an engine schedules: a stamp or two may be late."""
_STEPS_BEFORE = 2
"""Steps kept before the next row, since they may show when it begins."""


class EngineProcess:
    """Steps and requests of one engine process; counts and calibration belong to its engine.

    Once summaries, journeys or exact contexts were seen, all later rows are made with them.

    Attributes:
        scheduling: the mode by which rows are made; decided by the steps until the first rows leave.
        is_exact: whether summaries suffice: they have contexts, and the time at which each step was done.
        first_summary_step: smallest step id of a summary; 0 without any.
        longest_run_ns: of the requests that ended.
        emitted_step: boundary at which the newest row ends, and the next begins; 0 before the first stamped one.
        calibrated_step: one past the last step of the newest block that was passed.
    """

    def __init__(self, settings: Config, engine: Emitter, calibration: EngineCalibration) -> None:
        self._settings, self._engine = settings, engine
        self.calibration = calibration
        self.scheduling = Scheduling.UNKNOWN
        self.event_unix_ns = self.first_unix_ns = self.first_summary_step = 0
        self.has_summaries = self.has_journeys = self.is_exact = False
        self.longest_run_ns = 0
        self.window = StepWindow(settings.steps_max)
        self.warm_up = WarmUp(settings.warm_up_rows)
        self.kv: KvTimeline | None = None
        """Its publisher of KV events, once known."""
        self.requests: list[PendingRequest] = []
        """A heap of those that ended and wait, by their end."""
        self.emitted_step = self.calibrated_step = 0
        self._emitted_unix_ns = 0
        self._chunks: list[PrefillChunks] = []
        self._rows: list[RowBlock] = []
        self._schedule_rows: list[RowBlock] = []

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return self._emitted_unix_ns or self.first_unix_ns

    @property
    def _queue_needed_unix_ns(self) -> int:
        """Event time from which waiting requests need the steps, for the queue that each met; now if none waits."""
        return min((request.queue_unix_ns for request in self.requests), default=self.event_unix_ns)

    @property
    def waiting(self) -> Waiting:
        """Count of steps and requests that wait, and the event time from which telemetry is needed for their rows."""
        steps = self.window.newest_step + 1 - max(self.calibrated_step, self.window.base)
        needed_unix_ns = min(self.safe_unix_ns, self._queue_needed_unix_ns) or math.inf
        return Waiting(max(steps, 0), len(self.requests), needed_unix_ns)

    # --- what it is -------------------------------------------------------------------------------------------------

    def _record_times(self, oldest_unix_ns: int, newest_unix_ns: int) -> None:
        """Widen the range of event times by events from ``oldest_unix_ns`` to ``newest_unix_ns``."""
        self.event_unix_ns = max(self.event_unix_ns, newest_unix_ns)
        self.first_unix_ns = min(self.first_unix_ns or oldest_unix_ns, oldest_unix_ns)

    @property
    def quality(self) -> Quality:
        """Telemetry quality: what the rows of this process are made from."""
        if not self.has_summaries:
            return Quality.JOURNEYS
        if self.is_exact:
            return Quality.STEPS_PLUS
        return Quality.SAMPLED if self.calibration.step_share < 1.0 else Quality.STEPS

    def _decide_scheduling(self, told: int, overlapping: int, *, waited: bool) -> None:
        """Decide the mode by the share of steps that overlap, or by a few steps once they have ``waited``.

        Where too few steps show it, the former decision holds, else the fact of the configuration.
        """
        asynchronous, fact = 2 * overlapping > told, self._engine.facts.get("async_scheduling")
        if told < _VOTES_MIN:
            is_said = isinstance(fact, bool)
            if self.scheduling is not Scheduling.UNKNOWN or not (is_said or (self.has_journeys and waited)):
                return
            asynchronous = bool(fact) if is_said else asynchronous
        self.scheduling = Scheduling.ASYNC if asynchronous else Scheduling.SYNC

    # --- in ---------------------------------------------------------------------------------------------------------

    def add_summaries(self, steps: StepColumns, snapshots: SnapshotColumns) -> None:
        """Place step summaries (any order) and request snapshots of this process by step id."""
        first_step, asynchronous = int(steps["step_id"].min()), self._engine.facts.get("async_scheduling") is True
        self.window.add_summaries(steps, snapshots, self.emitted_step, self._engine.count)
        self.first_summary_step = min(self.first_summary_step or first_step, first_step)
        self.has_summaries = True
        self.is_exact = self.is_exact or exact.tell_all(steps, asynchronous=asynchronous)
        self._record_times(int(steps["unix_ns"].min()), int(steps["unix_ns"].max()))

    def add_request(self, span: CoreSpan) -> PendingRequest | None:
        """Lay one finished request onto the steps in which it ran; it waits for its rows, if it ever ran."""
        engine, runs = self._engine, tuple(find_residencies(span.events))
        self.has_journeys = True
        self._record_times(span.end_unix_ns, span.end_unix_ns)
        if not runs:
            engine.count(JoinEvent.UNMATCHED)
            return None
        first, last, start_ns = runs[0].first_step, runs[-1].last_step, runs[0].scheduled_ns
        held = last - first < self._settings.steps_max
        if held:
            self.window.reach(waiting_steps(span)[0], last, self.emitted_step)
            held = first >= self.window.base  # else its steps have been let go of
        if not held or (first < self.emitted_step and not self.is_exact):
            engine.count(JoinEvent.JOURNEY_LATE)
        if held:
            self._chunks += project_onto_steps(span, self.window, runs)
            self.longest_run_ns = max(self.longest_run_ns, span.events[-1].ts_ns - start_ns)
        request = PendingRequest(span, last, start_ns + span.unix_minus_mono_ns)
        heapq.heappush(self.requests, request)
        if len(self.requests) > self._settings.requests_max:
            heapq.heappop(self.requests)
            engine.count(JoinEvent.OPEN_REQUESTS_EVICTED)
        return request

    # --- out --------------------------------------------------------------------------------------------------------

    def advance(self, liveness: Liveness) -> list[TargetRows]:
        """Rows of every step that is final, and of the requests that ended in those; the steps behind are forgotten.

        For an idle engine, telemetry that only more telemetry can complete is kept.
        """
        # whether journeys will come, which have the decode context, shows by then
        waited = liveness > 0 or self.event_unix_ns >= self.first_unix_ns + self._settings.timeout_ns
        if self.window.size and (self.is_exact or self.has_journeys or waited):
            self._give_up_lost()
            if self.is_exact:
                self._pass_exact(liveness)
            else:
                self._pass_inferred(liveness, waited=waited)
        rows = self.warm_up.pass_through(self._rows, self._engine.counts, flush=liveness > 0)
        out = [(Target.STEP_TIME, rows), *((Target.SCHEDULE_TIME, block) for block in self._schedule_rows)]
        self._rows, self._schedule_rows = [], []
        if self.warm_up.over:
            out += self._request_rows(liveness)
        if self.emitted_step:
            self._forget_steps()
        return [(target, block) for target, block in out if len(block)]

    def _pass_exact(self, liveness: Liveness) -> None:
        """Pass the steps up to the watermark by their summaries alone: rows run from stamp to stamp of their ends."""
        window, first = self.window, self.emitted_step or self.window.base
        begin, stop = max(self.calibrated_step, window.base), window.newest_step + 1
        if not liveness:
            stop = first + exact.final_steps(window.view(first, stop), self.event_unix_ns - self._settings.lateness_ns)
            if stop <= begin:
                return
        view = window.view(first - 1, stop + 2)
        self._decide_scheduling(*exact.overlaps(view), waited=False)
        self._count_passed(begin, stop)
        self.calibrated_step = max(self.calibrated_step, stop)
        self._add_rows(first, view, summary_features(view.steps), exact.done_stamps(view), view.seen)

    def _pass_inferred(self, liveness: Liveness, *, waited: bool) -> None:
        """Pass the steps that summaries and journeys tell together, once it shows how the engine schedules."""
        window, first = self.window, self.emitted_step or self.window.base
        stop = window.newest_step + 1
        if not self.calibrated_step:
            self._decide_scheduling(*overlaps(self._view(first, stop)), waited=waited)
        if self.scheduling is Scheduling.UNKNOWN and self.has_journeys:
            return
        view, settings, now_unix_ns = self._view(first, stop), self._settings, self.event_unix_ns
        if liveness:
            final = first + self._told_steps(view, liveness)
        else:
            by_kv = self.kv is not None
            final = first + final_steps(view, settings, now_unix_ns, by_journeys=self.has_journeys, by_kv=by_kv)
        self._pass_blocks(final, liveness)
        if liveness is Liveness.OVER and final < window.newest_step:
            self._engine.count(RowDrop.INCOMPLETE)
            self._count_passed(max(self.calibrated_step, window.base), stop)
            self.emitted_step, self.calibrated_step = window.newest_step, stop

    def _view(self, first: int, stop: int) -> StepView:
        """Steps first..stop-1."""
        return self.window.view(first, stop, asynchronous=self.scheduling is Scheduling.ASYNC)

    def _give_up_lost(self) -> None:
        """Drop rows and unfinished prefills before the window, which a jump of step ids has made unreachable."""
        base = self.window.base
        self._chunks = [chunk for chunk in self._chunks if chunk.first_step >= base]
        if 0 < self.emitted_step < base:
            engine = self._engine
            engine.count(JoinEvent.MISSING, max(base - (self.calibrated_step or base), 0))
            engine.count(RowDrop.RESTART)
            self.emitted_step, self.calibrated_step = 0, base

    def _told_steps(self, view: StepView, liveness: Liveness) -> int:
        """How many of these steps, from the first on, are used for an idle engine; for one that is over, one more.

        Those behind the newest summary are about to get theirs: the span that carries them ends when the engine goes
        on. Holes, and steps of an engine without summaries, are told by requests, of which some may still run.
        """
        told = view.seen
        if not self.has_summaries:
            unix_ns = np.maximum(view.cells["completed_unix_ns"], view.cells["scheduled_unix_ns"])
            told = (unix_ns > 0) & (unix_ns <= self.event_unix_ns - self.longest_run_ns)
        stop = int(np.flatnonzero(told)[-1]) + 1 if told.any() else 0
        if liveness is Liveness.OVER:
            return stop + 1 if stop else 0
        if self.has_summaries and self.has_journeys:
            told = told | trusted_missing_steps(view, sampled=self.calibration.missing_step_scale != 1.0)
            stop = min(leading(told), stop)
        return stop

    def _pass_blocks(self, stop: int, liveness: Liveness) -> None:
        """Pass the steps below ``stop`` block by block: emit their rows, then update the calibration."""
        window, calibration, asynchronous = self.window, self.calibration, self.scheduling is Scheduling.ASYNC
        budget_tokens = self._engine.facts.number("max_num_batched_tokens")
        step = max(window.base, self.calibrated_step)
        while step < stop:
            opening = not calibration.learned
            block_steps = _FIRST_BLOCK_STEPS if opening else self._settings.block_rows
            end = min(stop, (step // block_steps + 1) * block_steps)
            if opening and end % block_steps and not liveness:
                break  # what the block teaches holds for its own rows
            self._chunks = split_chunks(self._chunks, window, end, budget_tokens, asynchronous=asynchronous)
            if opening:
                self._learn(step, end, liveness)
            last = liveness is Liveness.OVER and end == stop
            self._emit_rows(end if last or not asynchronous else end - 1)
            if not opening:
                self._learn(step, end, liveness)
            step = end

    def _emit_rows(self, stop: int) -> None:
        """Rows between the stamped boundaries below ``stop``."""
        calibration, first = self.calibration, self.emitted_step or self.window.base
        latest = self._view(max(first, stop - self._settings.block_rows) - 1, stop + 1)
        if not len(best_stamps(latest).step):
            return  # in a hole
        view = self._view(first - 1, stop + 1)
        stamps, sampled = best_stamps(view), calibration.missing_step_scale != 1.0
        if self.has_summaries and sampled:
            # Journey stamps pick intervals around the requests that are traced: scaled up, those would count too much.
            stamps = Stamps(*(column[stamps.kind == START] for column in stamps))
        known = view.seen | (trusted_missing_steps(view, sampled=sampled) & self.has_journeys)
        self._add_rows(first, view, step_features(view, calibration), stamps, known)

    def _add_rows(self, first: int, view: StepView, raw: Floats, stamps: Stamps, known: Mask) -> None:
        """Emit rows between these stamps of a view from ``first`` - 1 on; the next ones begin at the last stamp.

        ``known``: steps with a summary, or with trusted journeys.
        """
        if len(stamps.step):
            self.emitted_step, self._emitted_unix_ns = first - 1 + int(stamps.step[-1]), int(stamps.unix_ns[-1])
        if len(stamps.step) <= 1:
            return
        here, number, quality = stamps.covered, self._engine.number, self.quality
        if self.kv is not None:
            starts_unix_ns = schedule_starts(view)[here.start : here.stop + 1]
            raw[here, KV_COLUMNS] = self.kv.moved_blocks(starts_unix_ns, first - 1 + here.start)
            self.calibration.kv_block_tokens = float(self.kv.block_size)
        counts, longest = self._engine.counts, self._settings.row_steps_max
        self._rows.append(
            row_block(view, raw, stamps, known, counts, engine=number, quality=quality, row_steps_max=longest)
        )
        self._schedule_rows.append(schedule_block(view, raw, here, engine=number, quality=quality))

    def _learn(self, first: int, stop: int, liveness: Liveness) -> None:
        """Calibrate by steps first..stop-1 of one block, which have passed."""
        calibration, view, self.calibrated_step = self.calibration, self._view(first, stop), stop
        self._count_passed(first, stop)
        calibration.learn(view, idle=liveness is Liveness.IDLE)
        if self.has_journeys:
            busy = view.seen & ~view.empty
            self._engine.count(JoinEvent.STEP_MISMATCHED, int(np.count_nonzero(busy & ~view.matched)))
        if stop % self._settings.block_rows == 0 or not calibration.learned:
            calibration.end_block()
            if self.quality is Quality.SAMPLED:
                self._engine.facts.learn({HIDES_HITS: calibration.hides_hits}, FactSource.DISCOVERY)

    def _count_passed(self, first: int, stop: int) -> None:
        """Count steps of first..stop-1 whose summary never came, and those with speculated tokens.

        Both are told from the first summary on. A request that was preempted computes its tokens anew, several in a
        step: a preemption in the window explains more tokens than requests, too.
        """
        window, engine = self.window, self._engine
        if not self.has_summaries:
            return
        view = window.view(max(first, self.first_summary_step), min(stop, window.newest_step + 1))
        engine.count(JoinEvent.MISSING, int(np.count_nonzero(~view.seen)))
        excess = view.seen & (view.steps["decode_tokens"] > view.steps["decode_requests"])
        if excess.any() and not window.steps["preempted"][: max(0, stop - window.base)].any():
            engine.facts.learn({"speculative_decoding": True}, FactSource.TELEMETRY)

    def _request_rows(self, liveness: Liveness) -> list[TargetRows]:
        """Rows of requests whose steps have left: with their API span, or once it can no longer come."""
        settings, engine, final = self._settings, self._engine, []
        grace_unix_ns = self.event_unix_ns - settings.lateness_ns
        while self.requests:
            request = self.requests[0]
            waited = request.api is not None or request.span.end_unix_ns <= grace_unix_ns
            if liveness is not Liveness.OVER and not (self.emitted_step > request.last_step and waited):
                break
            heapq.heappop(self.requests)
            if self.warm_up.spanned(request.start_unix_ns, request.span.end_unix_ns):
                engine.count(RowDrop.WARM_UP)
                continue
            if request.api is None:
                engine.count(JoinEvent.UNMATCHED)
            else:
                engine.api_queueing.add(request.span, request.api)
            final.append(request)
        remembered_ns = settings.timeout_ns - settings.lateness_ns
        return request_rows(final, self.window, remembered_ns, engine=engine.number, quality=self.quality)

    def _forget_steps(self) -> None:
        """Drop steps whose rows have left.

        With journeys, only those older than the timeout; requests that wait look back at the queue they met.
        """
        horizon_ns = self.event_unix_ns
        if self.has_journeys:
            horizon_ns = min(horizon_ns - self._settings.timeout_ns, self._queue_needed_unix_ns)
        self.window.forget_until(horizon_ns, self.emitted_step - _STEPS_BEFORE)

    def shed_memory(self) -> None:
        """Drop steps whose rows have left, and free their memory."""
        if self.emitted_step:
            self.window.hold(max(self.emitted_step - _STEPS_BEFORE, self.window.base), self.window.newest_step)
