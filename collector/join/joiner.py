"""All engines: who emitted what, which API span belongs to which request, which configuration learns from it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from collector.config import JoinConfig
from collector.decode import ApiSpan, Telemetry
from collector.identity import FactSource, Knowledge
from collector.identity import facts as configs
from collector.join.kv import KvSources
from collector.telemetry import JoinEvent, RowDrop
from online import Lane, RowBlock, Target

from .api_process import ApiProcess
from .engine import Engine, EngineRows, PendingRequest
from .release import Release, horizon
from .same_engine import same_engine


class Joined(NamedTuple):
    """Rows for one configuration's target, in event-time order."""

    config_id: str
    target: Target
    rows: RowBlock
    lane: Lane = Lane.PUBLISHED


class Joiner:
    """Telemetry in, rows per configuration out; bounded in engines, steps and open requests."""

    def __init__(self, settings: JoinConfig, knowledge: Knowledge | None = None) -> None:
        self._settings = settings
        self.knowledge = knowledge or Knowledge()
        self._engines: OrderedDict[tuple[str, str], Engine] = OrderedDict()
        self._processes: OrderedDict[tuple[str, str], ApiProcess] = OrderedDict()
        self._aliases: dict[tuple[str, str], Engine] = {}
        self._engine_count = 0
        self._apis: OrderedDict[bytes, ApiSpan] = OrderedDict()
        self._waiting: OrderedDict[bytes, list[tuple[Engine, PendingRequest]]] = OrderedDict()
        self._waiting_count = 0
        self._releases: dict[str, Release] = {}
        self._config_ids: dict[tuple[str, str], str] = {}
        self.renamed: list[tuple[str, str]] = []
        self.succeeded: list[tuple[str, str]] = []
        self.facts_changed = False
        self.events: Counter[JoinEvent] = Counter()
        self.kv = KvSources(settings)

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, telemetry: Telemetry, recording: str = "") -> None:
        """Add what one resource of one export said; ``recording`` names the file in a replay."""
        for api in telemetry.api:
            self._add_api(api)
        for batch in telemetry.kv:
            self.kv.add(batch)
        key = (recording, telemetry.instance)
        if telemetry.requests:
            process = self._processes.get(key) or self._new_process(key)
            self._inform(process, telemetry)
            for span in telemetry.requests:
                process.requests.add(span)
        if len(telemetry.steps) == 0 and not telemetry.core:
            return
        engine = self._engine_for(key, telemetry)
        if key in self._aliases:
            telemetry.steps = telemetry.steps[:0]
            telemetry.snapshots = telemetry.snapshots[:0]
        for request in engine.add(telemetry):
            self._match(engine, request)
        if not engine.released:
            self._find_double(key, engine)

    def _engine_for(self, key: tuple[str, str], telemetry: Telemetry) -> Engine:
        engine = self._aliases.get(key) or self._engines.get(key) or self._new_engine(key)
        before = engine.facts.held()
        if self._inform(engine, telemetry):
            if engine.facts.is_another_server(before) and engine.restarts_with(telemetry):
                engine = self._succeed(key, engine)
            engine.configure()
        return engine

    def _inform(self, engine: Engine | ApiProcess, telemetry: Telemetry) -> bool:
        before = engine.facts.conflicts
        changed = self.knowledge.apply(engine.facts, telemetry.facts, engine.instance, engine.recording)
        self.events[JoinEvent.FACT_CONFLICT] += engine.facts.conflicts - before
        self.facts_changed |= changed
        return changed

    def _new_engine(self, key: tuple[str, str]) -> Engine:
        if len(self._engines) >= self._settings.engines_max:
            oldest = min(self._engines, key=lambda k: self._engines[k].event_unix_ns)
            evicted = self._engines.pop(oldest)
            self._aliases = {k: e for k, e in self._aliases.items() if e is not evicted}
            self._config_ids.pop(oldest, None)
            self.events[JoinEvent.ENGINE_EVICTED] += 1
        engine = self._engines[key] = Engine(key[1], key[0], self._engine_count, self._settings)
        self._engine_count += 1
        return engine

    def _new_process(self, key: tuple[str, str]) -> ApiProcess:
        if len(self._processes) >= self._settings.engines_max:
            oldest = min(self._processes, key=lambda k: self._processes[k].event_unix_ns)
            del self._processes[oldest]
            self._config_ids.pop(oldest, None)
            self.events[JoinEvent.ENGINE_EVICTED] += 1
        process = self._processes[key] = ApiProcess(key[1], key[0], self._engine_count, self._settings)
        self._engine_count += 1
        return process

    def _succeed(self, key: tuple[str, str], engine: Engine) -> Engine:
        """The server came back as another configuration: what it was ends with its rows, and is the new one's prior."""
        new = configs.config_id(engine.facts.identity(engine.instance, engine.recording))
        old = self._config_ids.get(key)
        if old is None or old == new:
            return engine
        self._hold(old, engine.instance, engine.advance(flush=True))
        heir = Engine(key[1], key[0], self._engine_count, self._settings)
        self._engine_count += 1
        heir.facts = engine.facts
        heir.events, heir.drops = engine.events, engine.drops
        heir.events[JoinEvent.ENGINE_RESTART] += 1
        self._engines[key] = heir
        self._aliases.update({k: heir for k, e in self._aliases.items() if e is engine})
        self._waiting_moved(engine, heir)
        self._config_ids[key] = new
        self.facts_changed = True
        self.succeeded.append((old, new))
        return heir

    def _find_double(self, key: tuple[str, str], engine: Engine) -> None:
        """Two emitters on one engine: the richer one goes on, the other one's requests are added to it."""
        for other_key, other in self._engines.items():
            if other is engine or other_key[0] != key[0] or not same_engine(engine, other):
                continue
            keep, drop = (other, engine) if other.quality <= engine.quality else (engine, other)
            dropped = next(k for k, e in self._engines.items() if e is drop)
            keep.take_over(drop)
            keep.configure()
            del self._engines[dropped]
            self._config_ids.pop(dropped, None)
            self._aliases[dropped] = keep
            self._aliases.update({k: keep for k, e in self._aliases.items() if e is drop})
            if len(self._aliases) > self._settings.engines_max:  # one that still sends is found again
                del self._aliases[next(iter(self._aliases))]
            self._waiting_moved(drop, keep)
            self.events[JoinEvent.DOUBLE_EMITTER] += 1
            return

    def _waiting_moved(self, drop: Engine, keep: Engine) -> None:
        for waiting in self._waiting.values():
            waiting[:] = [(keep if engine is drop else engine, request) for engine, request in waiting]

    def _add_api(self, api: ApiSpan) -> None:
        waiting = self._waiting.pop(api.span_id, ())
        self._waiting_count -= len(waiting)
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
        self._waiting_count += 1
        while self._waiting_count > self._settings.requests_max:
            evicted = len(self._waiting.popitem(last=False)[1])
            self._waiting_count -= evicted
            self.events[JoinEvent.OPEN_REQUESTS_EVICTED] += evicted

    def _pair(self, engine: Engine, request: PendingRequest, api: ApiSpan) -> None:
        request.api = api
        if api.model:
            self.facts_changed |= engine.facts.learn({"model": api.model}, FactSource.TELEMETRY)

    # --- out --------------------------------------------------------------------------------------------------------

    def drain(self, *, flush: bool = False) -> list[Joined]:
        """Rows that are final; ``flush``: nothing more will come, everything held becomes rows or drops."""
        out = []
        known = [*self._engines.items(), *self._aliases.items()]
        self.kv.bind([(key[1], one) for key, engine in known for one in engine.sequences], flush=flush)
        for key, engine in self._engines.items():
            rows = engine.advance(flush=flush)
            config_id = self._config_of(key, engine)
            self._hold(config_id, engine.instance, rows)
            if self._settings.quick_lane and not flush:
                out += [Joined(config_id, Target.STEP_TIME, block, Lane.QUICK) for block in engine.quick()]
        for key, process in self._processes.items():
            self._hold(*self._attribute(key, process, process.advance(flush=flush)))
        for config_id in sorted(self._releases):
            emitters = self.engines_of(config_id)
            everything = flush or not emitters  # evicted or renamed: nobody is left to wait for
            until = None if everything else horizon(emitters, self._settings)
            taken = self._releases[config_id].take(until)
            if not emitters:
                del self._releases[config_id]
            out += [Joined(config_id, target, rows) for target, rows in taken]
        return out

    def _hold(self, config_id: str, instance: str, rows: list[EngineRows]) -> None:
        if rows:
            self._releases.setdefault(config_id, Release()).add(instance, rows)

    def _attribute(
        self, key: tuple[str, str], process: ApiProcess, rows: list[EngineRows]
    ) -> tuple[str, str, list[EngineRows]]:
        """Request spans belong to the only configuration of engines known beside them, else to their own process.

        Where engines send steps, request spans teach nothing about steps.
        """
        beside = {self._config_ids[k] for k in self._engines if k[0] == key[0]}
        if not beside:
            return self._config_of(key, process), process.instance, rows
        self._config_ids.pop(key, None)
        rest = []
        for one in rows:
            if len(beside) > 1:
                process.requests.drops[RowDrop.WHICH_CONFIG] += len(one.rows)
            elif one.target is Target.STEP_TIME:
                process.requests.drops[RowDrop.TOLD_BY_STEPS] += len(one.rows)
            else:
                rest.append(one)
        return min(beside), process.instance, rest

    def _config_of(self, key: tuple[str, str], engine: Engine | ApiProcess) -> str:
        """The engine's configuration; a fact learned later renames it and keeps its state."""
        config_id = configs.config_id(engine.facts.identity(engine.instance, engine.recording))
        before = self._config_ids.get(key)
        if before == config_id:
            return config_id
        self._config_ids[key] = config_id
        self.facts_changed = True
        if before is not None and before not in self._config_ids.values():
            self.renamed.append((before, config_id))
            if before in self._releases:
                self._releases.setdefault(config_id, self._releases.pop(before))
        return config_id

    # --- what it holds ----------------------------------------------------------------------------------------------

    def engines_of(self, config_id: str) -> list[Engine | ApiProcess]:
        """Emitters of one configuration, in order of appearance."""
        emitters: dict[tuple[str, str], Engine | ApiProcess] = {**self._engines, **self._processes}
        return [emitters[key] for key, name in self._config_ids.items() if name == config_id and key in emitters]

    def engine_of(self, instance: str, recording: str = "") -> Engine | None:
        """The engine that this emitter's steps and requests belong to."""
        return self._aliases.get((recording, instance)) or self._engines.get((recording, instance))

    def config_ids(self) -> list[str]:
        """Configurations of the engines held."""
        return sorted(set(self._config_ids.values()))

    @property
    def open_requests(self) -> int:
        """Requests waiting for their other half or for the frontier."""
        emitters: list[Engine | ApiProcess] = [*self._engines.values(), *self._processes.values()]
        return sum(emitter.open_requests for emitter in emitters)

    @property
    def watermark_age_s(self) -> float:
        """How far published rows trail the newest event, in seconds of event time; the worst engine."""
        emitters: list[Engine | ApiProcess] = [*self._engines.values(), *self._processes.values()]
        return max((max(0, e.event_unix_ns - e.safe_unix_ns) / 1e9 for e in emitters), default=0.0)

    def take_events(self) -> tuple[Counter[JoinEvent], Counter[RowDrop]]:
        """Counts since the last call."""
        events, drops = self.events, Counter[RowDrop]()
        self.events = Counter()
        for engine in self._engines.values():
            events += engine.events
            drops += engine.drops
            engine.events, engine.drops = Counter(), Counter()
        for process in self._processes.values():
            drops += process.requests.drops
            process.requests.drops = Counter()
        return events, drops
