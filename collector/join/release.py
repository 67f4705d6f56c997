"""One order for the rows of several engines of a configuration: wall clock, then instance.

Guarantee: rows leave in the order of (end_ns, instance) whatever the order in which the engines' rows came, as long as
no engine is silent for longer than the window; a silent engine holds nobody up after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from collector.config import JoinConfig
from online import RowBlock, Target
from online.state import saved

from .emitter import Emitter, TargetRows
from .events import Rows


class ReleasedRows(NamedTuple):
    """Rows of one target whose turn has come, and the instances of the emitters whose numbers they bear."""

    target: Target
    rows: RowBlock
    engines: dict[int, str]


class Release:
    """Rows of one configuration on their way to its models; each engine's come in the order of their end."""

    STATE = saved("release", _held=dict[Target, dict[str, deque[RowBlock]]], fresh=lambda _: Release())

    def __init__(self) -> None:
        self._held: dict[Target, dict[str, deque[RowBlock]]] = {}

    def add(self, instance: str, rows: list[TargetRows]) -> None:
        """Take rows of one engine."""
        for target, block in rows:
            self._held.setdefault(target, {}).setdefault(instance, deque()).append(block)

    def take_over(self, other: Release) -> None:
        """Hold another configuration's rows too: its identity became better known, and is this one's."""
        for target, by_instance in other._held.items():
            for instance, blocks in by_instance.items():
                held = self._held.setdefault(target, {}).setdefault(instance, deque())
                held.extend(blocks)

    def rows_held(self, instance: str) -> int:
        """Rows of one engine that wait for their turn."""
        return sum(len(block) for own in self._held.values() for block in own.get(instance, ()))

    def take(self, until_unix_ns: int | None) -> list[ReleasedRows]:
        """Rows that end until ``until_unix_ns`` (None: all), in order."""
        out = []
        for target, by_instance in sorted(self._held.items()):
            taken: list[RowBlock] = []
            engines: dict[int, str] = {}
            several = len(by_instance) > 1
            for instance, blocks in sorted(by_instance.items()):
                own = _until(blocks, until_unix_ns)
                engines |= {int(block.engine[0]): instance for block in own}
                taken += own
                if not blocks:
                    del by_instance[instance]
            if taken:
                block = RowBlock.concatenate(taken)
                if several:
                    # stable: equal ends stay in the order of the instances
                    block = block.take(np.argsort(block.end_ns, kind="stable"))
                out.append(ReleasedRows(target, block, engines))
        return out


def _until(blocks: deque[RowBlock], until_unix_ns: int | None) -> list[RowBlock]:
    """Take the rows that end in time from the front."""
    out = []
    while blocks:
        block = blocks[0]
        stop = len(block)
        if until_unix_ns is not None:
            stop = int(np.searchsorted(block.end_ns, until_unix_ns, side="right"))
        if stop < len(block):
            if stop:
                out.append(block.slice(0, stop))
                blocks[0] = block.slice(stop, len(block))
            break
        out.append(blocks.popleft())
    return out


def horizon(engines: Sequence[Emitter], settings: JoinConfig) -> int:
    """Until when (wall clock ns) the rows of a configuration's engines are all here.

    Always ``grace_s`` behind the newest event: by then an engine not heard of before would have spoken. An engine
    silent for ``window_s`` is not waited for.
    """
    newest = max((engine.event_unix_ns for engine in engines), default=0)
    speaking = [e.safe_unix_ns for e in engines if e.event_unix_ns >= newest - int(settings.window_s * 1e9)]
    grace = newest - int(settings.grace_s * 1e9)
    return min(grace, *speaking) if len(engines) > 1 else grace


def release_rows(
    releases: dict[str, Release], emitters: Mapping[str, list[Emitter]], settings: JoinConfig, *, flush: bool
) -> list[Rows]:
    """Rows whose turn has come, configuration by configuration; the hold of one without emitters ends with its rows."""
    out = []
    for config_id in sorted(releases):
        own = emitters.get(config_id, [])
        everything = flush or not own  # evicted or renamed: nobody is left to wait for
        released = releases[config_id].take(None if everything else horizon(own, settings))
        if not own:
            del releases[config_id]
        out += [Rows(config_id, target, rows, engines=engines) for target, rows, engines in released]
    return out
