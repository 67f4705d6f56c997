"""What draining the join says to whoever learns, in the order in which it has to be taken.

    Renamed    identities that became better known, before anything is said of the new ones
    Described  configurations of which more is known: their feature sets exist before their rows come
    Restarted  engines that came back as the same configuration
    Rows       equations to learn from
    Succeeded  servers that came back as another configuration: the last rows of the old one are learned by now

Each event is complete in itself; nothing has to be looked up in the join.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collector.identity import Fact
from online import Quality, RowBlock, Target


@dataclass(frozen=True, slots=True)
class Renamed:
    """The same engines, better known: what was learned as ``old`` goes on as ``new``."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Described:
    """A configuration is new, or its emitters, their facts, or the quality of their telemetry have changed."""

    config_id: str
    facts: Mapping[str, Fact]
    quality: Quality


@dataclass(frozen=True, slots=True)
class Restarted:
    """An engine of a configuration began anew; this was the first that was heard of it."""

    config_id: str
    unix_ns: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for one target of a configuration, in event-time order; ``engines`` names the emitters by their numbers."""

    config_id: str
    target: Target
    rows: RowBlock
    engines: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The server came back as another configuration: ``new`` starts from what ``old`` has learned."""

    old: str
    new: str


Event = Renamed | Described | Restarted | Rows | Succeeded
