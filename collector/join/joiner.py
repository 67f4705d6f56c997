"""All engines: who emitted what, which API span belongs to which request, which configuration learns from it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from collector.config import Config
from collector.decode import Telemetry, latest_unix_ns
from collector.decode.pages import ScrapedPage
from collector.identity import Knowledge
from collector.join.inferred import KvSources
from collector.join.pages import PageEngine, PageEngines, keys_of
from collector.telemetry import Counts, JoinEvent, RowDrop, table

from .api_process import ApiProcess
from .checkpoint import EmitterCheckpoint, JoinCheckpoint, RowMarks
from .emitter import Emitter, Key, TargetRows, by_config, config_id_of, key_of
from .engine import Engine, take_restarts
from .events import Event, Renamed, Succeeded
from .registry import Begin, Full, Known, Places, SharedIds, describe, find_double, replaced_configs
from .release import Pending, Release, engine_configs_of, pending_of, release_rows
from .spans import ApiSpans


class Joiner:
    """Telemetry in, by emitter; rows per configuration out. Bounded in engines, steps and open requests."""

    def __init__(self, settings: Config, knowledge: Knowledge | None = None) -> None:
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
        self._idle_ns = int(settings.idle_timeout_s * 1e9)
        # by the clock here; of those who were restored, since then
        self._heard_unix_ns: dict[Key, int] = {}
        self._idle: set[Key] = set()
        self._begins: dict[Key, Begin] = {}
        self._has_met_all = False
        self._fresh: dict[Key, None] = {}
        self._succeeded: list[Succeeded] = []
        self._counts = Counts()
        self.kv = KvSources(settings)
        self.pages = PageEngines(settings)
        self._described: dict[str, Known] = {}
        self._told_by_engines: set[str] = set()
        self._marks = RowMarks()

    # --- in -----------------------------------------------------------------------------------------------------------

    def _look_at_everybody(self) -> None:
        """Everybody is looked at again."""
        self._fresh = dict.fromkeys((*self._engines, *self._api_processes, *self.pages.by_key))
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

    def _add_requests(self, key: Key, telemetry: Telemetry) -> None:
        process = self._api_processes.get(key)
        if process is None:
            for gone in self._make_room(self._api_processes, key, telemetry):
                self._forget(gone, self._api_processes.pop(gone))
            process = self._api_processes[key] = ApiProcess(key[1], key[0], self._next_number(), self._settings)
            self._begins[key] = Begin.of(telemetry, first=True)
        self._teach_facts(process, telemetry)
        process.add(telemetry.requests)
        self._hear(key, telemetry)

    def _hear(self, key: Key, telemetry: Telemetry) -> None:
        self._begins.setdefault(key, Begin.of(telemetry, first=False))
        if telemetry.arrived_unix_ns:
            self._heard_unix_ns[key] = telemetry.arrived_unix_ns
        self._idle.discard(key)
        self._fresh[key] = None

    def _meet(self, now_unix_ns: int) -> None:
        """Who was restored counts as heard of now, unless times are known of it that have not come yet.

        The clock of this machine was set back since. What was learned stays; its next telemetry finds a new emitter.
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
            self._heard_unix_ns.pop(key, None)
            self._counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] += 1
        for key in keys_of(page):
            if not page.recording:
                self._heard_unix_ns[key] = page.unix_ns
            self._idle.discard(key)
            self._fresh[key] = None

    def _engine_for(self, key: Key, telemetry: Telemetry) -> Engine:
        engine = self._aliases.get(key) or self._engines.get(key)
        if engine is None:
            for gone in self._make_room(self._engines, key, telemetry):
                self._forget(gone, self._engines.pop(gone))
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
            self._hold_rows(self._config_ids[key], emitter, emitter.advance(flush=True))
        self._drop(key, emitter)

    def _drop(self, key: Key, emitter: Emitter) -> None:
        """It is gone, and what it held with it."""
        self._aliases = {k: e for k, e in self._aliases.items() if e is not emitter}
        for known in (self._config_ids, self._heard_unix_ns, self._begins):
            known.pop(key, None)
        self._idle.discard(key)

    def _next_number(self) -> int:
        self._emitter_count += 1
        return self._emitter_count - 1

    def _succeed(self, key: Key, engine: Engine) -> Engine:
        """The server came back as another configuration: what it was ends with its rows, and is the new one's prior."""
        new = config_id_of(engine)
        old = self._config_ids.get(key)
        if old is None or old == new:
            return engine
        self._hold_rows(old, engine, engine.advance(flush=True))
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
        self._fresh[key_of(keep)] = None
        self._idle.discard(dropped)
        for known in (self._engines, self._config_ids, self._heard_unix_ns, self._begins):
            known.pop(dropped, None)
        self._aliases[dropped] = keep
        self._aliases.update({k: keep for k, e in self._aliases.items() if e is drop})
        if len(self._aliases) > self._settings.engines_max:  # one that still sends is found again
            del self._aliases[next(iter(self._aliases))]
        self._api_spans.reassign(drop, keep)
        self._counts[table.JOIN_EVENTS, JoinEvent.DOUBLE_EMITTER] += 1

    def _hold_rows(self, config_id: str, emitter: Emitter, rows: list[TargetRows]) -> None:
        rows, before = self._marks.without_emitted(key_of(emitter), rows)
        self._counts[table.DROPPED_ROWS, RowDrop.LEARNED_BEFORE] += before
        if rows:
            self._releases.setdefault(config_id, Release()).add(emitter.instance, rows)

    def engine_of(self, instance: str, recording: str = "") -> Engine | None:
        """The engine that this emitter's steps and requests belong to."""
        return self._aliases.get((recording, instance)) or self._engines.get((recording, instance))

    @property
    def emitters(self) -> dict[Key, Emitter]:
        """Everybody who is held."""
        return {**self.pages.by_key, **self._api_processes, **self._engines}

    # --- out ----------------------------------------------------------------------------------------------------------

    def drain(self, *, now_unix_ns: int | None = None, flush: bool = False) -> list[Event]:
        """What is final and what has changed, in the order in which it has to be taken (see the module of events).

        Only who was heard of since the last call is looked at, and who has become idle.

        Args:
            now_unix_ns: the clock here, as of which everything that came in was added. An emitter of which nothing has
                come for ``idle_timeout_s`` is waited for no longer: what it holds becomes rows or drops.
            flush: nothing more will come from anybody.
        """
        if flush:
            self._look_at_everybody()
        elif now_unix_ns is not None:
            self._find_idle(now_unix_ns)
        self.kv.assign({key[1]: engine.sequences for key, engine in self._engines.items()})
        fresh, self._fresh = self._fresh, {}
        engines = {key: engine for key in fresh if (engine := self._engines.get(key)) is not None}
        engines = dict(sorted(engines.items(), key=lambda item: item[1].number))
        renamed = [event for key, engine in engines.items() for event in self._identify(key, engine)]
        self._advance_engines(engines, flush=flush)
        renamed += self._advance_others(fresh, flush=flush)
        configs = by_config(self.emitters, self._config_ids)
        described = describe(configs, self._described)
        released = release_rows(self._releases, configs, self._settings, idle=self._idle, flush=flush)
        for each in released:
            self._marks.record(each.rows, each.target, each.engines)
        succeeded, self._succeeded = self._succeeded, []
        return [*renamed, *described, *take_restarts(engines, self._config_ids), *released, *succeeded]

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

    def _find_idle(self, now_unix_ns: int) -> None:
        """Emitters that are waited for no longer; of whom nothing was heard yet, the time runs from now on."""
        for key in self.emitters:
            heard_unix_ns = self._heard_unix_ns.setdefault(key, now_unix_ns)
            if key not in self._idle and not key[0] and heard_unix_ns <= now_unix_ns - self._idle_ns:
                self._idle.add(key)
                self._fresh[key] = None

    def idle_in_ns(self, now_unix_ns: int) -> int | None:
        """How long until the next emitter is idle, if nothing comes; None: all are."""
        heard = [at for key, at in self._heard_unix_ns.items() if key not in self._idle]
        return max(min(heard) + self._idle_ns - now_unix_ns, 0) if heard else None

    def _advance_engines(self, engines: Mapping[Key, Engine], *, flush: bool) -> None:
        """Rows that are final are held for their turn."""
        for key, engine in engines.items():
            config_id, version = self._config_ids[key], engine.facts.version
            self._hold_rows(config_id, engine, engine.advance(flush=flush or key in self._idle))
            if engine.facts.version != version:
                self._fresh[key] = None  # who it is, is asked at the next call

    def _advance_others(self, fresh: dict[Key, None], *, flush: bool) -> list[Renamed]:
        """API processes, then pages: what becomes of their rows depends on the engines beside them."""
        engine_configs = engine_configs_of(self._engines, self._config_ids) if self._api_processes else {}
        if engine_configs.keys() != self._told_by_engines:
            self._told_by_engines = {*engine_configs}
            fresh |= dict.fromkeys(self._api_processes)
        renamed = []
        for key in [key for key in fresh if key in self._api_processes]:
            renamed += self._advance_api_process(key, engine_configs.get(key[0], set()), flush=flush)
        if self.pages.by_key:
            whole = [item for item in self._api_processes.items() if not item[1].is_sampled]
            senders: list[tuple[Key, Engine | ApiProcess]] = [*self._engines.items(), *whole]
            yielded = self.pages.yield_to(senders, self._config_ids, fresh)
            for key, page in yielded.alone:
                renamed += self._identify(key, page)
                self._hold_rows(self._config_ids[key], page, page.advance())
            self._fresh |= dict.fromkeys(yielded.taught)
            self._succeeded += yielded.succeeded
        return renamed

    def _advance_api_process(self, key: Key, engine_configs: set[str], *, flush: bool) -> list[Renamed]:
        """Request spans belong to the only configuration of engines known beside them, else to their own process.

        Of a process whose spans are sampled nothing is learned: its server's page, where there is one, tells more.
        """
        process = self._api_processes[key]
        rows = process.advance(flush=flush or key in self._idle)
        if process.is_sampled and key not in self.pages.by_key and self.pages.tell_of(key, process):
            self._config_ids.pop(key, "")
            return []
        if not engine_configs:
            renamed = self._identify(key, process)
            self._hold_rows(self._config_ids[key], process, rows)
            return renamed
        if key not in self._engines:  # else told by one id: that of a pod
            self._config_ids.pop(key, "")
        if len(engine_configs) == 1:
            beside = [e for k, e in self._engines.items() if k[0] == key[0]]
            processes = sum(k[0] == key[0] for k in self._api_processes)
            process.tell_engine(beside[0].api_queueing, len(beside) / processes)
        self._hold_rows(min(engine_configs), process, process.beside_engines(rows, len(engine_configs)))
        return []

    def to_checkpoint(self) -> dict[str, Any]:
        """What a restart keeps: plain data, see :mod:`collector.join.checkpoint`. Replayed recordings are not kept."""
        live = [(key, emitter) for key, emitter in self.emitters.items() if not key[0]]
        return JoinCheckpoint(
            emitters=[EmitterCheckpoint.of(emitter, self._config_ids.get(key, "")) for key, emitter in live],
            emitter_count=self._emitter_count,
            marks=self._marks.to_checkpoint(),
            shared_ids=self._shared_ids.to_checkpoint(),
        ).to_plain()

    @classmethod
    def from_checkpoint(cls, plain: object, settings: Config, knowledge: Knowledge | None = None) -> Joiner:
        """Begin where an earlier process left off: rows that it emitted are not emitted again.

        Raises:
            CheckpointError: this is no checkpoint that this version can read.
        """
        checkpoint = JoinCheckpoint.from_plain(plain)
        joiner = cls(settings, knowledge)
        for kept in checkpoint.emitters:
            emitter = kept.restore(settings)
            key = key_of(emitter)
            match emitter:
                case Engine():
                    joiner._engines[key] = emitter
                case ApiProcess():
                    joiner._api_processes[key] = emitter
                case PageEngine():
                    joiner.pages.by_key[key] = emitter
            if kept.config_id:
                joiner._config_ids[key] = kept.config_id
        joiner._emitter_count = checkpoint.emitter_count
        joiner._marks = RowMarks({("", instance): marks for instance, marks in checkpoint.marks})
        joiner._shared_ids.restore(checkpoint.shared_ids)
        joiner._look_at_everybody()
        return joiner

    @property
    def needed_unix_ns(self) -> int | None:
        """Event time from which on telemetry is needed again after a restart; None: everything has become rows.

        What came before it, by its arrival, need not be read again.
        """
        needed = [emitter.needed_unix_ns for emitter in self.emitters.values()]
        return min((unix_ns for unix_ns in (*needed, self.held_rows_unix_ns) if unix_ns is not None), default=None)

    @property
    def held_rows_unix_ns(self) -> int | None:
        """When the first of the rows began that wait for those of other emitters; None while there is none."""
        needed = [held.needed_unix_ns for held in self._releases.values()]
        return min((unix_ns for unix_ns in needed if unix_ns is not None), default=None)

    def pending(self) -> list[Pending]:
        """What each emitter holds that has not become rows or has not been emitted, and until when at the latest."""
        awaited = {key: emitter for key, emitter in self.emitters.items() if key not in self._idle}
        return pending_of(awaited, self._config_ids, self._releases, self._heard_unix_ns, self._idle_ns)

    def shed_memory(self) -> None:
        """Let go of steps whose rows have left; to be called after a drain that flushes."""
        for engine in self._engines.values():
            engine.shed_memory()

    def emitters_of(self, config_id: str) -> list[Emitter]:
        """Emitters of one configuration, in order of appearance."""
        return by_config(self.emitters, self._config_ids).get(config_id, [])

    def replaced_configs(self) -> dict[str, str]:
        """By configuration whose server came back as another one: which one it sends now."""
        return replaced_configs(
            by_config(self.emitters, self._config_ids), self._begins, int(self._settings.allowed_lateness_s * 1e9)
        )

    def config_ids(self) -> list[str]:
        """Configurations of the engines held."""
        return sorted(set(self._config_ids.values()))

    def take_counts(self) -> Counts:
        """Counts since the last call, and how far behind it is."""
        counts, self._counts = self._counts, Counts()
        emitters = self.emitters.values()
        for emitter in emitters:
            counts.merge(emitter.take_counts())
        counts.merge(self.kv.take_counts())
        counts[table.OPEN_REQUESTS] = sum(emitter.open_requests for emitter in emitters)
        counts[table.ENGINES] = max(len(self._engines), len(self._api_processes))
        counts[table.ENGINES_REFUSED] = self._places.refused
        counts[table.WATERMARK_AGE] = (
            max((each.event_unix_ns - each.safe_unix_ns for each in emitters), default=0) / 1e9
        )
        return counts

    @property
    def emitters_held(self) -> int:
        """How many are held."""
        return len(self._engines) + len(self._api_processes) + len(self.pages.by_key)
