"""The rows of several engines of a configuration in one order, up to the watermark; and what is pending.

Guarantee: rows leave in the order of (end_ns, instance) whatever the order in which the engines' rows came, as long as
no engine is idle; an idle engine holds nobody up. The watermark is ``grace_s`` behind the newest event, by when an
engine not heard of before would have spoken, and never ahead of an engine that still sends.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from collector.config import Config
from online import Ints, RowBlock, Target

from .emitter import Emitter, Key, TargetRows, key_of
from .engine import Engine
from .events import Rows

_TURN_NS, _LONG_TURN_NS = 1_000_000_000, 4_000_000_000
"""Rows of several engines leave by the second, of many by four: every piece of an engine's rows has its cost."""
_MANY = 100


def watermark_of(emitters: Sequence[Emitter], settings: Config) -> int | None:
    """Until when (wall clock ns) the rows of one configuration's emitters that are not idle are all here.

    None where there are none: nobody is waited for. See :func:`horizon`.
    """
    if not emitters:
        return None
    event_unix_ns, safe_unix_ns = np.array([(each.event_unix_ns, each.safe_unix_ns) for each in emitters]).T
    until_unix_ns = horizon(event_unix_ns, safe_unix_ns, settings)
    if len(emitters) == 1:
        return until_unix_ns
    turn_ns = _TURN_NS if len(emitters) < _MANY else _LONG_TURN_NS
    return until_unix_ns // turn_ns * turn_ns


def engine_configs_of(engines: Iterable[Key], config_ids: Mapping[Key, str]) -> dict[str, set[str]]:
    """Configurations of engines, by recording."""
    configs: dict[str, set[str]] = {}
    for key in engines:
        configs.setdefault(key[0], set()).add(config_ids[key])
    return configs


def horizon(event_unix_ns: Ints, safe_unix_ns: Ints, settings: Config) -> int:
    """Until when (wall clock ns) the rows of these emitters (n,) are all here.

    Always ``grace_s`` behind the newest event: by then an engine not heard of before would have spoken. An engine
    silent for ``window_s`` is not waited for.
    """
    newest = int(event_unix_ns.max())
    grace = newest - int(settings.allowed_lateness_s * 1e9)
    if len(event_unix_ns) == 1:
        return grace
    speaking = event_unix_ns >= newest - int(settings.join_timeout_s * 1e9)
    return min(grace, int(safe_unix_ns[speaking].min()))


class ReleasedRows(NamedTuple):
    """Rows of one target whose turn has come, and the instances of the emitters whose numbers they bear."""

    target: Target
    rows: RowBlock
    engines: dict[int, str]


class Release:
    """Rows of one configuration on their way to its models; each engine's come in the order of their end."""

    def __init__(self) -> None:
        self._held: dict[Target, dict[str, deque[RowBlock]]] = {}
        # the first end of each instance's rows: of a thousand engines, only those whose turn it is are looked at
        self._firsts: dict[Target, list[tuple[int, str]]] = {}

    def _find_firsts(self) -> None:
        """Find again whose turn comes when."""
        self._firsts = {
            target: sorted((int(blocks[0].end_ns[0]), instance) for instance, blocks in by_instance.items())
            for target, by_instance in self._held.items()
        }

    def add(self, instance: str, rows: list[TargetRows]) -> None:
        """Take rows of one engine."""
        for target, block in rows:
            blocks = self._held.setdefault(target, {}).setdefault(instance, deque())
            if not blocks:
                heapq.heappush(self._firsts.setdefault(target, []), (int(block.end_ns[0]), instance))
            blocks.append(block)

    def take_over(self, other: Release) -> None:
        """Hold another configuration's rows too: its identity became better known, and is this one's."""
        for target, by_instance in other._held.items():
            for instance, blocks in by_instance.items():
                held = self._held.setdefault(target, {}).setdefault(instance, deque())
                held.extend(blocks)
        self._find_firsts()

    def rows_held(self, instance: str) -> int:
        """Rows of one engine that wait for their turn."""
        return sum(len(block) for own in self._held.values() for block in own.get(instance, ()))

    @property
    def needed_unix_ns(self) -> int | None:
        """When the first of these rows began; None while there is none."""
        firsts = [blocks[0] for own in self._held.values() for blocks in own.values()]
        return min((int(block.end_ns[0] - 1e3 * block.elapsed_us[0]) for block in firsts), default=None)

    def take(self, until_unix_ns: int | None) -> list[ReleasedRows]:
        """Rows that end until ``until_unix_ns`` (None: all), in order."""
        out = []
        for target, by_instance in sorted(self._held.items()):
            taken: list[RowBlock] = []
            engines: dict[int, str] = {}
            due, firsts = [], self._firsts[target]
            while firsts and (until_unix_ns is None or firsts[0][0] <= until_unix_ns):
                due.append(heapq.heappop(firsts)[1])
            for instance in sorted(due):
                blocks = by_instance[instance]
                own = _until(blocks, until_unix_ns)
                engines |= {int(block.engine[0]): instance for block in own}
                taken += own
                if blocks:
                    heapq.heappush(firsts, (int(blocks[0].end_ns[0]), instance))
                else:
                    del by_instance[instance]
            if taken:
                block = RowBlock.concatenate(taken)
                if len(due) > 1:
                    # stable: equal ends stay in the order of the instances
                    block = block.take(block.end_ns.argsort(kind="stable"))
                out.append(ReleasedRows(target, block, engines))
        return out


