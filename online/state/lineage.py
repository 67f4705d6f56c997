"""Lineage: which engines a configuration has learned from, and of which times, so that no row is ever counted twice.

    engine -> spans (first, last, rows)      event time in ns of its earliest and latest row, and how many rows

Spans of one engine are more than ten minutes apart: an engine that moved from one gateway to another and back left a
gap, in which the other one learned. Two states have learned the same rows where spans of one engine overlap. A sender
that gave no name goes by its address, which others may have elsewhere: there, only spans that begin with the same row
are the same. Of an engine at most 4 spans are told apart (the nearest two become one), of a configuration the 4096
engines heard of last; spans of several states stand side by side. Adding is commutative and, below those bounds,
associative.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
import numpy as np
from numpy.typing import NDArray

from online.constants import ENGINES_MAX, SILENCE_NS

from .codec import Refusal, StateError, Tree

Span = tuple[int, int, int]

# Guard: memory.
SPANS_MAX = 4

_ADDRESS = re.compile(r"(ipv4|ipv6|unix|https?):|.*:\d+(#\d+)?$")


class Lineage:
    """Of one configuration.

    Attributes:
        engines: spans by engine, in order of their beginning.
    """

    def __init__(self) -> None:
        self.engines: dict[str, list[Span]] = {}

    def to_state(self) -> Tree:
        """Spans by engine."""
        return {engine: [[*span] for span in spans] for engine, spans in self.engines.items()}

    def from_state(self, state: Tree) -> None:
        """Take them from there; StateError if a span ends before it begins."""
        self.engines = msgspec.convert(state, dict[str, list[Span]])
        if any(last < first or rows < 0 for spans in self.engines.values() for first, last, rows in spans):
            raise StateError("a span of an engine ends before it begins")

    def record_rows(self, engines: Mapping[int, str], numbers: NDArray[np.int64], end_ns: NDArray[np.int64]) -> None:
        """Rows (n,) of several engines were learned; ``engines`` names their numbers (n,), of others there is none."""
        if not len(numbers):
            return
        lowest, highest = int(numbers.min()), int(numbers.max())
        if lowest == highest:
            if lowest in engines:
                self.record(engines[lowest], end_ns)
            return
        order = numbers.argsort(kind="stable")
        numbers, end_ns = numbers.take(order), end_ns.take(order)
        starts = np.concatenate(([0], (numbers[1:] != numbers[:-1]).nonzero()[0] + 1))
        firsts, lasts = np.minimum.reduceat(end_ns, starts).tolist(), np.maximum.reduceat(end_ns, starts).tolist()
        bounds = [*starts.tolist(), len(numbers)]
        places = {number: place for place, number in enumerate(numbers.take(starts).tolist())}
        for number, engine in engines.items():
            if (place := places.get(number)) is not None:
                start, stop = bounds[place : place + 2]
                self._record(engine, firsts[place], lasts[place], end_ns[start:stop])

    def record(self, engine: str, end_ns: NDArray[np.int64]) -> None:
        """Rows (n,) were learned."""
        self._record(engine, int(end_ns.min()), int(end_ns.max()), end_ns)

    def _record(self, engine: str, first: int, last: int, end_ns: NDArray[np.int64]) -> None:
        """Rows (n,) between these times were learned."""
        if last - first <= SILENCE_NS:
            self._extend(engine, (first, last, len(end_ns)))
            return
        times = np.sort(end_ns)
        for part in np.split(times, np.flatnonzero(np.diff(times) > SILENCE_NS) + 1):
            self._extend(engine, (int(part[0]), int(part[-1]), len(part)))

    def _extend(self, engine: str, span: Span) -> None:
        apart = []
        for other in self.engines.get(engine, ()):
            if other[0] - span[1] > SILENCE_NS or span[0] - other[1] > SILENCE_NS:
                apart.append(other)
            else:
                span = _joined(other, span)
        self._keep(engine, [*apart, span])

    def _keep(self, engine: str, spans: list[Span]) -> None:
        spans = sorted(spans)
        while len(spans) > SPANS_MAX:
            gaps = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
            at = gaps.index(min(gaps))
            spans[at : at + 2] = [_joined(spans[at], spans[at + 1])]
        self.engines[engine] = spans
        while len(self.engines) > ENGINES_MAX:
            del self.engines[min(self.engines, key=lambda name: self.engines[name][-1][1])]

    def add(self, other: Lineage) -> None:
        """Spans of both."""
        for engine, spans in other.engines.items():
            self._keep(engine, [*self.engines.get(engine, ()), *spans])

    def common_span(self, other: Lineage, engine: str) -> tuple[int, int] | None:
        """First and last time of rows of an engine that both have learned; None without any."""
        for mine in self.engines.get(engine, ()):
            for theirs in other.engines.get(engine, ()):
                first, last = max(mine[0], theirs[0]), min(mine[1], theirs[1])
                if first <= last and (mine[0] == theirs[0] or not _ADDRESS.match(engine)):
                    return first, last
        return None

    def main_engine(self) -> str:
        """The engine of the most rows; empty when none is known."""
        rows = {engine: sum(span[2] for span in spans) for engine, spans in self.engines.items()}
        return max(sorted(rows), key=rows.__getitem__, default="")


class LineageLedger:
    """The lineages of states that are to be merged, by name of the state."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], list[tuple[str, Lineage]]] = {}

    def admit(self, state: str, lineages: Mapping[str, Lineage]) -> None:
        """Take a state in.

        Raises:
            StateError: rows of it are in another one already; the sentence names the engine and both states. Nothing of
                it was taken in.
        """
        every = [(config_id, engine) for config_id, lineage in lineages.items() for engine in lineage.engines]
        for config_id, engine in every:
            for holder, held in self._holders.get((config_id, engine), ()):
                span = held.common_span(lineages[config_id], engine)
                if span is not None:
                    raise StateError(
                        f"{state}: engine {engine!r} of configuration {config_id} is in {holder} too, both with"
                        f" its rows of {_text(span[0])} to {_text(span[1])}, which would count twice",
                        Refusal.SHARED_ROWS,
                    )
        for key in every:
            self._holders.setdefault(key, []).append((state, lineages[key[0]]))


def _joined(a: Span, b: Span) -> Span:
    return min(a[0], b[0]), max(a[1], b[1]), a[2] + b[2]


def _text(unix_ns: int) -> str:
    try:
        return datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{unix_ns} ns"
