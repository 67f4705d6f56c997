"""One engine: the process it is, its steps and requests, and the rows they give.

Where step ids go back, or jump ahead by more than a window holds or than the time since the last step allows, a new
process begins beside the one before: a restart, or another sender who claims this name. It is the engine's when it has
lasted for ``allowed_lateness_s`` of its own time, so that late spans of the one before still find it, or nothing more
comes. It is given up as soon as the one before it goes on in its time.

Two emitters on one engine (an instrumented vLLM with the producer plugin) are recognized by equal stamps. The steps are
learned from the richer one.
"""

from __future__ import annotations

import numpy as np

from collector.config import Config
from collector.decode import StepColumns, Telemetry
from collector.identity import FactSource
from collector.join.api_queueing import ApiQueueing
from collector.telemetry import JoinEvent, RowDrop
from online import EngineSnapshot, Quality, Target

from .emitter import Emitter, Liveness, TargetRows, Waiting
from .inferred import EngineCalibration, KvTimeline
from .process import EngineProcess
from .requests import PendingRequest

_RESTARTS_MAX = 3
"""Of one export; beyond it two engines must share one instance id."""
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
        process: what it is, which may have told nothing yet.
        calibration: what its steps have taught.
        steps_seen: steps with tokens that it told of.
    """

    def __init__(self, instance: str, recording: str, number: int, settings: Config) -> None:
        super().__init__(instance, recording, number, settings)
        self._begin()

    def _begin(self) -> None:
        self.api_queueing = ApiQueueing()
        self.calibration = EngineCalibration(self.facts)
        self.process = EngineProcess(self._settings, self, self.calibration)
        self._claimed: EngineProcess | None = None
        self._rows: list[TargetRows] = []
        self.steps_seen = self._steps_compared = 0

    def start_again(self) -> None:
        """Start over with no steps, but with the known facts: the server came back as another one."""
        self.count(JoinEvent.ENGINE_RESTART)
        self.liveness = Liveness.LIVE
        self._begin()

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[EngineProcess]:
        """Its process, and the one that may follow it."""
        return [*filter(None, (self.process, self._claimed))]

    @property
    def event_unix_ns(self) -> int:
        """Wall clock time of its newest event."""
        return self.process.event_unix_ns

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return self.process.safe_unix_ns

    @property
    def quality(self) -> Quality:
        """Telemetry quality of its process."""
        return self.process.quality

    @property
    def step_share(self) -> float:
        """Share of its steps that have a summary."""
        return self.calibration.step_share

    @property
    def waiting(self) -> Waiting:
        """Telemetry of all its processes that has given no rows yet."""
        steps, requests, needed_unix_ns = zip(*(process.waiting for process in self.processes), strict=True)
        return Waiting(sum(steps), sum(requests), min(needed_unix_ns))

    def snapshot(self) -> EngineSnapshot:
        """How its process schedules, and the newest step of it."""
        scheduling, last_step = self.process.scheduling.value, self.process.window.newest_step
        return EngineSnapshot(instance=self.instance, scheduling=scheduling, last_step=last_step)

    def is_same_as(self, other: Engine) -> bool:
        """Whether both are of one engine: enough steps, and nearly all common ones, began at the same times."""
        first, second = self.process.window, other.process.window
        low, stop = max(first.base, second.base), min(first.newest_step, second.newest_step) + 1
        if stop - low < _SAME_STEPS_MIN:
            return False
        one, two = first.view(low, stop), second.view(low, stop)
        both = one.seen & two.seen
        agreed = both & (np.abs(one.steps["ts_start_ns"] - two.steps["ts_start_ns"]) <= _SAME_START_NS)
        return bool(np.count_nonzero(agreed) >= max(_SAME_STEPS_MIN, _SAME_SHARE_MIN * np.count_nonzero(both)))

    def is_due_to_compare(self) -> bool:
        """Whether to look for a duplicate: each time its steps have doubled, until its first rows leave."""
        due = not self.process.warm_up.over and self.steps_seen >= max(1, 2 * self._steps_compared)
        self._steps_compared = self.steps_seen if due else self._steps_compared
        return due

    def become_duplicate_of(self, other: Engine) -> None:
        """Stop making rows of steps, which ``other`` tells too; ``other`` gets the facts known here."""
        for name, (source, value) in self.facts.sourced_facts().items():
            other.facts.learn({name: value}, source)
        other.is_changed = self.is_changed = True
        self.duplicate_of = other

    def read_kv_from(self, publisher: KvTimeline | None) -> None:
        """Take KV events for its steps from this publisher, without events older than its steps."""
        for process in self.processes:
            process.kv = publisher
        if publisher is not None:
            publisher.forget_before(self.event_unix_ns - 2 * self._timeout_ns)

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, telemetry: Telemetry) -> list[PendingRequest]:
        """Add what one export says of this engine; returns its requests, to be given their API spans."""
        self.steps_seen += int(np.count_nonzero(telemetry.steps["scheduled_tokens"]))
        parts = _split_restarts(telemetry.steps)
        if len(parts) > _RESTARTS_MAX + 1:
            self.count(JoinEvent.ENGINE_CONFLICT, len(telemetry.steps))
            parts = []
        if len(steps := telemetry.steps) and (blocks := int(steps["kv_blocks_total"].max())) > 0:
            # they tell of all but the null block, which vLLM counts everywhere else
            self.facts.learn({"num_gpu_blocks": blocks + 1}, FactSource.TELEMETRY)
        for steps in parts:
            process = self._process_of(int(steps["unix_ns"][-1]), int(steps["step_id"][-1]))
            process.add_summaries(steps, telemetry.snapshots)
        requests = [
            self._process_of(span.end_unix_ns, span.events[-1].step_id).add_request(span) for span in telemetry.core
        ]
        claimed = self._claimed
        if claimed is not None and claimed.event_unix_ns - claimed.first_unix_ns > self._lateness_ns:
            self._accept(claimed)
        return [request for request in requests if request is not None]

    def _process_of(self, unix_ns: int, step: int) -> EngineProcess:
        """The process whose step ids and wall clock these continue, else a new one beside it."""
        claimed, goes_on = self._claimed, self._goes_on(self.process, unix_ns, step)
        if claimed is not None:
            is_older = unix_ns < claimed.first_unix_ns and (goes_on or step >= claimed.window.newest_step)
            if not is_older and self._goes_on(claimed, unix_ns, step):
                return claimed
            if not (goes_on and is_older):
                self._give_up(claimed)
        if goes_on:
            return self.process
        self._claimed = EngineProcess(self._settings, self, self.calibration)
        return self._claimed

    def _goes_on(self, process: EngineProcess, unix_ns: int, step: int) -> bool:
        """Whether a step may be the process's: not behind at a later time, nor further ahead than the time allows.

        Two stamps of one step may swap; a whole process does not. Requests alone may be sampled so thinly that any
        distance ahead is usual.
        """
        ahead, later_ns = step - process.window.newest_step, unix_ns - process.event_unix_ns
        if process.window.size <= 0 or ahead == 0:
            return True
        if ahead < 0:
            return later_ns < 0 or (ahead == -1 and later_ns <= self._lateness_ns)
        too_fast = ahead * _SHORTEST_STEP_NS > max(later_ns, 0) + self._lateness_ns
        return not (process.has_summaries and (too_fast or ahead > self._settings.steps_max))

    def _accept(self, claimed: EngineProcess) -> None:
        """Make the claimed process the engine's; the rows of the former one are final."""
        self._rows += self.process.advance(Liveness.OVER)
        self.process, self._claimed = claimed, None
        self.count(JoinEvent.ENGINE_RESTART)

    def _give_up(self, claimed: EngineProcess) -> None:
        """Drop the claimed process: the former one goes on, so the claim was another sender's."""
        steps = int(np.count_nonzero(claimed.window.rebuilt["seen"][: claimed.window.size]))
        self.count(JoinEvent.ENGINE_CONFLICT, steps)
        self.count(JoinEvent.OPEN_REQUESTS_EVICTED, len(claimed.requests))
        self._claimed = None

    # --- out --------------------------------------------------------------------------------------------------------

    def advance(self) -> list[TargetRows]:
        """Rows that are final now, by its liveness."""
        if self._claimed is not None and self.liveness:
            self._accept(self._claimed)
        out, self._rows = [*self._rows, *self.process.advance(self.liveness)], []
        if self.duplicate_of is None:
            return out
        self.count(RowDrop.KNOWN_FROM_STEPS, sum(len(rows) for target, rows in out if target is Target.STEP_TIME))
        return [(target, rows) for target, rows in out if target not in (Target.STEP_TIME, Target.SCHEDULE_TIME)]


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
