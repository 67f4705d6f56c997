"""One engine: the processes it has been, their steps and requests, and the rows they give.

A restart starts a new process (step ids or the clock go back); the old one stays until event time has passed it, so
that its late spans still find it. Rows of an older process leave before those of a newer one.

Step ids that jump ahead by more than a window holds, or than the time since the last step allows, start a new process,
too, beside the old one: another sender may have claimed this name. Until it has lasted for ``allowed_lateness_s`` of
its own time, nothing is asked of it, and it is given up as soon as the old one goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from collector.config import Config
from collector.decode import ApiSpan, CoreSpan, MarkKind, StepColumns, Telemetry
from collector.identity import EngineFacts, Fact, FactSource
from collector.join.inferred import (
    QUEUE_STATE_AGE_NS,
    BlockRatio,
    RequestRow,
    Scheduling,
    StepSequence,
    WarmUp,
    extent_of,
    request_block,
    rows_of,
    runs_of,
)
from collector.telemetry import JoinEvent, RowDrop, table
from online import EngineSnapshot, Quality, Target

from .emitter import Emitter, TargetRows


@dataclass(slots=True)
class PendingRequest:
    """A finished request waiting for its API span and for the rows of its steps to leave."""

    span: CoreSpan
    last_step: int
    queued_unix_ns: int
    start_unix_ns: int
    end_unix_ns: int
    api: ApiSpan | None = None


@dataclass(slots=True)
class EngineProcess:
    """One step sequence with what belongs to it; ``jumped``: its step ids began far ahead of the one before it."""

    sequence: StepSequence
    warm_up: WarmUp
    requests: list[PendingRequest] = field(default_factory=list)
    jumped: bool = False

    @property
    def needed_unix_ns(self) -> int:
        """Event time from which on its telemetry is needed for the rows to come."""
        waiting = min((request.queued_unix_ns for request in self.requests), default=self.sequence.safe_unix_ns)
        return min(waiting - QUEUE_STATE_AGE_NS if self.requests else waiting, self.sequence.safe_unix_ns)

    def add_request(self, request: PendingRequest, requests_max: int) -> int:
        """Let a request wait for its rows; how many others were evicted to keep the bound."""
        self.requests.append(request)
        if len(self.requests) <= requests_max:
            return 0
        # a sixteenth at once: sorting for every request that comes would be quadratic
        self.sort_requests()
        evicted = len(self.requests) // 16 + 1
        del self.requests[:evicted]
        return evicted

    def sort_requests(self) -> None:
        """In order of their end; equal ends by span id, so that arrival does not show."""
        self.requests.sort(key=lambda request: (request.end_unix_ns, request.span.span_id))


_CONFLICTS_MAX = 3
"""Restarts within the grace time from which on two engines must share one instance id."""
_SHORTEST_STEP_NS = 1_000_000
"""No server makes more than a thousand steps a second for long."""


class Engine(Emitter):
    """Everything known about one emitting engine.

    Attributes:
        steps_heard: steps with tokens that it told of.
        restarts_unix_ns: when it restarted, since this was last taken.
        double_of: another emitter that tells the same steps and more; this one gives no rows of steps beside it.
    """

    def __init__(self, instance: str, recording: str, number: int, settings: Config) -> None:
        super().__init__(instance, recording, number)
        self.ratio = BlockRatio()
        self.steps_heard = 0
        self.double_of: Engine | None = None
        self._steps_compared = 0
        self._settings = settings
        self._remembered_ns = int((settings.join_timeout_s - settings.allowed_lateness_s) * 1e9)
        self.processes: list[EngineProcess] = []
        self.restarts_unix_ns: list[int] = []

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def event_unix_ns(self) -> int:
        """Newest event heard of."""
        return max((p.sequence.event_unix_ns for p in self._proven), default=0)

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return min((p.sequence.safe_unix_ns for p in self._proven), default=0)

    @property
    def quality(self) -> Quality:
        """Telemetry quality of the newest process."""
        return self._proven[-1].sequence.quality if self.processes else Quality.JOURNEYS

    @property
    def identity(self) -> dict[str, Fact]:
        """What makes its configuration; a double belongs to the one that tells more."""
        return super().identity if self.double_of is None else self.double_of.identity

    @property
    def is_double(self) -> bool:
        """Whether another emitter tells more of the same engine, and this one belongs to it."""
        return self.double_of is not None

    @property
    def open_requests(self) -> int:
        """Finished requests that still wait."""
        return sum(len(p.requests) for p in self.processes)

    @property
    def sequences(self) -> list[StepSequence]:
        """Steps of the processes it has been, oldest first."""
        return [p.sequence for p in self.processes]

    @property
    def newest_process(self) -> EngineProcess | None:
        """The process it is now; None before its first step."""
        return self._proven[-1] if self.processes else None

    @property
    def needed_unix_ns(self) -> int | None:
        """Event time from which on its telemetry is needed for the rows to come; None while there is none."""
        needed = [process.needed_unix_ns for process in self.processes]
        return min((unix_ns for unix_ns in needed if unix_ns), default=None)

    @property
    def pending_steps(self) -> int:
        """Steps that have given no rows; the newest one of a process only waits for the next to begin."""
        if not self._released:
            return sum(process.sequence.window.size for process in self.processes if process.sequence.window)
        return sum(process.sequence.pending_steps for process in self.processes)

    @property
    def _released(self) -> bool:
        """Whether rows have left already: too late to find out that a second emitter reports the same steps."""
        return bool(self.processes) and self.processes[0].warm_up.over

    def shed_memory(self) -> None:
        """Let go of steps whose rows have left."""
        for process in self.processes:
            process.sequence.shed_memory()

    def snapshot(self) -> EngineSnapshot:
        """Scheduling mode and newest step id of the newest process."""
        newest = self._proven[-1].sequence if self.processes else None
        return EngineSnapshot(
            instance=self.instance,
            scheduling=(newest.scheduling if newest is not None else Scheduling.UNKNOWN).value,
            last_step=newest.last_step if newest is not None else 0,
        )

    def is_due_to_compare(self) -> bool:
        """Whether to look for a double: each time it has told twice as much, until its first rows leave."""
        due = not self._released and self.steps_heard >= max(1, 2 * self._steps_compared)
        self._steps_compared = self.steps_heard if due else self._steps_compared
        return due

    def become_double_of(self, other: Engine) -> None:
        """Leave the steps of the engine that both tell of to the other emitter, which gets what is known here."""
        other.facts.take_over(self.facts)
        other.configure()
        other.is_changed = self.is_changed = True
        self.double_of = other

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, telemetry: Telemetry) -> list[PendingRequest]:
        """Add what one export says of this engine; returns its requests, to be given their API spans."""
        self.steps_heard += int(np.count_nonzero(telemetry.steps["scheduled_tokens"]))
        parts = _split_restarts(telemetry.steps)
        if len(parts) > _CONFLICTS_MAX + 1:
            self.counts[table.JOIN_EVENTS, JoinEvent.ENGINE_CONFLICT] += len(telemetry.steps)
            parts = []
        for steps in parts:
            process = self._process_of(int(steps["unix_ns"][-1]), int(steps["step_id"][-1]))
            if len(snapshots := telemetry.snapshots):
                low, high = int(steps["step_id"].min()), int(steps["step_id"].max())
                snapshots = snapshots[(snapshots["step_id"] >= low) & (snapshots["step_id"] <= high)]
            lasted = self._has_lasted(process)
            self.counts.merge(process.sequence.add_summaries(steps, snapshots))
            if self._has_jumped() and self._has_lasted(process) > lasted:
                self._count_restart(process.sequence.context.first_unix_ns)
        return [request for span in telemetry.core if (request := self._add_request(span)) is not None]

    def resume_process(self) -> EngineProcess:
        """The process that an earlier one of ours was reading, to be told how."""
        return self._begin_process()

    def restarts_with(self, telemetry: Telemetry) -> bool:
        """Whether these steps and requests are those of a process that is not known yet."""
        if not self.processes:
            return False
        newest = self._proven[-1].sequence
        steps = telemetry.steps
        heard = [(int(steps["unix_ns"][-1]), int(steps["step_id"][-1]))] if len(steps) else []
        for span in telemetry.core:
            last = span.marks[-1]
            heard.append((last.ts_ns + span.unix_minus_mono_ns, last.step_id))
        return any(
            unix_ns >= newest.event_unix_ns and step < newest.last_step and self._restarted(newest, unix_ns, step)
            for unix_ns, step in heard
        )

    def successor(self, number: int) -> Engine:
        """The engine that its server comes back as: of it the facts are known, and no step."""
        heir = Engine(self.instance, self.recording, number, self._settings)
        heir.facts, heir.counts = self.facts, self.counts
        heir.machine, heir.begun_unix_ns, heir.heard_unix_ns = self.machine, self.begun_unix_ns, self.heard_unix_ns
        heir.counts[table.JOIN_EVENTS, JoinEvent.ENGINE_RESTART] += 1
        return heir

    def _add_request(self, span: CoreSpan) -> PendingRequest | None:
        last = span.marks[-1]
        process = self._process_of(last.ts_ns + span.unix_minus_mono_ns, last.step_id)
        request_runs = tuple(runs_of(span.marks))
        self.counts.merge(process.sequence.add_request(span, request_runs))
        extent = extent_of(request_runs)
        if extent is None:
            return None
        start = next(mark for mark in span.marks if mark.kind is MarkKind.SCHEDULED)
        offset_ns = span.unix_minus_mono_ns
        request = PendingRequest(
            span, extent[1], span.marks[0].ts_ns + offset_ns, start.ts_ns + offset_ns, last.ts_ns + offset_ns
        )
        evicted = process.add_request(request, self._settings.requests_max)
        self.counts[table.JOIN_EVENTS, JoinEvent.OPEN_REQUESTS_EVICTED] += evicted
        return request

    def _process_of(self, unix_ns: int, step: int) -> EngineProcess:
        """The process in which step ids and wall clock grow together; a new one after a restart, or beside it."""
        proven = self._proven
        beside = self.processes[-1] if len(proven) < len(self.processes) else None
        if beside is not None:
            away = abs(step - beside.sequence.last_step)
            if away <= self._settings.steps_max and away < abs(step - proven[-1].sequence.last_step):
                return beside
        if proven and self._is_jump(proven, unix_ns, step):
            self._give_up(beside)
            return self._begin_process(jumped=True)
        self._give_up(beside)
        for process in reversed(self.processes):
            sequence = process.sequence
            newer_in_time = unix_ns >= sequence.event_unix_ns
            newer_in_steps = step >= sequence.last_step
            before = unix_ns < sequence.context.first_unix_ns
            if newer_in_steps and before and process is not self.processes[0]:
                continue
            if newer_in_time and not newer_in_steps and self._restarted(sequence, unix_ns, step):
                break
            return process
        if self.processes:
            self._count_restart(unix_ns)
        if len(self.processes) > _CONFLICTS_MAX:
            self.counts[table.JOIN_EVENTS, JoinEvent.ENGINE_CONFLICT] += 1
            del self.processes[0]
        return self._begin_process()

    def _begin_process(self, *, jumped: bool = False) -> EngineProcess:
        sequence = StepSequence(self._settings, self.number, self.ratio)
        _teach_facts(sequence, self.facts)
        process = EngineProcess(sequence, WarmUp(self._settings.warm_up_rows), jumped=jumped)
        self.processes.append(process)
        return process

    def _count_restart(self, unix_ns: int) -> None:
        self.counts[table.JOIN_EVENTS, JoinEvent.ENGINE_RESTART] += 1
        self.restarts_unix_ns.append(unix_ns)

    @property
    def _proven(self) -> list[EngineProcess]:
        """All processes but one that has jumped ahead and has not lasted yet."""
        if self._has_jumped() and not self._has_lasted(self.processes[-1]):
            return self.processes[:-1]
        return self.processes

    def _has_jumped(self) -> bool:
        """Whether the newest process began far ahead of the one before it."""
        return len(self.processes) > 1 and self.processes[-1].jumped

    def _has_lasted(self, process: EngineProcess) -> bool:
        context = process.sequence.context
        return context.event_unix_ns - context.first_unix_ns > int(self._settings.allowed_lateness_s * 1e9)

    def _is_jump(self, proven: list[EngineProcess], unix_ns: int, step: int) -> bool:
        """Whether a step is further ahead than a window holds or the time allows; one of an older process is not.

        Requests alone may be sampled so thinly that any distance is usual.
        """
        sequence = proven[-1].sequence
        late = len(proven) > 1 and unix_ns < sequence.context.first_unix_ns
        known = sequence.window is not None and sequence.context.has_summaries
        ahead = step - sequence.last_step
        late_ns = int(self._settings.allowed_lateness_s * 1e9)
        too_fast = ahead * _SHORTEST_STEP_NS > max(unix_ns - sequence.event_unix_ns, 0) + late_ns
        return known and not late and (too_fast or ahead > self._settings.steps_max)

    def _give_up(self, beside: EngineProcess | None) -> None:
        """The process before it goes on: what claimed to come after it was somebody else's."""
        if beside is None:
            return
        window = beside.sequence.window
        steps = int(np.count_nonzero(window.rebuilt["seen"][: window.size])) if window is not None else 0
        self.counts[table.JOIN_EVENTS, JoinEvent.ENGINE_CONFLICT] += steps
        self.counts[table.JOIN_EVENTS, JoinEvent.OPEN_REQUESTS_EVICTED] += len(beside.requests)
        self.processes.pop()

    def _restarted(self, sequence: StepSequence, unix_ns: int, step: int) -> bool:
        """A smaller step id at a later time. Two stamps of one step may swap; a whole process does not."""
        return sequence.last_step - step > 1 or unix_ns - sequence.event_unix_ns > int(
            self._settings.allowed_lateness_s * 1e9
        )

    def configure(self) -> None:
        """The facts have changed: hand those that rows depend on to the sequences."""
        self.ratio.fact_tokens = self.facts.number("block_size")
        self.ratio.fact_blocks = self.facts.number("num_gpu_blocks")
        for process in self.processes:
            _teach_facts(process.sequence, self.facts)

    # --- out --------------------------------------------------------------------------------------------------------

    def advance(self, *, flush: bool = False) -> list[TargetRows]:
        """Rows that are final now."""
        out: list[TargetRows] = []
        newest_unix_ns = self.event_unix_ns
        while self.processes:
            process = self.processes[0]
            older = len(self.processes) > 1
            # not by when the next one claims to have begun: a clock ahead would end what goes on
            next_unix_ns = self.processes[1].sequence.context.first_unix_ns if older else 0
            age_ns = newest_unix_ns - max(process.sequence.event_unix_ns, next_unix_ns)
            close = flush or (older and age_ns > self._settings.allowed_lateness_s * 1e9)
            out += self._advance(process, flush=close)
            if not close or not older:
                break
            del self.processes[0]
        return out

    def _advance(self, process: EngineProcess, *, flush: bool) -> list[TargetRows]:
        advance = process.sequence.advance(flush=flush)
        self.counts.merge(advance.counts)
        if advance.counts[table.JOIN_EVENTS, JoinEvent.SPECULATIVE_STEP]:
            self.facts.learn({"speculative_decoding": True}, FactSource.TELEMETRY)
        out = []
        rows = process.warm_up.pass_through(advance.rows, flush=flush)
        if self.double_of is not None:
            self.counts[table.DROPPED_ROWS, RowDrop.TOLD_BY_STEPS] += len(rows)
        else:
            out += [TargetRows(Target.STEP_TIME, rows)] if len(rows) else []
            out += [TargetRows(Target.SCHEDULE_TIME, block) for block in advance.schedule_rows if len(block)]
        if process.warm_up.over:
            self.counts[table.DROPPED_ROWS, RowDrop.WARM_UP] += process.warm_up.dropped
            process.warm_up.dropped = 0
            out += self._request_rows(process, flush=flush)
        oldest = min((r.queued_unix_ns for r in process.requests), default=process.sequence.event_unix_ns)
        process.sequence.forget_steps(oldest - QUEUE_STATE_AGE_NS)
        return out

    def _request_rows(self, process: EngineProcess, *, flush: bool) -> list[TargetRows]:
        """Requests in order of their end; the first one that must wait holds the others back."""
        window = process.sequence.window
        if window is None:
            return []
        process.sort_requests()
        grace_unix_ns = process.sequence.event_unix_ns - int(self._settings.allowed_lateness_s * 1e9)
        by_target: dict[Target, list[RequestRow]] = {}
        done = 0
        for request in process.requests:
            passed = process.sequence.emitted_to > request.last_step
            if not flush and not (passed and (request.api is not None or request.end_unix_ns <= grace_unix_ns)):
                break
            done += 1
            if process.warm_up.spanned(request.start_unix_ns, request.end_unix_ns):
                self.counts[table.DROPPED_ROWS, RowDrop.WARM_UP] += 1
                continue
            if request.api is None:
                self.counts[table.JOIN_EVENTS, JoinEvent.API_UNMATCHED] += 1
            else:
                self.api_queueing.add(request.span, request.api)
            remembered = request.end_unix_ns - request.queued_unix_ns < self._remembered_ns
            for row in rows_of(request.span, request.api, window if remembered else None):
                by_target.setdefault(row.target, []).append(row)
        del process.requests[:done]
        return [
            TargetRows(target, request_block(rows, self.number, self.quality))
            for target, rows in sorted(by_target.items())
        ]


def _split_restarts(steps: StepColumns) -> list[StepColumns]:
    """Runs of growing step ids in wall clock order: one, but for restarts and colliding engines."""
    if len(steps) == 0:
        return []
    unix_ns = steps["unix_ns"]
    if not (unix_ns[1:] >= unix_ns[:-1]).all():
        steps = steps[np.argsort(unix_ns, kind="stable")]
    step_ids = steps["step_id"]
    falls = step_ids[1:] < step_ids[:-1]
    return np.split(steps, np.flatnonzero(falls) + 1) if falls.any() else [steps]


def _teach_facts(sequence: StepSequence, facts: EngineFacts) -> None:
    """Hand a step sequence the facts that its rows depend on."""
    mode = facts.get("async_scheduling")
    known = {True: Scheduling.ASYNC, False: Scheduling.SYNC}[mode] if isinstance(mode, bool) else Scheduling.UNKNOWN
    sequence.learn_facts(facts.number("max_num_batched_tokens"), known)
