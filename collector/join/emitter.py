"""What engines, API processes and scraped pages have in common: a configuration learns from each of them."""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from collector.config import Config
from collector.decode import Telemetry, is_here
from collector.identity import EngineFacts, Fact
from collector.join.api_queueing import ApiQueueing
from collector.telemetry import Counts, JoinEvent, RowDrop, table
from online import EngineSnapshot, Quality, RowBlock, Target
from online.transfer import HIDES_HITS

Key = tuple[str, str]
"""(recording, instance) of an emitter."""

_HERE = "here"


class Scheduling(enum.StrEnum):
    """How an engine's busy loop overlaps scheduling and execution."""

    SYNC = "sync"
    ASYNC = "async"
    UNKNOWN = "unknown"


class Liveness(enum.IntEnum):
    """Whether more telemetry is expected of an emitter."""

    LIVE = 0
    IDLE = 1
    """Nothing has come for ``idle_timeout_s``, so what it sent is used as it is. It may go on."""
    OVER = 2
    """Nothing more is expected to come."""


class Waiting(NamedTuple):
    """Telemetry that has given no rows yet.

    ``needed_unix_ns``: event time from which on telemetry is needed for the rows to come; infinite where none is.
    """

    steps: int = 0
    requests: int = 0
    needed_unix_ns: float = math.inf


TargetRows = tuple[Target, RowBlock]
"""Rows of one target, in event-time order."""


class Emitter(abc.ABC):
    """One emitting process, or the processes that one engine has been.

    Attributes:
        number: its own, which its rows bear.
        counts: what is counted of it; those of a joiner all count in one place.
        config_id: the configuration that learns from it; empty while it has none of its own.
        server: whom a page or passes are of.
        machine: where it runs, empty if unknown; None while nothing has come since this process started.
        begun_unix_ns: its first event, 0 if it was there before.
        newest_unix_ns: its newest event, where one process makes an emitter.
        last_seen_unix_ns: when its last telemetry arrived, by the clock here; 0 while that is not known.
        liveness: whether more is expected of it.
        is_changed: telemetry came since its rows were last taken.
        times_steps: whether it tells how long steps take, and not only for how long the GPU was busy.
        is_never_late: whether its events bear their time of arrival, so that none can be late.
        duplicate_of: another emitter that tells more of the same engine, and to whose configuration this one belongs.
    """

    def __init__(self, instance: str, recording: str, number: int, settings: Config) -> None:
        self.instance, self.recording, self.number = instance, recording, number
        self._settings = settings
        self._lateness_ns, self._timeout_ns = settings.lateness_ns, settings.timeout_ns
        self.facts = EngineFacts()
        self.api_queueing = ApiQueueing()
        self.counts = Counts()
        self.config_id = self.server = ""
        self.machine: str | None = None
        self.begun_unix_ns = self.newest_unix_ns = self.last_seen_unix_ns = 0
        self.liveness, self.is_changed, self.times_steps, self.is_never_late = Liveness.LIVE, True, True, False
        self.duplicate_of: Emitter | None = None

    @property
    def key(self) -> Key:
        """Key under which the joiner holds it."""
        return self.recording, self.instance

    def record(self, arrived_unix_ns: int, telemetry: Telemetry | None) -> None:
        """Note when something of it came, by the clock here (0: nobody knows), and who sent it.

        The first telemetry of an emitter without a checkpoint sets when it began.
        """
        self.last_seen_unix_ns = arrived_unix_ns or self.last_seen_unix_ns
        self.liveness, self.is_changed = Liveness.LIVE, True
        if self.machine is None and telemetry is not None:
            self.machine = telemetry.host or (_HERE if is_here(telemetry.peer) else "")
            self.begun_unix_ns = 0 if self.config_id else newest_unix_ns(telemetry)

    def count(self, reason: RowDrop | JoinEvent, number: int = 1) -> None:
        """Count dropped rows, or other events."""
        family = table.DROPPED_ROWS if isinstance(reason, RowDrop) else table.JOIN_EVENTS
        self.counts[family, reason] += number

    @property
    def event_unix_ns(self) -> int:
        """Wall clock time of its newest event."""
        return self.newest_unix_ns

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return self.newest_unix_ns

    @property
    @abc.abstractmethod
    def quality(self) -> Quality:
        """What its rows are made from."""

    @abc.abstractmethod
    def advance(self) -> list[TargetRows]:
        """Rows that are final now, by its liveness."""

    def snapshot(self) -> EngineSnapshot:
        """What is published of it."""
        return EngineSnapshot(instance=self.instance, scheduling=Scheduling.UNKNOWN.value, last_step=self.last_step)

    @property
    def last_step(self) -> int:
        """The newest step that it has counted; 0 where it counts none."""
        return 0

    @property
    def waiting(self) -> Waiting:
        """Its telemetry that has given no rows yet."""
        return Waiting()

    @property
    def span_share(self) -> float | None:
        """Share of its requests that send a span; None while unknown."""
        return 1.0

    @property
    def step_share(self) -> float:
        """Share of its steps that arrive; 1 where all seem to, and where it sends none."""
        return 1.0

    @property
    def missing_reason(self) -> str:
        """Why requests may be missing although no number shows it; empty without such a reason."""
        return ""

    @property
    def identity(self) -> dict[str, Fact]:
        """The facts that make its configuration."""
        one = self.duplicate_of or self
        return one.facts.identity(one.instance, one.recording)

    def is_same_server(self, other: Emitter) -> bool:
        """Whether their servers agree in what they say of themselves: model, GPU, version, limits."""
        return other.recording == self.recording and not other.facts.is_another_server(self.facts.sourced_facts())

    def is_replaced_by(self, successor: Emitter, late_ns: int) -> bool:
        """Whether its server was started again as this one; ``late_ns``: how late a span may come after its end."""
        if not self.machine or self.machine != successor.machine or self.recording or not successor.begun_unix_ns:
            return False
        ended_ns, models = self.event_unix_ns, {self.facts.get("model"), successor.facts.get("model")}
        is_over = ended_ns <= successor.begun_unix_ns and ended_ns < successor.event_unix_ns - late_ns
        return is_over and (None in models or len(models) == 1)


