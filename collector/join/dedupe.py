"""Which span has been seen: a retried or duplicated export changes nothing.

Guarantee: within the window (ids newer than ``window_ns`` of event time, at most ``ids_max`` of them per emitter) a
span id is admitted once. A span older than everything remembered cannot be told from a repeat and is refused as late.
OTLP asks for this: a client that saw no answer sends again (opentelemetry-proto, specification, "Duplicate Data").
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from collector.telemetry import Skip
from online.state import saved


@dataclass(slots=True)
class EmitterIds:
    """Ids of one emitting instance; ``horizon_ns`` is the end of the newest one forgotten."""

    STATE = saved(
        "emitter_ids",
        by_age=list[tuple[int, bytes]],
        newest_ns=int,
        horizon_ns=int,
        fresh=lambda _: EmitterIds(),
    )

    ids: set[bytes] = field(default_factory=set)
    by_age: list[tuple[int, bytes]] = field(default_factory=list)
    newest_ns: int = 0
    horizon_ns: int = 0

    def restored(self) -> None:
        """Ids are saved with their age."""
        self.ids = {span_id for _, span_id in self.by_age}


class SpanWindow:
    """Span ids seen lately, per emitting instance; bounded by age, by ids and by emitters."""

    STATE = saved("span_window", _emitters=dict[str, EmitterIds])

    def __init__(self, window_ns: int, ids_max: int, emitters_max: int) -> None:
        self._window_ns = window_ns
        self._ids_max = ids_max
        self._emitters_max = emitters_max
        self._emitters: dict[str, EmitterIds] = {}

    def __len__(self) -> int:
        """Ids remembered, all emitters together."""
        return sum(len(emitter.ids) for emitter in self._emitters.values())

    def admit(self, instance: str, span_id: bytes, end_unix_ns: int) -> Skip | None:
        """None the first time a span id is seen; else why it is left out."""
        emitter = self._emitters.get(instance)
        if emitter is None:
            if len(self._emitters) >= self._emitters_max:
                self._forget_oldest_emitter()
            emitter = self._emitters[instance] = EmitterIds()
        if span_id in emitter.ids:
            return Skip.DUPLICATE
        if end_unix_ns <= emitter.horizon_ns:
            return Skip.LATE
        emitter.ids.add(span_id)
        heapq.heappush(emitter.by_age, (end_unix_ns, span_id))
        emitter.newest_ns = max(emitter.newest_ns, end_unix_ns)
        while len(emitter.ids) > self._ids_max or emitter.by_age[0][0] < emitter.newest_ns - self._window_ns:
            emitter.horizon_ns, forgotten = heapq.heappop(emitter.by_age)
            emitter.ids.discard(forgotten)
        return None

    def forget_ahead(self, latest_unix_ns: int) -> None:
        """Of emitters known by times that have not come yet, which an earlier version believed, nothing is kept."""
        for instance in [each for each, ids in self._emitters.items() if ids.newest_ns > latest_unix_ns]:
            del self._emitters[instance]

    def restored(self) -> None:
        """Within the bounds of this window, which may be smaller than those of the one that was saved."""
        while len(self._emitters) > self._emitters_max:
            self._forget_oldest_emitter()

    def _forget_oldest_emitter(self) -> None:
        oldest = min(self._emitters, key=lambda instance: self._emitters[instance].newest_ns)
        del self._emitters[oldest]
