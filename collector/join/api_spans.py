"""Which API span belongs to which request: the request's parent, which may come before it or after it."""

from __future__ import annotations

from collections import OrderedDict

from collector.decode import ApiSpan
from collector.identity import FactSource
from online.state import saved

from .engine import Engine
from .engine_process import PendingRequest


class ApiSpans:
    """API spans seen lately, and the requests that wait for theirs; each bounded by ``requests_max``."""

    STATE = saved(
        "api_spans",
        _spans=OrderedDict[bytes, ApiSpan],
        _waiting=OrderedDict[bytes, list[tuple[Engine, PendingRequest]]],
        _waiting_count=int,
    )

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._spans: OrderedDict[bytes, ApiSpan] = OrderedDict()
        self._waiting: OrderedDict[bytes, list[tuple[Engine, PendingRequest]]] = OrderedDict()
        self._waiting_count = 0

    def add(self, api: ApiSpan) -> list[Engine]:
        """Add an API span; the requests that wait for it have it now. Whose they are."""
        waiting = self._waiting.pop(api.span_id, ())
        self._waiting_count -= len(waiting)
        for engine, request in waiting:
            _pair(engine, request, api)
        self._spans[api.span_id] = api
        if len(self._spans) > self._requests_max:
            self._spans.popitem(last=False)
        return [engine for engine, _ in waiting]

    def match(self, engine: Engine, request: PendingRequest) -> int:
        """Find the API span that is the request's parent, now or when it comes; how many others wait no longer."""
        parent = request.span.parent_span_id
        if not parent:
            return 0
        api = self._spans.get(parent)
        if api is not None:
            _pair(engine, request, api)
            return 0
        self._waiting.setdefault(parent, []).append((engine, request))
        self._waiting_count += 1
        evicted = 0
        while self._waiting_count > self._requests_max:
            requests = len(self._waiting.popitem(last=False)[1])
            self._waiting_count -= requests
            evicted += requests
        return evicted

    def reassign(self, old: Engine, new: Engine) -> None:
        """Requests that wait are another engine's from now on."""
        for waiting in self._waiting.values():
            waiting[:] = [(new if engine is old else engine, request) for engine, request in waiting]


def _pair(engine: Engine, request: PendingRequest, api: ApiSpan) -> None:
    request.api = api
    if api.model:
        engine.facts.learn({"model": api.model}, FactSource.TELEMETRY)
