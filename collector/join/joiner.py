"""All engines: who emitted what, which API span belongs to which request, which configuration learns from it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from collector.config import JoinConfig
from collector.decode import Telemetry
from collector.decode.pages import ScrapedPage
from collector.identity import Knowledge
from collector.join.kv import KvSources
from collector.join.pages import PageEngines
from collector.telemetry import Counts, JoinEvent, RowDrop, table
from online import Lane, Target
from online.state import saved

from .api_process import ApiProcess
from .api_spans import ApiSpans
from .describe import Known, describe
from .emitter import Emitter, Key, TargetRows, by_config, config_id_of
from .engine import Engine
from .events import Event, Renamed, Rows, Succeeded
from .release import Release, release_rows
from .same_engine import same_engine

_E = TypeVar("_E", bound=Emitter)


class Joiner:
    """Telemetry in, rows per configuration out; bounded in engines, steps and open requests."""

    STATE = saved(
        "joiner",
        _engines=OrderedDict[Key, Engine],
        _api_processes=OrderedDict[Key, ApiProcess],
        _aliases=dict[Key, Engine],
        _emitter_count=int,
        _api_spans=ApiSpans,
        _releases=dict[str, Release],
        _config_ids=dict[Key, str],
        kv=KvSources,
        pages=PageEngines,
    )

    def __init__(self, settings: JoinConfig, knowledge: Knowledge | None = None) -> None:
        self._settings = settings
        self.knowledge = knowledge or Knowledge()
        self._engines: OrderedDict[Key, Engine] = OrderedDict()
        self._api_processes: OrderedDict[Key, ApiProcess] = OrderedDict()
        self._aliases: dict[Key, Engine] = {}
        self._emitter_count = 0
        self._api_spans = ApiSpans(settings.requests_max)
        self._releases: dict[str, Release] = {}
        self._config_ids: dict[Key, str] = {}
        self._described: dict[str, Known] = {}
        self._succeeded: list[Succeeded] = []
        self._counts = Counts()
        self.kv = KvSources(settings)
        self.pages = PageEngines(settings)

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, telemetry: Telemetry, recording: str = "") -> None:
        """Add what one resource of one export said; ``recording`` names the file in a replay."""
        for api in telemetry.api:
            self._api_spans.add(api)
        for batch in telemetry.kv:
            self.kv.add(batch)
        key = (recording, telemetry.instance)
        if telemetry.requests:
            process = self._api_processes.get(key) or self._new_api_process(key)
            self._teach_facts(process, telemetry)
            process.add(telemetry.requests)
        if len(telemetry.steps) == 0 and not telemetry.core:
            return
        engine = self._engine_for(key, telemetry)
        # steps of a second emitter on the same engine are known from the first
        for request in engine.add(telemetry, with_steps=key not in self._aliases):
            self._counts[table.JOIN_EVENTS, JoinEvent.OPEN_REQUESTS_EVICTED] += self._api_spans.match(engine, request)
        if not engine.released:
            self._merge_double(key, engine)

    def add_page(self, page: ScrapedPage) -> None:
        """Add what a server's page counted."""
        for key in self.pages.add(page, self._next_number, self.knowledge):
            self._config_ids.pop(key, None)
            self._counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] += 1

    def _engine_for(self, key: Key, telemetry: Telemetry) -> Engine:
        engine = self._aliases.get(key) or self._engines.get(key) or self._new_engine(key)
        before = engine.facts.held()
        if self._teach_facts(engine, telemetry):
            if engine.facts.is_another_server(before) and engine.restarts_with(telemetry):
                engine = self._succeed(key, engine)
            engine.configure()
        return engine

    def _teach_facts(self, emitter: Emitter, telemetry: Telemetry) -> bool:
        before = emitter.facts.conflicts
        changed = self.knowledge.apply(emitter.facts, telemetry.facts, emitter.instance, emitter.recording)
        self._counts[table.JOIN_EVENTS, JoinEvent.FACT_CONFLICT] += emitter.facts.conflicts - before
        return changed

    def _new_engine(self, key: Key) -> Engine:
        if len(self._engines) >= self._settings.engines_max:
            evicted = self._evict_oldest(self._engines)
            self._aliases = {k: e for k, e in self._aliases.items() if e is not evicted}
        engine = self._engines[key] = Engine(key[1], key[0], self._next_number(), self._settings)
        return engine

    def _new_api_process(self, key: Key) -> ApiProcess:
        if len(self._api_processes) >= self._settings.engines_max:
            self._evict_oldest(self._api_processes)
        process = self._api_processes[key] = ApiProcess(key[1], key[0], self._next_number(), self._settings)
        return process

    def _evict_oldest(self, emitters: OrderedDict[Key, _E]) -> _E:
        """Make room: the emitter silent longest goes."""
        oldest = min(emitters, key=lambda key: emitters[key].event_unix_ns)
        self._config_ids.pop(oldest, None)
        self._counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] += 1
        return emitters.pop(oldest)

    def _next_number(self) -> int:
        self._emitter_count += 1
        return self._emitter_count - 1

    def _succeed(self, key: Key, engine: Engine) -> Engine:
        """The server came back as another configuration: what it was ends with its rows, and is the new one's prior."""
        new = config_id_of(engine)
        old = self._config_ids.get(key)
        if old is None or old == new:
            return engine
        self._hold_rows(old, engine.instance, engine.advance(flush=True))
        heir = engine.successor(self._next_number())
        self._engines[key] = heir
        self._aliases.update({k: heir for k, e in self._aliases.items() if e is engine})
        self._api_spans.reassign(engine, heir)
        self._config_ids[key] = new
        self._succeeded.append(Succeeded(old, new))
        return heir

    def _merge_double(self, key: Key, engine: Engine) -> None:
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
            self._api_spans.reassign(drop, keep)
            self._counts[table.JOIN_EVENTS, JoinEvent.DOUBLE_EMITTER] += 1
            return

    # --- out --------------------------------------------------------------------------------------------------------

    def drain(self, *, flush: bool = False) -> list[Event]:
        """What is final and what has changed, in the order in which it has to be taken (see the module of events).

        ``flush``: nothing more will come, everything held becomes rows or drops.
        """
        known = [*self._engines.items(), *self._aliases.items()]
        self.kv.bind([(key[1], sequence) for key, engine in known for sequence in engine.sequences], flush=flush)
        renamed = [event for key, engine in self._engines.items() for event in self._identify(key, engine)]
        quick = self._advance_engines(flush=flush)
        for key, process in self._api_processes.items():
            renamed += self._advance_api_process(key, process, flush=flush)
        senders: list[tuple[Key, Engine | ApiProcess]] = [*self._engines.items(), *self._api_processes.items()]
        pages_alone, succeeded = self.pages.yield_to(senders, self._config_ids)
        for key, page in pages_alone:
            renamed += self._identify(key, page)
            self._hold_rows(self._config_ids[key], page.instance, page.advance())
        emitters = self._emitters_by_config()
        described, self._described = describe(emitters, self._described)
        released = release_rows(self._releases, emitters, self._settings, flush=flush)
        succeeded, self._succeeded = self._succeeded + succeeded, []
        return [*renamed, *described, *quick, *released, *succeeded]

    def _identify(self, key: Key, emitter: Emitter) -> list[Renamed]:
        """Find the emitter's configuration; a fact learned later renames it and keeps its state."""
        config_id = config_id_of(emitter)
        before = self._config_ids.get(key)
        if before == config_id:
            return []
        self._config_ids[key] = config_id
        if before is None or before in self._config_ids.values():
            return []
        if before in self._releases:
            self._releases.setdefault(config_id, Release()).take_over(self._releases.pop(before))
        return [Renamed(before, config_id)]

    def _advance_engines(self, *, flush: bool) -> list[Rows]:
        """Published rows are held for their turn; returns those of the quick lane."""
        quick = []
        for key, engine in self._engines.items():
            config_id = self._config_ids[key]
            self._hold_rows(config_id, engine.instance, engine.advance(flush=flush))
            if self._settings.quick_lane and not flush:
                quick += [Rows(config_id, Target.STEP_TIME, block, Lane.QUICK) for block in engine.quick_rows()]
        return quick

    def _advance_api_process(self, key: Key, process: ApiProcess, *, flush: bool) -> list[Renamed]:
        """Request spans belong to the only configuration of engines known beside them, else to their own process.

        Where engines send steps, request spans teach nothing about steps.
        """
        rows = process.advance(flush=flush)
        engine_configs = {self._config_ids[k] for k in self._engines if k[0] == key[0]}
        if not engine_configs:
            renamed = self._identify(key, process)
            self._hold_rows(self._config_ids[key], process.instance, rows)
            return renamed
        if key not in self._engines:  # both may be told by one service.instance.id: that of a pod
            self._config_ids.pop(key, None)
        usable = []
        for target_rows in rows:
            if len(engine_configs) > 1:
                process.count_drop(RowDrop.WHICH_CONFIG, len(target_rows.rows))
            elif target_rows.target is Target.STEP_TIME:
                process.count_drop(RowDrop.TOLD_BY_STEPS, len(target_rows.rows))
            else:
                usable.append(target_rows)
        self._hold_rows(min(engine_configs), process.instance, usable)
        return []

    def _hold_rows(self, config_id: str, instance: str, rows: list[TargetRows]) -> None:
        if rows:
            self._releases.setdefault(config_id, Release()).add(instance, rows)

    # --- what it holds ----------------------------------------------------------------------------------------------

    def _emitters_by_config(self) -> dict[str, list[Emitter]]:
        return by_config({**self.pages.by_key, **self._api_processes, **self._engines}, self._config_ids)

    def emitters_of(self, config_id: str) -> list[Emitter]:
        """Emitters of one configuration, in order of appearance."""
        return self._emitters_by_config().get(config_id, [])

    def engine_of(self, instance: str, recording: str = "") -> Engine | None:
        """The engine that this emitter's steps and requests belong to."""
        return self._aliases.get((recording, instance)) or self._engines.get((recording, instance))

    def config_ids(self) -> list[str]:
        """Configurations of the engines held."""
        return sorted(set(self._config_ids.values()))

    @property
    def open_requests(self) -> int:
        """Requests waiting for their other half or for the frontier."""
        return sum(emitter.open_requests for emitter in self._emitters())

    @property
    def watermark_age_s(self) -> float:
        """How far published rows trail the newest event, in seconds of event time; the worst engine."""
        return max((max(0, e.event_unix_ns - e.safe_unix_ns) / 1e9 for e in self._emitters()), default=0.0)

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        counts, self._counts = self._counts, Counts()
        for emitter in self._emitters():
            counts.merge(emitter.take_counts())
        counts.merge(self.kv.take_counts())
        return counts

    def _emitters(self) -> list[Emitter]:
        return [*self._engines.values(), *self._api_processes.values(), *self.pages.by_key.values()]
