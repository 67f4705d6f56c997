"""All engines: who emitted what, which API span belongs to which request, which configuration learns from it."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping

from collector.config import JoinConfig
from collector.identity import Knowledge
from collector.join.kv import KvSources
from collector.join.pages import PageEngines
from collector.join.steps import StepSequence
from collector.telemetry import Counts, table
from online.state import saved

from .api_process import ApiProcess
from .api_spans import ApiSpans
from .census import Census, engine_configs_of
from .describe import Known, describe
from .emitter import Emitter, Key, config_id_of
from .engine import Engine, take_restarts
from .events import Event, Renamed
from .put_off import put_off_until
from .release import Release, release_rows
from .replaced import replaced_configs
from .senders import Senders
from .shared_ids import SharedIds
from .waiting import Waiting, waiting_of


class Joiner(Senders):
    """Telemetry in, rows per configuration out."""

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
        super().__init__(settings, knowledge)
        self._described: dict[str, Known] = {}
        self._told_by_engines: set[str] = set()
        # engines whose rows are made later, and until which event time (wall clock ns)
        self._put_off: dict[Key, int] = {}

    def drain(self, *, flush: bool = False, at_once: bool = False) -> list[Event]:
        """What is final and what has changed, in the order in which it has to be taken (see the module of events).

        Only who was heard of since the last call is looked at. ``flush``: nothing more will come, everything held
        becomes rows or drops. ``at_once``: nobody's rows are put off.
        """
        if flush:
            self.restored()
        owners = self.kv.bind(self._processes_by_instance())
        if owners:
            own = {id(owner) for owner in owners}
            with_kv = [key for key, engine in self._engines.items() if not own.isdisjoint(map(id, engine.sequences))]
            self._fresh |= dict.fromkeys(with_kv)
        heard = [engine for key in self._fresh if (engine := self._engines.get(key)) is not None]
        newest_unix_ns = max((engine.event_unix_ns for engine in heard), default=0)
        now_unix_ns = sys.maxsize if flush or at_once else newest_unix_ns
        overdue = [key for key, until_unix_ns in self._put_off.items() if until_unix_ns <= now_unix_ns]
        fresh, self._fresh = self._fresh | dict.fromkeys(overdue), {}
        self._uncounted.update(fresh)
        engines = {key: engine for key in fresh if (engine := self._engines.get(key)) is not None}
        engines = dict(sorted(engines.items(), key=lambda item: item[1].number))
        renamed = [event for key, engine in engines.items() for event in self._identify(key, engine)]
        self._advance_engines(engines, now_unix_ns, flush=flush)
        renamed += self._advance_others(fresh, flush=flush)
        changed, census = self._census is None, self._known()
        self._census = census
        if changed:
            config_ids = told = {*census.by_config, *self._releases, *self._described}
            self._put_off = {key: until for key, until in self._put_off.items() if key in self._engines}
        else:
            anew = [key for key in fresh if (emitter := self._emitter(key)) is not None and census.refresh(emitter)]
            told = {self._config_ids[key] for key in anew if key in self._config_ids}
            config_ids = self._filled | {self._config_ids[key] for key in fresh if key in self._config_ids}
        self._filled = set()
        described = describe(told, census.by_config, self._described)
        released = release_rows(config_ids, self._releases, census, self._settings, flush=flush)
        succeeded, self._succeeded = self._succeeded, []
        return [*renamed, *described, *take_restarts(engines, self._config_ids), *released, *succeeded]

    def _processes_by_instance(self) -> dict[str, list[StepSequence]]:
        return {key[1]: engine.sequences for own in (self._engines, self._aliases) for key, engine in own.items()}

    def _identify(self, key: Key, emitter: Emitter) -> list[Renamed]:
        """Find the emitter's configuration; a fact learned later renames it and keeps its state."""
        config_id = config_id_of(emitter)
        before = self._config_ids.get(key)
        if before == config_id:
            return []
        self._config_ids[key] = config_id
        self._census = None
        if before is None or before in self._config_ids.values():
            return []
        if before in self._releases:
            self._releases.setdefault(config_id, Release()).take_over(self._releases.pop(before))
        return [Renamed(before, config_id)]

    def _advance_engines(self, engines: Mapping[Key, Engine], now_unix_ns: int, *, flush: bool) -> None:
        """Rows that are final are held for their turn.

        An engine that has told only a few steps is put off: rows of a few cost as much as of many.
        """
        for key, engine in engines.items():
            until_unix_ns = put_off_until(engine, self._settings)
            if until_unix_ns > now_unix_ns:
                self._put_off[key] = until_unix_ns
                continue
            self._put_off.pop(key, None)
            config_id, version = self._config_ids[key], engine.facts.version
            self._hold_rows(config_id, engine.instance, engine.advance(flush=flush))
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
            yielded = self.pages.yield_to(senders, self._config_ids, None if self._census is None else fresh)
            for key, page in yielded.alone:
                renamed += self._identify(key, page)
                self._hold_rows(self._config_ids[key], page.instance, page.advance())
            self._fresh |= dict.fromkeys(yielded.taught)
            self._succeeded += yielded.succeeded
            self._census = None if yielded.succeeded else self._census
        return renamed

    def _advance_api_process(self, key: Key, engine_configs: set[str], *, flush: bool) -> list[Renamed]:
        """Request spans belong to the only configuration of engines known beside them, else to their own process.

        Of a process whose spans are sampled nothing is learned: its server's page, where there is one, tells more.
        """
        process = self._api_processes[key]
        rows = process.advance(flush=flush)
        if process.is_sampled and key not in self.pages.by_key and self.pages.tell_of(key, process):
            self._census = None if self._config_ids.pop(key, "") else self._census
            return []
        if not engine_configs:
            renamed = self._identify(key, process)
            self._hold_rows(self._config_ids[key], process.instance, rows)
            return renamed
        if key not in self._engines and self._config_ids.pop(key, ""):  # else told by one id: that of a pod
            self._census = None
        if len(engine_configs) == 1:
            beside = [e for k, e in self._engines.items() if k[0] == key[0]]
            processes = sum(k[0] == key[0] for k in self._api_processes)
            process.tell_engine(beside[0].api_queueing, len(beside) / processes)
        self._hold_rows(min(engine_configs), process.instance, process.beside_engines(rows, len(engine_configs)))
        return []

    def waiting(self) -> list[Waiting]:
        """What each emitter holds that gave no rows yet, and what that waits for."""
        return waiting_of(self.emitters, self._config_ids, self._releases, self._heard, self._put_off)

    def part(self, config_id: str, keys: Collection[Key]) -> Joiner:
        """A copy in which these emitters of a configuration are alone, to be flushed; this one stays as it is."""
        part = Joiner(self._settings, self.knowledge)
        part._engines = OrderedDict((key, self._engines[key]) for key in self._engines if key in keys)
        part._api_processes = OrderedDict((k, self._api_processes[k]) for k in self._api_processes if k in keys)
        known = self._engines.keys() | {*keys}
        part._config_ids = {key: self._config_ids[key] for key in self._config_ids if key in known}
        part._releases = {config: held for config, held in self._releases.items() if config == config_id}
        part._described = {config: known for config, known in self._described.items() if config == config_id}
        part.kv = self.kv.part(self._settings, [own for engine in part._engines.values() for own in engine.sequences])
        return copy.deepcopy(part, {id(shared): shared for shared in (self._settings, self.knowledge)})

    def emitters_of(self, config_id: str) -> list[Emitter]:
        """Emitters of one configuration, in order of appearance."""
        return self._known().by_config.get(config_id, [])

    def replaced_configs(self) -> dict[str, str]:
        """By configuration whose server came back as another one: which one it sends now."""
        return replaced_configs(self._known().by_config, self._begins, int(self._settings.grace_s * 1e9))

    def config_ids(self) -> list[str]:
        """Configurations of the engines held."""
        return sorted(set(self._config_ids.values()))

    def take_counts(self) -> Counts:
        """Counts since the last call, and how far behind it is."""
        counts, self._counts = self._counts, Counts()
        for emitter in filter(None, map(self._emitter, {**dict.fromkeys(self._uncounted), **self._fresh})):
            counts.merge(emitter.take_counts())
        self._uncounted.clear()
        counts.merge(self.kv.take_counts())
        census = self._known()
        counts[table.OPEN_REQUESTS] = census.open_requests
        counts[table.ENGINES] = max(len(self._engines), len(self._api_processes))
        counts[table.ENGINES_REFUSED] = self._places.refused
        counts[table.WATERMARK_AGE] = census.behind_s
        return counts

    def _known(self) -> Census:
        """Everybody, as of the last call of :meth:`drain`, or as of now if others are held since."""
        return self._census if self._census is not None else Census(self.emitters, self._config_ids)

    @property
    def emitters_held(self) -> int:
        """How many are held."""
        return len(self._engines) + len(self._api_processes) + len(self.pages.by_key)
