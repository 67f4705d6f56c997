"""All engines: who emitted what, which API span belongs to which request, which configuration learns from it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from collector import configs
from collector.configs import FactSource
from collector.decode.records import ApiSpan, Telemetry
from online.rows import RowBlock, Target

from .engine import Engine, PendingRequest
from .reasons import JoinEvent, RowDrop
from .release import Release, horizon
from .settings import JoinSettings


class Joined(NamedTuple):
    """Rows for one configuration's target, in event-time order."""

    config_id: str
    target: Target
    rows: RowBlock


class Joiner:
    """Telemetry in, rows per configuration out; bounded in engines, steps and open requests."""

    def __init__(self, settings: JoinSettings) -> None:
        self._settings = settings
        self._engines: OrderedDict[tuple[str, str], Engine] = OrderedDict()
        self._engine_count = 0
        self._apis: OrderedDict[bytes, ApiSpan] = OrderedDict()
        self._waiting: OrderedDict[bytes, list[tuple[Engine, PendingRequest]]] = OrderedDict()
        self._releases: dict[str, Release] = {}
        self._config_ids: dict[tuple[str, str], str] = {}
        self.renamed: list[tuple[str, str]] = []
        self.events: Counter[JoinEvent] = Counter()

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, telemetry: Telemetry, recording: str = "") -> None:
        """Add what one resource of one export said; ``recording`` names the file in a replay."""
        for api in telemetry.api:
            self._add_api(api)
        if len(telemetry.steps) == 0 and not telemetry.core:
            return
        engine = self._engine(telemetry.instance, recording)
        if engine.facts.learn(configs.resource_facts(telemetry.facts), FactSource.RESOURCE):
            engine.configure()
        for request in engine.add(telemetry):
            self._match(engine, request)

    def _engine(self, instance: str, recording: str) -> Engine:
        key = (recording, instance)
        engine = self._engines.get(key)
        if engine is None:
            if len(self._engines) >= self._settings.engines_max:
                oldest = min(self._engines, key=lambda k: self._engines[k].event_unix_ns)
                del self._engines[oldest]
                self._config_ids.pop(oldest, None)
                self.events[JoinEvent.ENGINE_EVICTED] += 1
            engine = self._engines[key] = Engine(instance, recording, self._engine_count, self._settings)
            self._engine_count += 1
        return engine

    def _add_api(self, api: ApiSpan) -> None:
        waiting = self._waiting.pop(api.span_id, ())
        for engine, request in waiting:
            self._pair(engine, request, api)
        self._apis[api.span_id] = api
        if len(self._apis) > self._settings.requests_max:
            self._apis.popitem(last=False)

    def _match(self, engine: Engine, request: PendingRequest) -> None:
        """Find the API span that is the request's parent, now or when it comes."""
        parent = request.span.parent_span_id
        if not parent:
            return
        api = self._apis.get(parent)
        if api is not None:
            self._pair(engine, request, api)
            return
        self._waiting.setdefault(parent, []).append((engine, request))
        if len(self._waiting) > self._settings.requests_max:
            self._waiting.popitem(last=False)
            self.events[JoinEvent.OPEN_REQUESTS_EVICTED] += 1

    def _pair(self, engine: Engine, request: PendingRequest, api: ApiSpan) -> None:
        request.api = api
        if api.model:
            engine.facts.learn({"model": api.model}, FactSource.TELEMETRY)

    # --- out --------------------------------------------------------------------------------------------------------

    def drain(self, *, flush: bool = False) -> list[Joined]:
        """Rows that are final; ``flush``: nothing more will come, everything held becomes rows or drops."""
        for key, engine in self._engines.items():
            rows = engine.advance(flush=flush)
            config_id = self._config_of(key, engine)
            if rows:
                self._releases.setdefault(config_id, Release()).add(engine.instance, rows)
        out = []
        for config_id in sorted(self._releases):
            engines = self.engines_of(config_id)
            until = horizon(engines, self._settings)
            taken = self._releases[config_id].take(None if flush else until)
            out += [Joined(config_id, target, rows) for target, rows in taken]
        return out

    def _config_of(self, key: tuple[str, str], engine: Engine) -> str:
        """The engine's configuration; a fact learned later renames it and keeps its state."""
        config_id = configs.config_id(engine.facts.identity(engine.instance, engine.recording))
        before = self._config_ids.get(key)
        if before == config_id:
            return config_id
        self._config_ids[key] = config_id
        if before is not None and before not in self._config_ids.values():
            self.renamed.append((before, config_id))
            if before in self._releases:
                self._releases.setdefault(config_id, self._releases.pop(before))
        return config_id

    # --- what it holds ----------------------------------------------------------------------------------------------

    def engines(self) -> list[Engine]:
        """All engines, in order of appearance."""
        return list(self._engines.values())

    def engines_of(self, config_id: str) -> list[Engine]:
        """Engines of one configuration, in order of appearance."""
        return [self._engines[key] for key, name in self._config_ids.items() if name == config_id]

    def config_ids(self) -> list[str]:
        """Configurations of the engines held."""
        return sorted(set(self._config_ids.values()))

    @property
    def open_requests(self) -> int:
        """Requests waiting for their other half or for the frontier."""
        return sum(engine.open_requests for engine in self._engines.values())

    def take_events(self) -> tuple[Counter[JoinEvent], Counter[RowDrop]]:
        """Counts since the last call."""
        events, drops = self.events, Counter[RowDrop]()
        self.events = Counter()
        for engine in self._engines.values():
            events += engine.events
            drops += engine.drops
            engine.events, engine.drops = Counter(), Counter()
        return events, drops
