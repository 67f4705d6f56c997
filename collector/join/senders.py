"""Who sends: every emitter that is held, the configuration each belongs to, and of whom something was heard."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Mapping

from collector.config import JoinConfig
from collector.decode import Telemetry, latest_unix_ns
from collector.decode.pages import ScrapedPage
from collector.identity import Knowledge
from collector.join.kv import KvSources
from collector.join.pages import PageEngines, keys_of
from collector.telemetry import Counts, JoinEvent, table

from .api_process import ApiProcess
from .api_spans import ApiSpans
from .census import Census
from .emitter import Emitter, Key, TargetRows, config_id_of, key_of
from .engine import Engine
from .events import Succeeded
from .places import Full, Places
from .release import Release
from .replaced import Begin
from .same_engine import find_double
from .shared_ids import SharedIds


class Senders:
    """Telemetry in, by emitter; what the join makes of it is asked for by :class:`~collector.join.joiner.Joiner`.

    Bounded in engines, steps and open requests.
    """

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
        self._places = Places(settings)
        self._heard: Counter[Key] = Counter()
        # by the clock here; of those who were restored, since then
        self._heard_unix_ns: dict[Key, int] = {}
        self._begins: dict[Key, Begin] = {}
        self._has_met_all = False
        self._fresh: dict[Key, None] = {}
        self._uncounted: set[Key] = set()
        self._filled: set[str] = set()
        self._census: Census | None = None
        self._succeeded: list[Succeeded] = []
        self._counts = Counts()
        self.kv = KvSources(settings)
        self.pages = PageEngines(settings)

    def restored(self) -> None:
        """Everybody is looked at again."""
        self._fresh = dict.fromkeys((*self._engines, *self._api_processes, *self.pages.by_key))
        self._census = None
        self._has_met_all = False

    def add(self, telemetry: Telemetry, recording: str = "") -> None:
        """Add what one resource of one export said; ``recording`` names the file in a replay."""
        if telemetry.arrived_unix_ns and not self._has_met_all:
            self._meet(telemetry.arrived_unix_ns)
        for api in telemetry.api:
            self._fresh |= dict.fromkeys(map(key_of, self._api_spans.add(api)))
        for batch in telemetry.kv:
            self.kv.add(batch)
        key = (recording, telemetry.instance)
        with contextlib.suppress(Full):
            if telemetry.requests:
                self._add_requests(key, telemetry)
            if len(telemetry.steps) or telemetry.core:
                self._add_steps(self._shared_ids.key_of(key, telemetry, self._counts), telemetry)

    def goes_on(self, key: Key, telemetry: Telemetry, before: Telemetry | None) -> bool:
        """Whether steps can be added with those that come before and after them, see :mod:`collector.join.continued`.

        They are the next of an engine that has given rows, whose id is its own, and none is forgotten for them.
        """
        engine = self._engines.get(key)
        if engine is None or key in self._aliases or not engine.released:
            return False
        newest = engine.processes[-1].sequence
        first, last = telemetry.steps[0], telemetry.steps[-1]
        if newest.window is None or last["step_id"] - newest.window.base >= self._settings.steps_max:
            return False
        if before is not None:
            return True
        later = first["step_id"] > newest.last_step and first["unix_ns"] >= newest.event_unix_ns
        return bool(later and self._shared_ids.is_alone(key, telemetry))

    def _add_requests(self, key: Key, telemetry: Telemetry) -> None:
        process = self._api_processes.get(key)
        if process is None:
            for gone in self._make_room(self._api_processes, key, telemetry):
                self._forget(gone, self._api_processes.pop(gone))
            self._census = None
            process = self._api_processes[key] = ApiProcess(key[1], key[0], self._next_number(), self._settings)
            self._begins[key] = Begin.of(telemetry, first=True)
        self._teach_facts(process, telemetry)
        process.add(telemetry.requests)
        self._hear(key, telemetry)

    def _hear(self, key: Key, telemetry: Telemetry) -> None:
        self._heard[key] += telemetry.exports
        self._begins.setdefault(key, Begin.of(telemetry, first=False))
        if telemetry.arrived_unix_ns:
            self._heard_unix_ns[key] = telemetry.arrived_unix_ns
        self._fresh[key] = None

    def _meet(self, now_unix_ns: int) -> None:
        """Who was restored counts as heard of now, unless times are known of it that have not come yet.

        Those were believed by an earlier version. What was learned stays; its next telemetry finds a new emitter.
        """
        self._has_met_all = True
        held: list[tuple[Key, Emitter]] = [*self._engines.items(), *self._api_processes.items()]
        for key, emitter in held:
            if emitter.event_unix_ns > latest_unix_ns(now_unix_ns):
                self._engines.pop(key, None)
                self._api_processes.pop(key, None)
                self._drop(key, emitter)
            else:
                self._heard_unix_ns.setdefault(key, now_unix_ns)

    def _make_room(self, emitters: Mapping[Key, Emitter], key: Key, telemetry: Telemetry) -> list[Key]:
        return self._places.make_room(emitters, self._heard_unix_ns, key, telemetry, self._counts)

    def _add_steps(self, key: Key, telemetry: Telemetry) -> None:
        engine = self._engine_for(key, telemetry)
        self._hear(key_of(engine), telemetry)
        # steps of a second emitter on the same engine are known from the first
        for request in engine.add(telemetry, with_steps=key not in self._aliases):
            self._counts[table.JOIN_EVENTS, JoinEvent.OPEN_REQUESTS_EVICTED] += self._api_spans.match(engine, request)
        # each time it has told twice as much: comparing with a thousand others is dear
        if not engine.released and engine.steps_heard >= max(1, 2 * engine.steps_compared):
            engine.steps_compared = engine.steps_heard
            self._merge_double(engine)

    def add_page(self, page: ScrapedPage) -> None:
        """Add what a server's page counted."""
        for key in self.pages.add(page, self._next_number, self.knowledge):
            self._config_ids.pop(key, None)
            self._heard.pop(key, None)
            self._census = None
            self._counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] += 1
        for key in keys_of(page):
            self._census = None if key not in self._heard else self._census
            self._heard[key] += 1
            self._fresh[key] = None

    def _engine_for(self, key: Key, telemetry: Telemetry) -> Engine:
        engine = self._aliases.get(key) or self._engines.get(key)
        if engine is None:
            for gone in self._make_room(self._engines, key, telemetry):
                self._forget(gone, self._engines.pop(gone))
            self._census = None
            engine = self._engines[key] = Engine(key[1], key[0], self._next_number(), self._settings)
            self._begins[key] = Begin.of(telemetry, first=True)
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
        if key in self._config_ids:
            self._hold_rows(self._config_ids[key], emitter.instance, emitter.advance(flush=True))
        self._drop(key, emitter)

    def _drop(self, key: Key, emitter: Emitter) -> None:
        """It is gone, and what it held with it."""
        self._census = None
        self._aliases = {k: e for k, e in self._aliases.items() if e is not emitter}
        for known in (self._config_ids, self._heard, self._heard_unix_ns, self._begins):
            known.pop(key, None)

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
        self._census = None
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
        self._fresh[key_of(keep)] = None
        self._census = None
        for known in (self._engines, self._config_ids, self._heard, self._heard_unix_ns, self._begins):
            known.pop(dropped, None)
        self._aliases[dropped] = keep
        self._aliases.update({k: keep for k, e in self._aliases.items() if e is drop})
        if len(self._aliases) > self._settings.engines_max:  # one that still sends is found again
            del self._aliases[next(iter(self._aliases))]
        self._api_spans.reassign(drop, keep)
        self._counts[table.JOIN_EVENTS, JoinEvent.DOUBLE_EMITTER] += 1

    def _hold_rows(self, config_id: str, instance: str, rows: list[TargetRows]) -> None:
        if rows:
            self._filled.add(config_id)
            self._releases.setdefault(config_id, Release()).add(instance, rows)

    def engine_of(self, instance: str, recording: str = "") -> Engine | None:
        """The engine that this emitter's steps and requests belong to."""
        return self._aliases.get((recording, instance)) or self._engines.get((recording, instance))

    def _emitter(self, key: Key) -> Emitter | None:
        return self._engines.get(key) or self._api_processes.get(key) or self.pages.by_key.get(key)

    @property
    def emitters(self) -> dict[Key, Emitter]:
        """Everybody who is held."""
        return {**self.pages.by_key, **self._api_processes, **self._engines}
