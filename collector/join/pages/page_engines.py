"""Engines known by their pages: one per server and ``engine`` label, and who else tells of them.

Where an engine sends its steps, or its requests, the page teaches facts only: what it counts is the yardstick for how
much of the telemetry arrived.
"""

from __future__ import annotations

import math
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from collector.config import JoinConfig
from collector.decode.pages import EngineReading, ScrapedPage
from collector.identity import FactSource, Knowledge
from collector.join.api_process import ApiProcess
from collector.join.emitter import Key, config_id_of, key_of
from collector.join.engine import Engine
from collector.join.events import Succeeded
from online.state import saved

from .page_engine import PageEngine

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

    STATE = saved(
        "page_engines",
        by_key=OrderedDict[Key, PageEngine],
        fresh=lambda join: PageEngines(join),  # noqa: PLW0108 -- PageEngines is not known yet
    )

    def __init__(self, settings: JoinConfig) -> None:
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
