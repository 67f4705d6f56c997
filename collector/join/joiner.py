"""Telemetry in, rows out: it holds the emitters, pairs API spans with requests, and assigns emitters to configurations.

``add`` and ``add_page`` find the emitter of what came and hand it over; ``drain`` asks those that were heard of, and
those that have become idle, for the rows that are final, and lets the rows of each configuration out in order.

A newcomer takes a free place, or that of the emitter silent longest if it has been silent for longer than
``join_timeout_s``; else it is refused, telemetry and all, and counted. What was learned of the others is not touched.
Silence is measured by when telemetry came in, whatever times its sender claims; in a replay nobody knows that, and
event times tell it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from collector.config import Config
from collector.decode import Telemetry, latest_unix_ns
from collector.decode.fpm import ForwardPass
from collector.decode.pages import ScrapedPage
from collector.identity import ConfigResolver, FactSource, config_id
from collector.join.inferred import ApiProcess, KvSources
from collector.join.pages import PageEngine, PageEngines, keys_of
from collector.telemetry import Counts, JoinEvent, table

from .checkpoint import EmitterCheckpoint, JoinCheckpoint
from .emitter import Emitter, Key, Liveness, facts_of, newest_unix_ns, quality_of
from .engine import Engine
from .events import ConfigKeyChanged, ConfigReplaced, ConfigUpdated, Event, RowQueue
from .passes import PassEngine
from .spans import ApiSpans

E = TypeVar("E", bound=Emitter)

_REFUSED_MAX = 1024
"""Names remembered of emitters that found no place."""


class Pending(NamedTuple):
    """Total that emitters hold; all of it is emitted by ``until_unix_ns`` if nothing more comes.

    ``engines`` is how many emitters hold something. The time is by the clock here, 0 where no clock was told yet.
    """

    engines: int
    steps: int
    requests: int
    rows: int
    until_unix_ns: int


class Joiner:
    """Telemetry in, by emitter; rows per configuration out. Bounded in engines, steps and open requests."""

    def __init__(self, settings: Config, resolver: ConfigResolver | None = None) -> None:
        self._settings = settings
        self._idle_ns = int(settings.idle_timeout_s * 1e9)
        self._over_ns = max(self._idle_ns, settings.timeout_ns)
        self.resolver = resolver or ConfigResolver(settings)
        self.engines: dict[Key, Engine] = {}
        self.api_processes: dict[Key, ApiProcess] = {}
        self.pass_engines: dict[Key, PassEngine] = {}
        self.pages = PageEngines(settings)
        self._kinds: dict[type[Emitter], MutableMapping[Key, Any]] = {
            Engine: self.engines,
            ApiProcess: self.api_processes,
            PassEngine: self.pass_engines,
            PageEngine: self.pages.by_key,
        }
        self.kv = KvSources(settings)
        self.api_spans = ApiSpans(settings.requests_max)
        self._refused: dict[Key, int] = {}
        """Who found no place lately, and when."""
        self._emitter_count = 0
        self._described: dict[str, tuple[object, ...]] = {}
        """Of each configuration: the best telemetry that it sends, and the version of each emitter's facts."""
        self._renamed: list[ConfigKeyChanged] = []
        self._replaced: list[ConfigReplaced] = []
        self.rows = RowQueue(settings)
        self._counts = Counts()

    # --- in -----------------------------------------------------------------------------------------------------------

    def add(self, telemetry: Telemetry) -> bool:
        """Add what one resource of one export said; whether there was a place for it."""
        for api in telemetry.api:
            self.api_spans.add(api)
        key = (telemetry.recording, telemetry.instance)
        if telemetry.requests:
            process = self._emitter_for(ApiProcess, key, telemetry.arrived_unix_ns, telemetry)
            if process is not None:
                self.resolver.apply(process.facts, telemetry.facts, process.instance, process.recording)
                if not process.requests_seen:  # of a restored one, too: its page decides before its first row
                    process.is_counted = self.pages.counts_requests_of(process)
                for span in telemetry.requests:
                    process.add(span)
        if len(telemetry.steps) or telemetry.core:
            engine = self._emitter_for(Engine, key, telemetry.arrived_unix_ns, telemetry)
            if engine is not None:
                self._add_steps(engine, telemetry)
        return key in self.engines or key in self.api_processes

    def _emitter_for(
        self, kind: type[E], key: Key, arrived_unix_ns: int, telemetry: Telemetry | None = None
    ) -> E | None:
        """The emitter of some telemetry, created if it is new; None if there is no place for it.

        ``arrived_unix_ns`` is by the clock here; where nobody knows it (0), now is the newest event of ``telemetry``.
        """
        held: MutableMapping[Key, E] = self._kinds[kind]
        settings = self._settings
        if key not in held:
            now_ns = arrived_unix_ns or (newest_unix_ns(telemetry) if telemetry else 0)
            if len(held) >= (settings.page_engines_max if kind is PageEngine else settings.engines_max):
                heard = {one.last_seen_unix_ns or one.event_unix_ns: one for one in held.values()}
                if min(heard) >= now_ns - settings.timeout_ns:
                    self._refused[key] = now_ns
                    if len(self._refused) > _REFUSED_MAX:
                        self._refused.popitem()
                    return None
                self._evict(heard[min(heard)])
            self._refused.pop(key, None)
            held[key] = kind(key[1], key[0], self._emitter_count, settings)
            held[key].counts = self._counts
            self._emitter_count += 1
        held[key].record(arrived_unix_ns, telemetry)
        return held[key]

    def _evict(self, gone: Emitter) -> None:
        """Remove an emitter and its duplicates; the rows that they hold are still emitted."""
        gone.count(JoinEvent.ENGINE_EVICTED)
        held = self._kinds[type(gone)]
        for emitter in [one for one in held.values() if gone in (one, one.duplicate_of)]:
            del held[emitter.key]
            emitter.liveness = Liveness.OVER
            self.rows.add(emitter.config_id, emitter, emitter.advance())

    def _add_steps(self, engine: Engine, telemetry: Telemetry) -> None:
        before = engine.facts.sourced_facts()
        changed = self.resolver.apply(engine.facts, telemetry.facts, engine.instance, engine.recording)
        if changed and engine.facts.is_another_server(before):
            self._replace_config(engine)
        for request in engine.add(telemetry):
            self.api_spans.match(engine, request)
        if engine.duplicate_of is None and engine.is_due_to_compare():
            self._find_duplicate(engine)

    def _find_duplicate(self, engine: Engine) -> None:
        """Find another emitter of the same engine, and learn steps from the richer of the two."""
        for other in self.engines.values():
            if other is engine or other.recording != engine.recording or other.duplicate_of:
                continue
            if engine.is_same_as(other):
                richer, poorer = (other, engine) if other.quality <= engine.quality else (engine, other)
                poorer.become_duplicate_of(richer)
                poorer.count(JoinEvent.DUPLICATE_EMITTER)
                return

    def _replace_config(self, engine: Engine) -> None:
        """End the engine's configuration with its last rows, and start another from it: the server has changed."""
        old, new = engine.config_id, config_id(engine.identity)
        if not old or old == new:
            return
        engine.liveness = Liveness.OVER
        self.rows.add(old, engine, engine.advance())
        engine.start_again()
        engine.config_id = new
        self._replaced.append(ConfigReplaced(old, new))

    def add_passes(self, passes: Iterable[ForwardPass]) -> None:
        """Add records of forward passes."""
        for (recording, instance, source), group in groupby(passes, attrgetter("recording", "instance", "source")):
            told, key, held = [*group], (recording, instance), self.pass_engines
            if key in held and held[key].server != source:  # two publishers under one name are two engines
                key = recording, f"{instance} ({source})"
            engine = self._emitter_for(PassEngine, key, told[-1].unix_ns)
            if engine is not None:
                engine.server = source
                engine.add(told)

    def add_page(self, page: ScrapedPage) -> None:
        """Add what a server's page counted."""
        for key, reading in zip(keys_of(page), page.engines, strict=True):
            engine = self._emitter_for(PageEngine, key, page.unix_ns)
            if engine is not None:
                engine.server = page.instance
                engine.inform(reading, self.resolver)
                engine.add(page.unix_ns, page.mono_ns, reading)

    # --- out ----------------------------------------------------------------------------------------------------------

    def drain(self, *, now_unix_ns: int | None = None, flush: bool = False) -> list[Event]:
        """What is final and what has changed, in the order in which it has to be taken (see the module of events).

        Args:
            now_unix_ns: the clock here, as of which everything that came in was added. An emitter of which nothing has
                come for ``idle_timeout_s`` is waited for no longer: what it holds becomes rows or drops.
            flush: nothing more will come from anybody.
        """
        for emitter in self.emitters if flush else ():
            emitter.is_changed |= emitter.liveness is not Liveness.OVER
            emitter.liveness = Liveness.OVER
        if now_unix_ns is not None and not flush:
            self._find_idle(now_unix_ns)
        engines = [engine for engine in self.engines.values() if not engine.duplicate_of]
        publishers = self.kv.by_engine({engine.instance for engine in engines})
        for engine in engines:
            engine.read_kv_from(publishers.get(engine.instance))
        for engine in self.engines.values():
            if engine.is_changed:
                version, engine.is_changed = engine.facts.version, False
                self._advance(engine)
                engine.is_changed = engine.facts.version != version  # its configuration is asked for at the next call
        for told in self.pass_engines.values():
            self.resolver.apply(told.facts, {}, told.instance, told.recording)
            self._advance(told)
        for process in self.api_processes.values():
            self._advance_api_process(process)
        for page in self.pages.by_key.values():
            self._advance_page(page)
        described = self._describe()
        rows = self.rows.take(self.emitters)
        events: list[Event] = [*self._renamed, *described, *rows, *self._replaced]
        self._renamed, self._replaced = [], []
        return events

    def _find_idle(self, now_unix_ns: int) -> None:
        """Mark idle emitters; the time of an emitter without telemetry yet runs from now on."""
        refused_ns = now_unix_ns - self._settings.timeout_ns
        self._refused = {key: at_ns for key, at_ns in self._refused.items() if at_ns >= refused_ns}
        for emitter in self.emitters:
            before = emitter.liveness
            # one heard of later than now: the clock here was set back
            emitter.last_seen_unix_ns = min(emitter.last_seen_unix_ns or now_unix_ns, now_unix_ns)
            silent_ns = 0 if emitter.recording else now_unix_ns - emitter.last_seen_unix_ns
            emitter.liveness = Liveness((silent_ns >= self._idle_ns) + (silent_ns >= self._over_ns))
            emitter.is_changed |= emitter.liveness is not before

    def _advance(self, emitter: Emitter) -> None:
        """Queue its rows under its configuration; a fact learned later renames that, and its state stays."""
        before, now = emitter.config_id, config_id(emitter.identity)
        emitter.config_id = now
        if before not in ("", now) and all(one.config_id != before for one in self.emitters):
            self.rows.rename(before, now)
            self._renamed.append(ConfigKeyChanged(before, now))
        self.rows.add(now, emitter, emitter.advance())

    def _advance_api_process(self, process: ApiProcess) -> None:
        """Request spans belong to the only configuration of engines that may be their server, else to their process.

        Where its spans may be sampled, the server's page is richer, if there is one.
        """
        engines: list[Engine | PassEngine] = [*self.engines.values(), *self.pass_engines.values()]
        beside = [engine for engine in engines if engine.times_steps and process.is_same_server(engine)]
        configs = sorted({engine.config_id for engine in beside})
        by_page = not process.is_whole and bool(self.pages.pages_of(process))
        if not (configs or by_page):
            self._advance(process)
            return
        rows, process.config_id = process.advance(), ""
        if configs and not by_page:
            if len(beside) == sum(map(process.is_same_server, self.api_processes.values())) == 1:
                beside[0].api_queueing.add_arrivals(process.api_queueing.take_arrivals())
            self.rows.add(configs[0], process, process.beside_engines(rows, len(configs)))

    def _advance_page(self, page: PageEngine) -> None:
        """Queue the rows of a page; where a richer source sends the same steps, only give it the page's facts."""
        self.pages.compare(page, self.api_processes.values())
        whole = [process for process in self.api_processes.values() if process.is_whole]
        told = self.pages.preferred_sources(page, [*self.engines.values(), *self.pass_engines.values(), *whole])
        known = page.facts.as_dict()
        for source in told:
            source.is_changed |= source.facts.learn(known, FactSource.DISCOVERY)
        if richer := [source for source in told if source.times_steps]:
            page.defer_to(richer)
            page.config_id = ""
        else:
            self._advance(page)

    def _describe(self) -> list[ConfigUpdated]:
        """Events for configurations of which something has changed."""
        before, self._described, described = self._described, {}, []
        for name, own in sorted(self.emitters_by_config().items()):
            quality = quality_of(own)
            known = self._described[name] = quality, *((one.instance, one.facts.version) for one in own)
            if before.get(name) != known:
                described.append(ConfigUpdated(name, facts_of(own), quality))
        return described

    # --- what is held -------------------------------------------------------------------------------------------------

    @property
    def emitters(self) -> list[Emitter]:
        """All emitters; of several with one name the richest comes first."""
        return [emitter for held in self._kinds.values() for emitter in held.values()]

    @property
    def processes_sampled(self) -> int:
        """API processes of whose requests too few send a span."""
        return sum(each.span_share is not None and not each.is_whole for each in self.api_processes.values())

    def counts_requests_of(self, config_id: str) -> bool:
        """Whether the number of requests is known for each process whose spans this configuration learns from."""
        return all(not each.missing_reason for each in self.api_processes.values() if each.config_id in ("", config_id))

    def engine_of(self, instance: str, recording: str) -> Emitter | None:
        """The engine that this emitter's steps belong to."""
        engine = self.engines.get((recording, instance))
        return engine and (engine.duplicate_of or engine)

    def emitters_by_config(self) -> dict[str, list[Emitter]]:
        """Emitters of each configuration in order of appearance, but for doubles."""
        grouped: dict[str, list[Emitter]] = {}
        for emitter in sorted(self.emitters, key=attrgetter("number")):
            if emitter.config_id and not emitter.duplicate_of:
                grouped.setdefault(emitter.config_id, []).append(emitter)
        return grouped

    def pending(self) -> Pending:
        """Telemetry and rows not emitted yet, and by when they will be at the latest."""
        engines = steps = requests = rows = until_unix_ns = 0
        queued = Counter[int]()
        for block in self.rows.waiting:
            queued[int(block.engine[0])] += len(block)
        for emitter in self.emitters:
            waiting, own_rows = emitter.waiting, queued[emitter.number]
            if emitter.liveness is Liveness.OVER or not (waiting.steps or waiting.requests or own_rows):
                continue
            engines, steps, requests = engines + 1, steps + waiting.steps, requests + waiting.requests
            rows += own_rows
            if emitter.last_seen_unix_ns:
                silent_ns = self._over_ns if emitter.liveness else self._idle_ns
                until_unix_ns = max(until_unix_ns, emitter.last_seen_unix_ns + silent_ns)
        return Pending(engines, steps, requests, rows, until_unix_ns)

    def shed_memory(self) -> None:
        """Let go of steps whose rows have left; to be called after a drain that flushes."""
        for engine in self.engines.values():
            for process in engine.processes:
                process.shed_memory()

    def take_counts(self) -> Counts:
        """Counts since the last call, and how far behind it is."""
        counts, emitters = Counts(self._counts), self.emitters
        self._counts.clear()  # it is the emitters' own
        counts.merge(self.kv.take_counts())
        counts[table.SIZE, "engines"] = max(len(self.engines), len(self.api_processes))
        counts[table.LIMIT_EXCEEDED, "engines"] = len(self._refused)
        behind_ns = max((each.event_unix_ns - each.safe_unix_ns for each in emitters), default=0)
        counts[table.WATERMARK_AGE,] = behind_ns / 1e9
        return counts

    # --- over a restart -----------------------------------------------------------------------------------------------

    def to_checkpoint(self) -> dict[str, Any]:
        """What a restart keeps: plain data, see :mod:`collector.join.checkpoint`. Replayed recordings are not kept."""
        kept = [EmitterCheckpoint.of(emitter) for emitter in self.emitters if not emitter.recording]
        checkpoint = JoinCheckpoint(kept, self._emitter_count, [*self.rows.watermarks.items()])
        plain: dict[str, Any] = msgspec.to_builtins(checkpoint)
        return plain

    @classmethod
    def from_checkpoint(
        cls, plain: object, settings: Config, resolver: ConfigResolver | None = None, now_unix_ns: int = 0
    ) -> Joiner:
        """Begin where an earlier process left off: rows that it emitted are not emitted again.

        A watermark later than events can be by now is left out: the clock here was set back, and all new rows end
        before it.

        Raises:
            msgspec.ValidationError: this is no checkpoint that this version can read; it says where.
        """
        checkpoint = msgspec.convert(plain, JoinCheckpoint)
        joiner = cls(settings, resolver)
        # a page that is not asked for any more must not decide for ever
        emitters = [kept for kept in checkpoint.emitters if kept.kind != "page" or settings.scrape]
        for kept in emitters:
            emitter = kept.restore(settings)
            emitter.counts = joiner._counts
            joiner.resolver.apply(emitter.facts, {}, emitter.instance, "")
            joiner._kinds[type(emitter)][emitter.key] = emitter
        for kept in emitters:
            if kept.duplicate_of:
                joiner.engines["", kept.instance].duplicate_of = joiner.engines.get(("", kept.duplicate_of))
        joiner._emitter_count = checkpoint.emitter_count
        latest = latest_unix_ns(now_unix_ns)
        told = {name: {of: at for of, at in marks.items() if at <= latest} for name, marks in checkpoint.marks}
        joiner.rows = RowQueue(settings, told)
        return joiner
