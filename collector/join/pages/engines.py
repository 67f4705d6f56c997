"""Engines known by their pages: one per server and ``engine`` label, who else tells of them, and how much arrives.

Where an engine sends its steps, or its requests, the page teaches facts only: what it counts is the yardstick for how
much of the telemetry arrived, steps heard of against steps that its page counted.

    ratio = (heard(t) - heard(t0)) / (counted(t) - counted(t0))       t: event time of the newest step heard of

Telemetry trails the page by seconds, so the page's count is taken back at t, between the two scrapes around it; a step
that several front ends count is one. Begins again after 4,096 steps, and when the counter falls. Steps of nothing but
unfinished prefill chunks are not counted by the page, so the ratio is cut at 1.
"""

from __future__ import annotations

import math
import urllib.parse
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from collector.config import Config
from collector.decode.pages import EngineReading, Meaning, ScrapedPage
from collector.identity import EngineFacts, FactSource, Knowledge
from collector.join.api_process import ApiProcess
from collector.join.api_queueing import ApiQueueing
from collector.join.emitter import Key, TargetRows, config_id_of, key_of
from collector.join.engine import Engine
from collector.join.events import Succeeded
from collector.join.inferred import Scheduling
from collector.telemetry import Counts, RowDrop, table
from online import EngineSnapshot, Quality, Target

from .scrape_windows import PageRow, ScrapeWindows, add_waits, page_block

_SCRAPES_MAX = 256
_STEPS_MIN, _STEPS_MAX = 100.0, 4096.0


@dataclass(slots=True)
class Completeness:
    """Of one engine; ``ratio`` is None until a hundred steps were counted beside telemetry."""

    ratio: float | None = None
    _counted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SCRAPES_MAX))
    _since: tuple[float, int] | None = None
    """Counted and heard at the begin."""

    def count(self, unix_ns: int, steps: float) -> None:
        """Add one scrape of the page to what it counted."""
        if self._counted and not (unix_ns > self._counted[-1][0] and steps >= self._counted[-1][1]):
            self._counted.clear()
            self._since = None
        self._counted.append((unix_ns, steps))

    def hear(self, emitters: Sequence[Engine | ApiProcess]) -> None:
        """Compare with what the emitters of steps have told so far."""
        engines = [emitter for emitter in emitters if isinstance(emitter, Engine)]
        heard = sum(engine.steps_heard for engine in engines)
        at_ns = max((engine.event_unix_ns for engine in engines), default=0)
        if not self._counted or not self._counted[0][0] <= at_ns <= self._counted[-1][0]:
            return
        times, counts = np.array(self._counted).T
        counted = float(np.interp(at_ns, times, counts))
        if self._since is None or heard < self._since[1]:
            self._since = (counted, heard)
        steps = counted - self._since[0]
        if steps >= _STEPS_MIN:
            self.ratio = min((heard - self._since[1]) / steps, 1.0)
        if steps >= _STEPS_MAX:
            self._since = (counted, heard)


class PageEngine:
    """What an :class:`~collector.join.engine.Engine` is for steps, for counters only."""

    def __init__(self, instance: str, recording: str, number: int, server: str = "") -> None:
        self.instance = instance
        self.recording = recording
        self.server = server
        self.number = number
        self.facts = EngineFacts()
        self.api_queueing = ApiQueueing()
        self.windows = ScrapeWindows()
        self.completeness = Completeness()
        self.reading_facts: tuple[str, dict[str, int | bool]] = ("", {})
        self._rows: list[PageRow] = []
        self._counts = Counts()

    @property
    def event_unix_ns(self) -> int:
        """When it was last scraped."""
        newest = self.windows.newest
        return newest.unix_ns if newest is not None else 0

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return self.event_unix_ns

    @property
    def needed_unix_ns(self) -> int | None:
        """Nobody keeps pages: a window that a restart cuts is lost."""
        return None

    @property
    def quality(self) -> Quality:
        """Pages give rows of the quality ``metrics``."""
        return Quality.METRICS

    @property
    def span_share(self) -> float | None:
        """A page counts everything."""
        return 1.0

    @property
    def open_requests(self) -> int:
        """It knows of no single request."""
        return 0

    def add(self, unix_ns: int, mono_ns: int, reading: EngineReading) -> None:
        """Add one scrape; two clean ones make a window."""
        before = self.windows.newest
        row = self.windows.add(unix_ns, mono_ns, reading)
        newest = self.windows.newest
        if self.windows.turns_left:  # what was counted until it was noticed is of several servers
            self.api_queueing = ApiQueueing()
        elif before is not None and newest is not None:
            add_waits(self.api_queueing, before, newest, self.windows.copies)
        self.completeness.count(unix_ns, reading.values[Meaning.STEPS] / self.windows.copies)
        if row is not None:
            self._rows.append(row)

    def advance(self, *, flush: bool = False) -> list[TargetRows]:  # noqa: ARG002 -- nothing is held back
        """Rows since the last call: they come in order and are final at once."""
        rows, self._rows = self._rows, []
        return [TargetRows(Target.STEP_TIME, page_block(rows, self.number))] if rows else []

    def yield_to(self, emitters: Sequence[Engine | ApiProcess]) -> None:
        """Others tell more of the same engine: no rows, but a yardstick for how much of it arrives."""
        self._counts[table.DROPPED_ROWS, RowDrop.TOLD_BY_STEPS] += len(self._rows)
        self._rows.clear()
        self.completeness.hear(emitters)

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        counts, self._counts = self._counts, Counts()
        for reason, windows in self.windows.drops.items():
            counts[table.DROPPED_ROWS, reason] += windows
        self.windows.drops.clear()
        return counts

    def snapshot(self) -> EngineSnapshot:
        """Its counter of steps; how it schedules does not matter to windows."""
        newest = self.windows.newest
        steps = newest.value(Meaning.STEPS) if newest is not None else 0.0
        last_step = 0 if math.isnan(steps) else int(steps)
        return EngineSnapshot(instance=self.instance, scheduling=Scheduling.UNKNOWN.value, last_step=last_step)


