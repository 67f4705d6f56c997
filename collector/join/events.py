"""What draining the join says to whoever learns; and the rows of several engines of a configuration in one order.

Events are taken in this order, and each is complete in itself:

    ConfigKeyChanged    identities that became better known, before anything is said of the new ones
    ConfigUpdated       configurations of which more is known: their feature sets exist before their rows come
    Rows                equations to learn from
    ConfigReplaced      servers that came back as another configuration: the last rows of the old one are learned by now

Rows leave in the order of (end_ns, instance) whatever the order in which the engines' rows came, as long as no engine
is idle; an idle engine holds nobody up. The watermark is ``allowed_lateness_s`` behind the newest event, by when an
engine not heard of before would have spoken, and never ahead of an engine that still sends. Where all events bear the
time at which they came, none is late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from collector.config import Config
from collector.identity import Fact
from online import Quality, RowBlock, Target

from .emitter import Emitter, TargetRows

_TURN_NS = 1_000_000_000
"""Rows of several engines leave by the second: every piece of an engine's rows has its cost."""


class ConfigKeyChanged(NamedTuple):
    """The same engines, better known: what was learned as ``old`` goes on as ``new``."""

    old: str
    new: str


class ConfigUpdated(NamedTuple):
    """A configuration is new, or its emitters, their facts, or the quality of their telemetry have changed."""

    config_id: str
    facts: Mapping[str, Fact]
    quality: Quality


class Rows(NamedTuple):
    """Rows for one target of a configuration, in event-time order; ``engines`` names the emitters by their numbers."""

    config_id: str
    target: Target
    rows: RowBlock
    engines: Mapping[int, str] = {}


class ConfigReplaced(NamedTuple):
    """The server came back as another configuration: ``new`` starts from what ``old`` has learned."""

    old: str
    new: str


Event = ConfigKeyChanged | ConfigUpdated | Rows | ConfigReplaced


class Pending(NamedTuple):
    """What one emitter holds; all of it is emitted at ``until_unix_ns`` (the clock here) if nothing comes any more.

    ``until_unix_ns`` is 0 where no clock was told yet.
    """

    instance: str
    steps: int
    requests: int
    rows: int
    until_unix_ns: int


def watermark_of(emitters: Sequence[Emitter], settings: Config) -> int | None:
    """Until when (wall clock ns) the rows of a configuration's emitters are all here; None where none can be late.

    An engine whose newest event is older than the others' by ``join_timeout_s`` is not waited for.
    """
    if all(emitter.is_never_late for emitter in emitters):
        return None
    events = [emitter.event_unix_ns for emitter in emitters]
    newest = max(events)
    watermark = newest - settings.lateness_ns
    if len(emitters) == 1:
        return watermark
    oldest = newest - settings.timeout_ns
    safe = [emitter.safe_unix_ns for emitter, event in zip(emitters, events, strict=True) if event >= oldest]
    return min(watermark, *safe) // _TURN_NS * _TURN_NS


class PendingRows:
    """Rows that wait for those of their configuration's other emitters, each of whom gives them in order of end."""

    def __init__(self) -> None:
        self._by_config: dict[str, list[tuple[Target, str, RowBlock]]] = {}

    def add(self, config_id: str, instance: str, rows: Iterable[TargetRows]) -> None:
        """Take rows of one emitter."""
        self._by_config.setdefault(config_id, []).extend((target, instance, block) for target, block in rows)

    def rename(self, old: str, new: str) -> None:
        """A configuration is known better, and is this one."""
        self._by_config.setdefault(new, []).extend(self._by_config.pop(old, ()))

    def config_ids(self) -> list[str]:
        """Of whom rows may be held."""
        return sorted(self._by_config)

    def by_emitter(self) -> Counter[int]:
        """How many of each emitter wait, by its number."""
        held: Counter[int] = Counter()
        for _, _, block in self._blocks():
            held[int(block.engine[0])] += len(block)
        return held

    @property
    def needed_unix_ns(self) -> int | None:
        """When the first of these rows began; None while there is none."""
        begins = (int(block.end_ns[0] - 1e3 * block.elapsed_us[0]) for _, _, block in self._blocks())
        return min(begins, default=None)

    def _blocks(self) -> Iterator[tuple[Target, str, RowBlock]]:
        return chain.from_iterable(self._by_config.values())

    def take(self, config_id: str, until_unix_ns: int | None) -> list[Rows]:
        """Rows of a configuration that end until then (None: all), in order."""
        due: dict[Target, list[tuple[str, RowBlock]]] = {}
        later = []
        for target, instance, block in self._by_config.pop(config_id, ()):
            rows = len(block)
            stop = rows if until_unix_ns is None else int(block.end_ns.searchsorted(until_unix_ns, side="right"))
            if stop:
                due.setdefault(target, []).append((instance, block.slice(0, stop)))
            if stop < rows:
                later.append((target, instance, block.slice(stop, rows)))
        if later:
            self._by_config[config_id] = later
        out = []
        for target, blocks in sorted(due.items()):
            blocks.sort(key=lambda one: one[0])
            engines = {int(block.engine[0]): instance for instance, block in blocks}
            whole = RowBlock.concatenate([block for _, block in blocks])
            if len(engines) > 1:
                # stable: equal ends stay in the order of the instances
                whole = whole.take(whole.end_ns.argsort(kind="stable"))
            out.append(Rows(config_id, target, whole, engines))
        return out
