"""One order for the rows of several engines of a configuration: wall clock, then instance.

Guarantee: rows leave in the order of (end_ns, instance) whatever the order in which the engines' rows came, as long as no
engine is silent for longer than the window; a silent engine holds nobody up after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from online.rows import RowBlock, Target

from .api_process import ApiProcess
from .engine import Engine, EngineRows
from .settings import JoinSettings


class Release:
    """Rows of one configuration on their way to its models."""

    def __init__(self) -> None:
        self._held: dict[Target, list[tuple[str, RowBlock]]] = {}

    def add(self, instance: str, rows: list[EngineRows]) -> None:
        """Take rows of one engine."""
        for target, block in rows:
            self._held.setdefault(target, []).append((instance, block))

    def take(self, until_unix_ns: int | None) -> list[EngineRows]:
        """Rows that end before ``until_unix_ns`` (None: all), in order."""
        out = []
        for target, held in sorted(self._held.items()):
            block = RowBlock.concatenate([block for _, block in held])
            instances = np.concatenate([np.full(len(block), instance, object) for instance, block in held])
            several = len({instance for instance, _ in held}) > 1
            if several:
                order = np.lexsort((instances.astype(str), block.end_ns))
                block, instances = block.take(order), instances[order]
            stop = len(block)
            if until_unix_ns is not None:
                late = np.flatnonzero(block.end_ns > until_unix_ns)
                stop = int(late[0]) if len(late) else stop
            if stop:
                out.append(EngineRows(target, block.slice(0, stop)))
            rest = block.slice(stop, len(block))
            self._held[target] = [
                (instance, rest.take(instances[stop:] == instance)) for instance in sorted(set(instances[stop:]))
            ]
        self._held = {target: held for target, held in self._held.items() if held}
        return out


def horizon(engines: Sequence[Engine | ApiProcess], settings: JoinSettings) -> int:
    """Until when (wall clock ns) the rows of a configuration's engines are all here.

    Always ``grace_s`` behind the newest event: by then an engine not heard of before would have spoken. An engine silent
    for ``window_s`` is not waited for.
    """
    newest = max((engine.event_unix_ns for engine in engines), default=0)
    speaking = [e.safe_unix_ns for e in engines if e.event_unix_ns >= newest - int(settings.window_s * 1e9)]
    grace = newest - int(settings.grace_s * 1e9)
    return min(grace, *speaking) if len(engines) > 1 else grace
