"""All engines: who emitted what, which API span belongs to which request, which configuration learns from it."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict
from collections.abc import Collection

from collector.config import JoinConfig
from collector.decode import Telemetry
from collector.decode.pages import ScrapedPage
from collector.identity import Knowledge
from collector.join.kv import KvSources
from collector.join.pages import PageEngines, keys_of
from collector.telemetry import Counts, JoinEvent, table
from online import Lane, Target
from online.state import saved

from .api_process import ApiProcess
from .api_spans import ApiSpans
from .describe import Known, describe
from .emitter import Emitter, Key, TargetRows, by_config, config_id_of
from .engine import Engine, take_restarts
from .events import Event, Renamed, Rows, Succeeded
from .places import Full, Places
from .release import Release, release_rows
from .same_engine import find_double
from .shared_ids import SharedIds
from .waiting import Waiting, waiting_of


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
        _shared_ids=SharedIds,
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
        self._shared_ids = SharedIds()
        self._described: dict[str, Known] = {}
        self._places = Places(settings)
        self._heard: Counter[Key] = Counter()
        self._succeeded: list[Succeeded] = []
        self._counts = Counts()
        self.kv = KvSources(settings)
        self.pages = PageEngines(settings)

    def add(self, telemetry: Telemetry, recording: str = "") -> None:
        """Add what one resource of one export said; ``recording`` names the file in a replay."""
        for api in telemetry.api:
            self._api_spans.add(api)
        for batch in telemetry.kv:
            self.kv.add(batch)
        key = (recording, telemetry.instance)
        with contextlib.suppress(Full):
            if telemetry.requests:
                self._add_requests(key, telemetry)
            if len(telemetry.steps) or telemetry.core:
                self._add_steps(self._shared_ids.key_of(key, telemetry, self._counts), telemetry)

    def _add_requests(self, key: Key, telemetry: Telemetry) -> None:
        process = self._api_processes.get(key)
        if process is None:
            for gone in self._places.make_room(self._api_processes, key, telemetry, self._counts):
                self._forget(gone, self._api_processes.pop(gone))
            process = self._api_processes[key] = ApiProcess(key[1], key[0], self._next_number(), self._settings)
        self._teach_facts(process, telemetry)
        process.add(telemetry.requests)
        self._heard[key] += 1

    def _add_steps(self, key: Key, telemetry: Telemetry) -> None:
        engine = self._engine_for(key, telemetry)
        self._heard[engine.recording, engine.instance] += 1
        # steps of a second emitter on the same engine are known from the first
        for request in engine.add(telemetry, with_steps=key not in self._aliases):
            self._counts[table.JOIN_EVENTS, JoinEvent.OPEN_REQUESTS_EVICTED] += self._api_spans.match(engine, request)
        if not engine.released:
            self._merge_double(engine)

    def add_page(self, page: ScrapedPage) -> None:
        """Add what a server's page counted."""
        for key in self.pages.add(page, self._next_number, self.knowledge):
            self._config_ids.pop(key, None)
            self._heard.pop(key, None)
            self._counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] += 1
        self._heard.update(keys_of(page))

    def _engine_for(self, key: Key, telemetry: Telemetry) -> Engine:
        engine = self._aliases.get(key) or self._engines.get(key)
        if engine is None:
            for gone in self._places.make_room(self._engines, key, telemetry, self._counts):
                self._forget(gone, self._engines.pop(gone))
            engine = self._engines[key] = Engine(key[1], key[0], self._next_number(), self._settings)
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

    def _forget(self, key: Key, emitter: Emitter) -> None:
        """It is gone: what it held is learned as at the end of a stream."""
        config_id = self._config_ids.pop(key, None)
        if config_id is not None:
            self._hold_rows(config_id, emitter.instance, emitter.advance(flush=True))
        self._aliases = {k: e for k, e in self._aliases.items() if e is not emitter}
        self._heard.pop(key, None)

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

    def _merge_double(self, engine: Engine) -> None:
        """Two emitters on one engine: the richer one goes on, the other one's requests are added to it."""
        pair = find_double(engine, self._engines)
        if pair is None:
            return
        keep, drop, dropped = pair
        keep.take_over(drop)
        keep.configure()
        for known in (self._engines, self._config_ids, self._heard):
            known.pop(dropped, None)
        self._aliases[dropped] = keep
        self._aliases.update({k: keep for k, e in self._aliases.items() if e is drop})
        if len(self._aliases) > self._settings.engines_max:  # one that still sends is found again
            del self._aliases[next(iter(self._aliases))]
        self._api_spans.reassign(drop, keep)
        self._counts[table.JOIN_EVENTS, JoinEvent.DOUBLE_EMITTER] += 1

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
        emitters = by_config(self.emitters, self._config_ids)
        described, self._described = describe(emitters, self._described)
        released = release_rows(self._releases, emitters, self._settings, flush=flush)
        succeeded, self._succeeded = self._succeeded + succeeded, []
        return [*renamed, *described, *take_restarts(self._engines, self._config_ids), *quick, *released, *succeeded]

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
        """Request spans belong to the only configuration of engines known beside them, else to their own process."""
        rows = process.advance(flush=flush)
        others = (self._api_processes.keys() | self.pages.by_key.keys()) - self._engines.keys()
        engine_configs = {self._config_ids[k] for k in self._config_ids if k[0] == key[0] and k not in others}
        if not engine_configs:
            renamed = self._identify(key, process)
            self._hold_rows(self._config_ids[key], process.instance, rows)
            return renamed
        if key not in self._engines:  # both may be told by one service.instance.id: that of a pod
            self._config_ids.pop(key, None)
        for engine in (e for k, e in self._engines.items() if {self._config_ids.get(k)} == engine_configs):
            process.tell_engine(engine.api_queueing)
        self._hold_rows(min(engine_configs), process.instance, process.beside_engines(rows, len(engine_configs)))
        return []

    def _hold_rows(self, config_id: str, instance: str, rows: list[TargetRows]) -> None:
        if rows:
            self._releases.setdefault(config_id, Release()).add(instance, rows)

    def waiting(self) -> list[Waiting]:
        """What each emitter holds that gave no rows yet, and what that waits for."""
        return waiting_of(self.emitters, self._config_ids, self._releases, self._heard)

    def part(self, config_id: str, keys: Collection[Key]) -> Joiner:
        """A copy in which these emitters of a configuration are alone, to be flushed; this one stays as it is."""
        part = Joiner(self._settings, self.knowledge)
        part._engines = OrderedDict((key, self._engines[key]) for key in self._engines if key in keys)
        part._api_processes = OrderedDict((k, self._api_processes[k]) for k in self._api_processes if k in keys)
        known = self._engines.keys() | {*keys}
        part._config_ids = {key: self._config_ids[key] for key in self._config_ids if key in known}
        part._releases = {config: held for config, held in self._releases.items() if config == config_id}
        part._described = self._described
        part.kv = self.kv.part(self._settings, [own for engine in part._engines.values() for own in engine.sequences])
        return copy.deepcopy(part, {id(shared): shared for shared in (self._settings, self.knowledge, self._described)})

    def emitters_of(self, config_id: str) -> list[Emitter]:
        """Emitters of one configuration, in order of appearance."""
        return by_config(self.emitters, self._config_ids).get(config_id, [])

    def engine_of(self, instance: str, recording: str = "") -> Engine | None:
        """The engine that this emitter's steps and requests belong to."""
        return self._aliases.get((recording, instance)) or self._engines.get((recording, instance))

    def config_ids(self) -> list[str]:
        """Configurations of the engines held."""
        return sorted(set(self._config_ids.values()))

    def take_counts(self) -> Counts:
        """Counts since the last call, and how far behind it is."""
        counts, self._counts = self._counts, Counts()
        for emitter in (held := self.emitters.values()):
            counts.merge(emitter.take_counts())
        counts.merge(self.kv.take_counts())
        counts[table.OPEN_REQUESTS] = sum(emitter.open_requests for emitter in held)
        counts[table.ENGINES] = max(len(self._engines), len(self._api_processes))
        counts[table.ENGINES_REFUSED] = self._places.refused
        counts[table.WATERMARK_AGE] = max((max(0, e.event_unix_ns - e.safe_unix_ns) / 1e9 for e in held), default=0.0)
        return counts

    @property
    def emitters(self) -> dict[Key, Emitter]:
        """Everybody who is held."""
        return {**self.pages.by_key, **self._api_processes, **self._engines}
