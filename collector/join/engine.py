"""One engine: the processes it has been, their steps and requests, and the rows they give.

A restart starts a new process (step ids or the clock go back); the old one stays until event time has passed it, so
that its late spans still find it. Rows of an older process leave before those of a newer one.

Two emitters on one engine (an instrumented vLLM with the producer plugin) are told by their stamps; the steps are
learned from the one that tells more.

Step ids that jump ahead by more than a window holds, or than the time since the last step allows, may be another
sender's who claims this name. Their process is one of the engine's when it has lasted for ``allowed_lateness_s`` of its
own time, or nothing more comes; it is given up as soon as the one before it goes on.
"""

from __future__ import annotations

import numpy as np

from collector.config import Config
from collector.decode import StepColumns, Telemetry
from collector.identity import FactSource
from collector.telemetry import JoinEvent, RowDrop
from online import Quality, Target

from .emitter import Emitter, Scheduling, TargetRows
from .inferred import EngineCalibration, KvTimeline
from .process import EngineProcess
from .requests import PendingRequest

_CONFLICTS_MAX = 3
"""Restarts within the grace time from which on two engines must share one instance id."""
_SHORTEST_STEP_NS = 1_000_000
"""No server makes more than a thousand steps a second for long."""
_SAME_STEPS_MIN = 20
_SAME_START_NS = 50_000
"""Both read CLOCK_MONOTONIC at entry of the same schedule() call; they differ by 0.5-1.6 us (wire contract §9)."""
_SAME_SHARE_MIN = 0.9
"""Of the steps that both tell: two engines that begin in the same moment run side by side for their first ones."""


