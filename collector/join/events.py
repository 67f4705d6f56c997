"""Events of the join for the learner, and one order for the rows of several engines of a configuration.

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

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from collector.config import Config
from collector.identity import Fact
from collector.telemetry import RowDrop
from online import Quality, RowBlock, Target

from .emitter import Emitter, TargetRows

WATERMARKS_MAX = 4096
"""Emitters whose watermarks are kept, also after they were evicted: their telemetry may still be in the log."""
_TURN_NS = 1_000_000_000
"""Rows of several engines leave by the second: every piece of an engine's rows has its cost."""

Watermarks = dict[Target, int]
"""By target: until when (wall clock ns) rows were emitted."""


class ConfigKeyChanged(NamedTuple):
    """The identity of the same engines is better known: the state of ``old`` moves to ``new``."""

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
    engines: Mapping[int, str]


class ConfigReplaced(NamedTuple):
    """The server came back as another configuration: ``new`` starts from what ``old`` has learned."""

    old: str
    new: str


Event = ConfigKeyChanged | ConfigUpdated | Rows | ConfigReplaced


def watermark_of(emitters: Sequence[Emitter], settings: Config) -> int | None:
    """Wall clock time (ns) up to which all rows of a configuration's emitters have come; None where none can be late.

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


class RowQueue:
    """Merges rows of a configuration's emitters by event time; each emitter adds its rows in order of end.

    Attributes:
        watermarks: until when the rows of each emitter have left, by instance.
    """

    def __init__(self, settings: Config, watermarks: Mapping[str, Watermarks] | None = None) -> None:
        """``watermarks``: those of an earlier process, which has emitted what ends by then."""
        self._settings, self._restored = settings, watermarks or {}
        self.watermarks = OrderedDict((instance, dict(ends)) for instance, ends in self._restored.items())
        self._by_config: dict[str, list[tuple[Target, str, RowBlock]]] = {}

    @property
    def waiting(self) -> list[RowBlock]:
        """Rows that have not left, each block of one emitter."""
        return [block for blocks in self._by_config.values() for _, _, block in blocks]

    def rename(self, old: str, new: str) -> None:
        """Move the waiting rows of a configuration that was renamed."""
        self._by_config.setdefault(new, []).extend(self._by_config.pop(old, ()))

    def add(self, config_id: str, emitter: Emitter, rows: Iterable[TargetRows]) -> None:
        """Add rows of one emitter; count those emitted before a restart, and drop those without a configuration."""
        marks = self._restored.get(emitter.instance, {})
        for target, block in rows:
            learned = int(block.end_ns.searchsorted(marks[target], side="right")) if target in marks else 0
            emitter.count(RowDrop.LEARNED_BEFORE, learned)
            if config_id and learned < len(block):
                held = target, emitter.instance, block.slice(learned, len(block))
                self._by_config.setdefault(config_id, []).append(held)

    def take(self, emitters: Iterable[Emitter]) -> list[Rows]:
        """Rows up to the watermark, by configuration; all rows where no emitter is expected to send more."""
        awaited: defaultdict[str, list[Emitter]] = defaultdict(list)
        for emitter in emitters:
            if not emitter.liveness:
                awaited[emitter.config_id].append(emitter)
        out: list[Rows] = []
        for config_id in sorted(self._by_config):
            due = self._take_until(config_id, watermark_of(awaited[config_id], self._settings))
            out += (_in_order(config_id, target, blocks) for target, blocks in sorted(due.items()))
        while len(self.watermarks) > WATERMARKS_MAX:
            self.watermarks.popitem(last=False)
        return out

    def _take_until(self, config_id: str, until_unix_ns: int | None) -> dict[Target, list[tuple[str, RowBlock]]]:
        """Rows of a configuration that end by then (None: all), by target, with the instances that they are of."""
        due: defaultdict[Target, list[tuple[str, RowBlock]]] = defaultdict(list)
        for target, instance, block in self._by_config.pop(config_id):
            rows = len(block)
            stop = rows if until_unix_ns is None else int(block.end_ns.searchsorted(until_unix_ns, side="right"))
            if stop:
                due[target].append((instance, block.slice(0, stop)))
                marks = self.watermarks.setdefault(instance, {})
                marks[target] = max(marks.get(target, 0), int(block.end_ns[:stop].max()))
            if stop < rows:
                self._by_config.setdefault(config_id, []).append((target, instance, block.slice(stop, rows)))
        return due


def _in_order(config_id: str, target: Target, blocks: list[tuple[str, RowBlock]]) -> Rows:
    """One block of the rows of several instances by their end; equal ends in the order of the instances."""
    blocks.sort(key=itemgetter(0))
    engines = {int(block.engine[0]): instance for instance, block in blocks}
    rows = RowBlock.concatenate([block for _, block in blocks])
    return Rows(config_id, target, rows.take(rows.end_ns.argsort(kind="stable")) if len(engines) > 1 else rows, engines)
