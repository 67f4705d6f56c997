"""Deduplicates spans, and pairs API spans with requests.

A retried or duplicated export changes nothing: within the window (ids newer than ``window_ns`` of event time, at most
``ids_max`` of them per emitter) a span id is accepted once. A span older than everything remembered cannot be told from
a repeat and is refused as late. OTLP asks for this: a client that saw no answer sends again (opentelemetry-proto,
specification, "Duplicate Data").

An API span is the parent of its requests' core spans, and may come before them or after them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from collector.decode import ApiSpan
from collector.identity import FactSource
from collector.telemetry import JoinEvent, Skip

from .engine import Engine
from .requests import PendingRequest

REMEMBERED_NS = 600_000_000_000
"""Of event time: an export that is sent again within it changes nothing. Retries of SDKs end after a minute."""
IDS_MAX = 100_000
"""Span ids remembered of one emitter; a step every 10 ms gives 60,000 in that time."""
EMITTERS_RATIO = 4
"""Emitters whose span ids are remembered, to each engine: itself, its API processes, and its successor."""


@dataclass(slots=True)
class EmitterIds:
    """Ids of one emitting instance; ``forgotten_ns`` is the end of the newest one forgotten."""

    ids: set[bytes] = field(default_factory=set)
    by_age: list[tuple[int, bytes]] = field(default_factory=list)
    newest_ns: int = 0
    forgotten_ns: int = 0


class SpanWindow:
    """Span ids seen lately, per emitting instance; bounded by age, by ids and by emitters."""

    def __init__(self, engines_max: int, window_ns: int = REMEMBERED_NS, ids_max: int = IDS_MAX) -> None:
        self._window_ns, self._ids_max, self._emitters_max = window_ns, ids_max, EMITTERS_RATIO * engines_max
        self._emitters: OrderedDict[str, EmitterIds] = OrderedDict()

    def __len__(self) -> int:
        """Ids remembered, all emitters together."""
        return sum(len(emitter.ids) for emitter in self._emitters.values())

    def accept(self, instance: str, span_id: bytes, end_unix_ns: int) -> Skip | None:
        """Accept a span id the first time (None); else return why the span is left out."""
        emitter = self._emitters.get(instance)
        if emitter is None:
            if len(self._emitters) >= self._emitters_max:
                self._emitters.popitem(last=False)
            emitter = self._emitters[instance] = EmitterIds()
        self._emitters.move_to_end(instance)  # the one heard of longest ago is first, whatever times it tells
        if span_id in emitter.ids:
            return Skip.DUPLICATE
        if end_unix_ns <= emitter.forgotten_ns:
            return Skip.LATE
        emitter.ids.add(span_id)
        heapq.heappush(emitter.by_age, (end_unix_ns, span_id))
        emitter.newest_ns = max(emitter.newest_ns, end_unix_ns)
        while len(emitter.ids) > self._ids_max or emitter.by_age[0][0] < emitter.newest_ns - self._window_ns:
            emitter.forgotten_ns, forgotten = heapq.heappop(emitter.by_age)
            emitter.ids.discard(forgotten)
        return None


class ApiSpans:
    """API spans seen lately, and the requests that wait for theirs; each bounded by ``requests_max``."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._spans: OrderedDict[bytes, ApiSpan] = OrderedDict()
        self._waiting: OrderedDict[bytes, list[tuple[Engine, PendingRequest]]] = OrderedDict()
        self._waiting_count = 0

    def add(self, api: ApiSpan) -> None:
        """Add an API span; the requests that wait for it have it now."""
        waiting = self._waiting.pop(api.span_id, ())
        self._waiting_count -= len(waiting)
        for engine, request in waiting:
            _pair(engine, request, api)
        self._spans[api.span_id] = api
        if len(self._spans) > self._requests_max:
            self._spans.popitem(last=False)

    def match(self, engine: Engine, request: PendingRequest) -> None:
        """Find the API span that is the request's parent, now or when it comes; where too many wait, the oldest go."""
        parent = request.span.parent_span_id
        if not parent:
            return
        if parent in self._spans:
            _pair(engine, request, self._spans[parent])
            return
        self._waiting.setdefault(parent, []).append((engine, request))
        self._waiting_count += 1
        while self._waiting_count > self._requests_max:
            requests = len(self._waiting.popitem(last=False)[1])
            self._waiting_count -= requests
            engine.count(JoinEvent.OPEN_REQUESTS_EVICTED, requests)


def _pair(engine: Engine, request: PendingRequest, api: ApiSpan) -> None:
    request.api = api
    engine.is_changed = True
    if api.model:
        engine.facts.learn({"model": api.model}, FactSource.TELEMETRY)