class Engine(Emitter):
    """Everything known about one emitting engine.

    Attributes:
        processes: those it has been, oldest first; it is the last one now, which may have told nothing yet.
        calibration: what its steps have taught.
        steps_seen: steps with tokens that it told of.
    """

    def __init__(self, instance: str, recording: str, number: int, settings: Config) -> None:
        super().__init__(instance, recording, number, settings)
        self.calibration = EngineCalibration(self.facts)
        self.processes = [self._new_process()]
        self._claimed: EngineProcess | None = None
        self.steps_seen = self._steps_compared = 0

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def event_unix_ns(self) -> int:
        """Newest event heard of."""
        return max(process.event_unix_ns for process in self.processes)

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return min(process.safe_unix_ns for process in self.processes)

    @property
    def quality(self) -> Quality:
        """Telemetry quality of the newest process."""
        return self.newest_process.quality

    @property
    def step_share(self) -> float:
        """Share of its steps that have a summary."""
        return self.calibration.step_share

    @property
    def open_requests(self) -> int:
        """Finished requests that still wait."""
        return sum(len(process.requests) for process in self.processes)

    @property
    def newest_process(self) -> EngineProcess:
        """The process it is now."""
        return self.processes[-1]

    @property
    def needed_unix_ns(self) -> int | None:
        """Event time from which on its telemetry is needed for the rows to come; None while there is none."""
        processes = filter(None, (*self.processes, self._claimed))
        return min(filter(None, (process.needed_unix_ns for process in processes)), default=None)

    @property
    def pending_steps(self) -> int:
        """Steps that have given no rows."""
        return sum(process.pending_steps for process in self.processes)

    @property
    def _released(self) -> bool:
        """Whether rows have left already: too late to find out that a second emitter reports the same steps."""
        return self.processes[0].warm_up.over

    @property
    def scheduling(self) -> Scheduling:
        """What its newest process does."""
        return self.newest_process.votes.decided

    @property
    def last_step(self) -> int:
        """Newest step id of its newest process."""
        return self.newest_process.window.newest_step

    def is_same_as(self, other: Engine) -> bool:
        """Whether both tell of one engine: they agree on when enough steps began, and nearly all that both tell."""
        first, second = self.newest_process.window, other.newest_process.window
        low, stop = max(first.base, second.base), min(first.newest_step, second.newest_step) + 1
        if stop - low < _SAME_STEPS_MIN:
            return False
        (steps, cells), (others, other_cells) = first.columns(low, stop), second.columns(low, stop)
        both = cells["seen"] & other_cells["seen"]
        agreed = both & (np.abs(steps["ts_start_ns"] - others["ts_start_ns"]) <= _SAME_START_NS)
        return bool(np.count_nonzero(agreed) >= max(_SAME_STEPS_MIN, _SAME_SHARE_MIN * np.count_nonzero(both)))

    def is_due_to_compare(self) -> bool:
        """Whether to look for a double: each time it has told twice as much, until its first rows leave."""
        due = not self._released and self.steps_seen >= max(1, 2 * self._steps_compared)
        self._steps_compared = self.steps_seen if due else self._steps_compared
        return due

    def become_duplicate_of(self, other: Engine) -> None:
        """Give no rows of the steps that both tell of; the other emitter gets what is known here."""
        other.facts.copy_from(self.facts)
        other.is_changed = self.is_changed = True
        self.duplicate_of = other

    def read_kv_from(self, publisher: KvTimeline | None) -> None:
        """Its steps have the KV events of this publisher from now on, and what is older than they can be is dropped."""
        for process in self.processes:
            process.kv = publisher
            if publisher is not None:
                publisher.forget_before(process.event_unix_ns - 2 * self._settings.timeout_ns)

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, telemetry: Telemetry) -> list[PendingRequest]:
        """Add what one export says of this engine; returns its requests, to be given their API spans."""
        self.steps_seen += int(np.count_nonzero(telemetry.steps["scheduled_tokens"]))
        parts = _split_restarts(telemetry.steps)
        if len(parts) > _CONFLICTS_MAX + 1:
            self.count(JoinEvent.ENGINE_CONFLICT, len(telemetry.steps))
            parts = []
        if len(steps := telemetry.steps) and (blocks := int(steps["kv_blocks_total"].max())) > 0:
            # they tell of all but the null block, which vLLM counts everywhere else
            self.facts.learn({"num_gpu_blocks": blocks + 1}, FactSource.TELEMETRY)
        for steps in parts:
            process = self._process_of(int(steps["unix_ns"][-1]), int(steps["step_id"][-1]))
            process.add_summaries(steps, telemetry.snapshots)
        requests = [
            self._process_of(span.end_unix_ns, span.marks[-1].step_id).add_request(span) for span in telemetry.core
        ]
        claimed = self._claimed
        if claimed is not None and claimed.event_unix_ns - claimed.first_unix_ns > self._settings.lateness_ns:
            self._accept_claim(claimed)
        return [request for request in requests if request is not None]

    def _new_process(self) -> EngineProcess:
        return EngineProcess(self._settings, self, self.calibration)

    def continue_from(self, old: Engine) -> None:
        """Be what the server of an engine comes back as: the facts are known, and no step."""
        self.facts = self.calibration.facts = old.facts
        self.counts, self.machine = old.counts, old.machine
        self.begun_unix_ns, self.last_seen_unix_ns = old.begun_unix_ns, old.last_seen_unix_ns
        self.count(JoinEvent.ENGINE_RESTART)

    def _process_of(self, unix_ns: int, step: int) -> EngineProcess:
        """The process in which step ids and wall clock grow together; a new one after a restart, or beside it."""
        claimed = self._claimed
        if claimed is not None:
            away = abs(step - claimed.window.newest_step)
            if away <= self._settings.steps_max and away < abs(step - self.last_step):
                return claimed
            self._give_up(claimed)
        if self._is_jump(unix_ns, step):
            self._claimed = self._new_process()
            return self._claimed
        for process in reversed(self.processes):
            too_early = step >= process.window.newest_step and unix_ns < process.first_unix_ns
            if too_early and process is not self.processes[0]:
                continue
            if self._has_restarted(process, unix_ns, step):
                break
            return process
        self.count(JoinEvent.ENGINE_RESTART)
        if len(self.processes) > _CONFLICTS_MAX:
            self.count(JoinEvent.ENGINE_CONFLICT)
            del self.processes[0]
        self.processes.append(self._new_process())
        return self.newest_process

    def _is_jump(self, unix_ns: int, step: int) -> bool:
        """Whether a step, not of an older process, is further ahead than a window holds or than the time allows.

        Requests alone may be sampled so thinly that any distance is usual.
        """
        newest = self.newest_process
        late = len(self.processes) > 1 and unix_ns < newest.first_unix_ns
        ahead = step - newest.window.newest_step
        too_fast = ahead * _SHORTEST_STEP_NS > max(unix_ns - newest.event_unix_ns, 0) + self._settings.lateness_ns
        known = newest.window.size > 0 and newest.has_summaries
        return known and not late and (too_fast or ahead > self._settings.steps_max)

    def _accept_claim(self, claimed: EngineProcess) -> None:
        """It is what the engine has become."""
        self.processes.append(claimed)
        self._claimed = None
        self.count(JoinEvent.ENGINE_RESTART)

    def _give_up(self, claimed: EngineProcess) -> None:
        """The process before it goes on: what claimed to come after it was somebody else's."""
        steps = int(np.count_nonzero(claimed.window.rebuilt["seen"][: claimed.window.size]))
        self.count(JoinEvent.ENGINE_CONFLICT, steps)
        self.count(JoinEvent.OPEN_REQUESTS_EVICTED, len(claimed.requests))
        self._claimed = None

    def _has_restarted(self, process: EngineProcess, unix_ns: int, step: int) -> bool:
        """A smaller step id at a later time. Two stamps of one step may swap; a whole process does not."""
        later_ns, behind = unix_ns - process.event_unix_ns, process.window.newest_step - step
        return later_ns >= 0 and behind > 0 and (behind > 1 or later_ns > self._settings.lateness_ns)

    # --- out --------------------------------------------------------------------------------------------------------

    def advance(self, *, idle: bool = False, flush: bool = False) -> list[TargetRows]:
        """Rows that are final now."""
        if self._claimed is not None and (idle or flush):
            self._accept_claim(self._claimed)
        out: list[TargetRows] = []
        while True:
            process = self.processes[0]
            older = len(self.processes) > 1
            age_ns = self.event_unix_ns - max(process.event_unix_ns, self.processes[1].first_unix_ns) if older else 0
            close = flush or (older and (idle or age_ns > self._settings.lateness_ns))
            out += process.advance(idle=idle, flush=close)
            if not close or not older:
                break
            del self.processes[0]
        if self.duplicate_of is None:
            return out
        self.count(RowDrop.KNOWN_FROM_STEPS, sum(len(rows) for target, rows in out if target is Target.STEP_TIME))
        return [each for each in out if each.target not in (Target.STEP_TIME, Target.SCHEDULE_TIME)]


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