def facts_of(emitters: Iterable[Emitter]) -> dict[str, Fact]:
    """Facts of all emitters of one configuration; if one emitter hides prefix hits, the result does."""
    facts: dict[str, Fact] = {}
    for emitter in sorted(emitters, key=lambda each: each.facts.get(HIDES_HITS) is True):
        facts |= emitter.facts.as_dict() | emitter.identity
    return facts


def quality_of(emitters: Iterable[Emitter]) -> Quality:
    """Quality of the telemetry from which a configuration's steps are known."""
    return min((emitter.quality for emitter in emitters if emitter.times_steps), default=Quality.FPM)


def replaced_configs(by_config: Mapping[str, Sequence[Emitter]], late_ns: int) -> dict[str, str]:
    """By configuration without a living emitter: the configuration that its server sends now.

    A server that is started again under another ``service.instance.id`` is a new emitter, and no telemetry ends the old
    one. The old one has ended if an emitter of its model began to send on the same machine after the old one's last
    event, and has gone on for longer than spans may be late. The machine is ``host.name``, or this one where no name
    was sent. If the old one sends again, both are alive. Emitters silent since this process started count as alive.
    """
    replaced, named = {}, [(successor, name) for name, successors in by_config.items() for successor in successors]
    newest_unix_ns = max((successor.event_unix_ns for successor, _ in named), default=0)
    for old, emitters in by_config.items():
        if any(each.event_unix_ns >= newest_unix_ns - late_ns for each in emitters):
            continue  # asked of all others, one that is alive would cost most
        others = [each for each in named if each[1] != old]
        found = [[successor for successor in others if each.is_replaced_by(successor[0], late_ns)] for each in emitters]
        if all(found):
            replaced[old] = max(found[-1], key=lambda successor: successor[0].begun_unix_ns)[1]
    return replaced


def newest_unix_ns(telemetry: Telemetry) -> int:
    """Time of the newest event in it; 0 without any."""
    ends = [int(telemetry.steps["unix_ns"].max())] if len(telemetry.steps) else []
    ends += [span.end_unix_ns for span in telemetry.core]
    ends += [span.end_unix_ns for span in telemetry.requests]
    return max(ends, default=0)
