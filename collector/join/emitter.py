"""What engines and API processes have in common: each emits telemetry that one configuration learns from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from collector.identity import EngineFacts, Fact, config_id
from collector.join.api_queueing import ApiQueueing
from collector.telemetry import Counts
from online import EngineSnapshot, Quality, RowBlock, Target

Key = tuple[str, str]
"""(recording, instance) of an emitter."""


class TargetRows(NamedTuple):
    """Rows of one target, in event-time order."""

    target: Target
    rows: RowBlock


class Emitter(Protocol):
    """One emitting process, or the row of processes an engine has been."""

    instance: str
    recording: str
    facts: EngineFacts
    api_queueing: ApiQueueing

    @property
    def event_unix_ns(self) -> int:
        """Newest event heard of."""
        ...

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        ...

    @property
    def needed_unix_ns(self) -> int | None:
        """Event time from which on its telemetry is needed for the rows to come; None while there is none."""
        ...

    @property
    def quality(self) -> Quality:
        """What its rows are made from."""
        ...

    @property
    def open_requests(self) -> int:
        """Finished requests that have given no rows yet."""
        ...

    @property
    def span_share(self) -> float | None:
        """Which share of what it could tell it sends; None while that is not known."""
        ...

    def advance(self, *, flush: bool = False) -> list[TargetRows]:
        """Rows that are final now; ``flush``: nothing more will come."""
        ...

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """What is published of it."""
        ...


def key_of(emitter: Emitter) -> Key:
    """Under which an emitter is held."""
    return emitter.recording, emitter.instance


def facts_of(emitters: Iterable[Emitter]) -> dict[str, Fact]:
    """What the emitters of one configuration know together."""
    facts: dict[str, Fact] = {}
    for emitter in emitters:
        facts |= emitter.facts.known() | emitter.facts.identity(emitter.instance, emitter.recording)
    return facts


def config_id_of(emitter: Emitter) -> str:
    """The configuration that learns from it."""
    return config_id(emitter.facts.identity(emitter.instance, emitter.recording))


def by_config(emitters: Mapping[Key, Emitter], config_ids: Mapping[Key, str]) -> dict[str, list[Emitter]]:
    """Emitters by configuration, in the order in which their configurations became known."""
    grouped: dict[str, list[Emitter]] = {}
    for key, known_as in config_ids.items():
        if key in emitters:
            grouped.setdefault(known_as, []).append(emitters[key])
    return grouped