def _until(blocks: deque[RowBlock], until_unix_ns: int | None) -> list[RowBlock]:
    """Take the rows that end in time from the front."""
    out = []
    while blocks:
        block = blocks[0]
        stop = len(block)
        if until_unix_ns is not None:
            stop = int(block.end_ns.searchsorted(until_unix_ns, side="right"))
        if stop < len(block):
            if stop:
                out.append(block.slice(0, stop))
                blocks[0] = block.slice(stop, len(block))
            break
        out.append(blocks.popleft())
    return out


def release_rows(
    releases: dict[str, Release],
    by_config: Mapping[str, Sequence[Emitter]],
    settings: Config,
    *,
    idle: Container[Key],
    flush: bool,
) -> list[Rows]:
    """Rows whose turn has come, by configuration; the hold of one without emitters ends with its rows."""
    out = []
    for config_id in sorted(releases):
        own = by_config.get(config_id, ())  # evicted or renamed: nobody is left to wait for
        awaited = [] if flush else [emitter for emitter in own if key_of(emitter) not in idle]
        released = releases[config_id].take(watermark_of(awaited, settings))
        if not own:
            del releases[config_id]
        out += [Rows(config_id, target, rows, engines=engines) for target, rows, engines in released]
    return out


class Pending(NamedTuple):
    """Of one emitter; all of it is emitted at ``until_unix_ns`` (the clock here) if nothing comes any more.

    ``until_unix_ns`` is 0 where no clock was told yet.
    """

    instance: str
    steps: int
    requests: int
    rows: int
    until_unix_ns: int


def pending_of(
    emitters: Mapping[Key, Emitter],
    config_ids: Mapping[Key, str],
    releases: Mapping[str, Release],
    heard_unix_ns: Mapping[Key, int],
    idle_ns: int,
) -> list[Pending]:
    """Of the emitters that hold something."""
    configs_of_engines = {config_ids[key] for key, e in emitters.items() if isinstance(e, Engine) and key in config_ids}
    beside = next(iter(configs_of_engines)) if len(configs_of_engines) == 1 else ""
    pending = []
    for key, emitter in emitters.items():
        release = releases.get(config_ids.get(key, beside))
        rows = release.rows_held(emitter.instance) if release is not None else 0
        steps = emitter.pending_steps if isinstance(emitter, Engine) else 0
        if steps or emitter.open_requests or rows:
            heard_ns = heard_unix_ns.get(key)
            until_unix_ns = heard_ns + idle_ns if heard_ns is not None else 0
            pending.append(Pending(key[1], steps, emitter.open_requests, rows, until_unix_ns))
    return pending