Emitters = Sequence[tuple[Key, Engine | ApiProcess]]


class Yielded(NamedTuple):
    """Pages that nobody tells more than, what became a prior, and who knows more by a page."""

    alone: list[tuple[Key, PageEngine]]
    succeeded: list[Succeeded]
    taught: list[Key]


class PageEngines:
    """Bounded in engines: the one not scraped for longest makes room.

    Attributes:
        by_key: recording and instance -> engine.
    """

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self.by_key: OrderedDict[Key, PageEngine] = OrderedDict()
        self._richer: dict[Key, list[Engine | ApiProcess]] = {}
        self._beside: list[Engine | ApiProcess] = []

    def add(self, page: ScrapedPage, next_number: Callable[[], int], knowledge: Knowledge) -> list[Key]:
        """Take a page; the engines that made room for new ones."""
        evicted: list[Key] = []
        for key, reading in zip(keys_of(page), page.engines, strict=True):
            if key not in self.by_key:
                evicted += self._make_room()
                self.by_key[key] = PageEngine(key[1], key[0], next_number(), page.instance)
            engine = self.by_key[key]
            _inform(engine, reading, knowledge)
            engine.add(page.unix_ns, page.mono_ns, reading)
        return evicted

    def _make_room(self) -> list[Key]:
        if len(self.by_key) < self._settings.page_engines_max:
            return []
        oldest = min(self.by_key, key=lambda key: self.by_key[key].event_unix_ns)
        del self.by_key[oldest]
        return [oldest]

    @property
    def completeness(self) -> float:
        """Share of the counted steps that telemetry told of, of the worst engine; NaN where nothing can be compared."""
        ratios = [e.completeness.ratio for e in self.by_key.values() if e.completeness.ratio is not None]
        return min(ratios, default=math.nan)

    def yield_to(self, emitters: Emitters, config_ids: dict[Key, str], fresh: Collection[Key]) -> Yielded:
        """Where others tell more of the same engine, its page gives facts, and what it taught becomes their prior.

        Args:
            emitters: who may tell more.
            config_ids: forgets a page that yields.
            fresh: of whom something was heard; where others are held than at the last call, all are looked at.
        """
        beside = [emitter for _, emitter in emitters]
        others = self._richer.keys() != self.by_key.keys() or beside != self._beside
        if others:
            self._richer, self._beside = self._richer_emitters(emitters), beside
        yielded = Yielded([], [], [])
        for key, page in self.by_key.items():
            richer = self._richer[key]
            if not others and key not in fresh and not any(key_of(emitter) in fresh for emitter in richer):
                continue
            if not richer:
                yielded.alone.append((key, page))
                continue
            page.yield_to(richer)
            known = page.facts.known()
            taught = [emitter for emitter in richer if emitter.facts.learn(known, FactSource.DISCOVERY)]
            yielded.taught.extend(map(key_of, taught))
            # a page under the very name of its engine has no configuration of its own
            before = None if key in map(key_of, richer) else config_ids.pop(key, None)
            if before is not None and before not in config_ids.values():
                yielded.succeeded.append(Succeeded(before, min(config_id_of(emitter) for emitter in richer)))
        return yielded

    def _richer_emitters(self, emitters: Emitters) -> dict[Key, list[Engine | ApiProcess]]:
        """By page, the emitters of the same engine that tell more than it.

        The only server is whoever sends. Of several, the one whose host the emitter names; two ranks of one server
        cannot be told apart, and both are left to the telemetry.
        """
        servers: dict[str, set[str]] = {}
        for (recording, _), page in self.by_key.items():
            servers.setdefault(recording, set()).add(page.server)
        beside: dict[str, list[Engine | ApiProcess]] = {}
        for (recording, _), emitter in emitters:
            beside.setdefault(recording, []).append(emitter)
        richer = {}
        for key, page in self.by_key.items():
            others = beside.get(key[0], [])
            host = urllib.parse.urlsplit(page.server).hostname or ""
            alone = len(servers[key[0]]) == 1
            richer[key] = [emitter for emitter in others if alone or (host and host in emitter.instance)]
        return richer

    def tell_of(self, key: Key, emitter: ApiProcess) -> bool:
        """Whether there is a page of the server that this emitter belongs to."""
        return any(self._richer_emitters([(key, emitter)]).values())


def keys_of(page: ScrapedPage) -> list[Key]:
    """Under which the page's engines are known."""
    return [(page.recording, instance_of(page.instance, reading.engine)) for reading in page.engines]


def instance_of(server: str, engine: str) -> str:
    """The first rank goes by its server's name."""
    return server if engine == "0" else f"{server}#{engine}"


def _inform(engine: PageEngine, reading: EngineReading, knowledge: Knowledge) -> None:
    if engine.reading_facts != (reading.model, reading.facts):
        engine.reading_facts = (reading.model, dict(reading.facts))
        facts = dict(reading.facts) | ({"model": reading.model} if reading.model else {})
        engine.facts.learn(facts, FactSource.DISCOVERY)
    knowledge.apply(engine.facts, {}, engine.server, engine.recording)
