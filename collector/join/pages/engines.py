"""Engines known by their pages: one per server and ``engine`` label, who else tells of them, and how much arrives.

Where an engine sends its steps, or its requests, the page gives facts only. Its counters show how much of the telemetry
arrived: steps received against steps counted.

    ratio = (received(t) - received(t0)) / (counted(t) - counted(t0))    t: event time of the newest step received

Telemetry trails the page by seconds, so the page's count is taken back at t, between the two scrapes around it; a step
that several front ends count is one. Begins again after 4,096 steps, and when the counter falls. Steps of nothing but
unfinished prefill chunks are not counted by the page, so the ratio is cut at 1. Requests that send a span are compared
with those that the page of their server counted in the same way: a sampler of spans shows there, whatever it goes by.
"""

from __future__ import annotations

import math
import urllib.parse
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from collector.config import Config
from collector.decode.pages import EngineReading, Meaning, ScrapedPage
from collector.identity import ConfigResolver, FactSource
from collector.join.api_queueing import TOKEN_BUDGET
from collector.join.emitter import Emitter, Key, TargetRows
from collector.join.engine import Engine
from collector.join.inferred import ApiProcess
from collector.join.passes import PassEngine
from collector.telemetry import RowDrop
from online import Quality, RowBlock, Target

from .scrape_windows import ScrapeWindows, ended

_SCRAPES_MAX = 256
_STEPS_MIN, _STEPS_MAX = 100.0, 4096.0


@dataclass(slots=True)
class Completeness:
    """Share of the counted steps, or requests, that arrived; ``ratio`` is None until a hundred were counted."""

    ratio: float | None = None
    _counted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SCRAPES_MAX))
    _since: tuple[float, int] | None = None
    """Counted and received at the begin."""

    def count(self, unix_ns: int, steps: float) -> None:
        """Add one scrape of the page to what it counted."""
        if self._counted and not (unix_ns > self._counted[-1][0] and steps >= self._counted[-1][1]):
            self._counted.clear()
            self._since = self.ratio = None
        self._counted.append((unix_ns, steps))

    def record(self, received: int, at_ns: int) -> None:
        """Compare the page's counter with the steps, or requests, received until ``at_ns``."""
        if not self._counted or not self._counted[0][0] <= at_ns <= self._counted[-1][0]:
            return
        times, counts = np.array(self._counted).T
        counted = float(np.interp(at_ns, times, counts))
        if self._since is None or received < self._since[1]:
            self._since = (counted, received)
        steps = counted - self._since[0]
        if steps >= _STEPS_MIN:
            self.ratio = min((received - self._since[1]) / steps, 1.0)
        if steps >= _STEPS_MAX:
            self._since = (counted, received)


class PageEngine(Emitter):
    """An engine known by its counters; :class:`~collector.join.engine.Engine` is one known by its steps."""

    quality = Quality.METRICS

    def __init__(self, instance: str, recording: str, number: int, settings: Config) -> None:
        super().__init__(instance, recording, number, settings)
        self.windows = ScrapeWindows(self.count, number)
        self.completeness = Completeness()
        self.spans: dict[Key, Completeness] = {}
        """By API process: the share of the page's requests of which it has told."""
        self._prompts_before: tuple[float, float] | None = None

    @property
    def host(self) -> str:
        """Host of its server; empty if that has none, as in some recordings."""
        try:
            return urllib.parse.urlsplit(self.server).hostname or ""
        except ValueError:  # brackets around what is no IPv6 address
            return ""

    @property
    def last_step(self) -> int:
        """Its counter of steps."""
        newest = self.windows.newest
        steps = newest.value(Meaning.STEPS) if newest is not None else 0.0
        return 0 if math.isnan(steps) else int(steps)

    def inform(self, reading: EngineReading, resolver: ConfigResolver) -> None:
        """Learn the facts on a page, and those that the configuration adds."""
        model = {"model": reading.model} if reading.model else {}
        self.facts.learn({**reading.facts, **model}, FactSource.DISCOVERY)
        resolver.apply(self.facts, {}, self.server, self.recording)

    def add(self, unix_ns: int, mono_ns: int, reading: EngineReading) -> None:
        """Add one scrape; two between prompts make a window."""
        before = self.windows.newest
        self.windows.add(unix_ns, mono_ns, reading)
        newest = self.windows.newest
        self.newest_unix_ns = newest.unix_ns if newest is not None else 0
        if before is not None and newest is not None and not self.windows.scrapes_to_skip:
            budget = self.facts.number("max_num_batched_tokens") or TOKEN_BUDGET
            self.api_queueing.add_arrivals(ended(before, newest, budget))
        self.completeness.count(unix_ns, reading.values[Meaning.STEPS] / self.windows.front_ends)
        for spans in self.spans.values():
            spans.count(unix_ns, reading.values[Meaning.FINISHED])

    def advance(self) -> list[TargetRows]:
        """Rows since the last call: they come in order and are final at once."""
        by_target = self.windows.rows
        found = [(target, RowBlock.concatenate(rows)) for target, rows in by_target.items() if rows]
        for rows in by_target.values():
            rows.clear()
        return found

    def defer_to(self, emitters: Sequence[TelemetrySource]) -> None:
        """Make no rows, since richer emitters tell the same steps; compare how many steps arrive."""
        known = sum(len(rows) for target, rows in self.advance() if target is Target.STEP_TIME)
        self.count(RowDrop.KNOWN_FROM_STEPS, known)
        engines = [emitter for emitter in emitters if isinstance(emitter, Engine)]
        last_seen_unix_ns = max((engine.event_unix_ns for engine in engines), default=0)
        self.completeness.record(sum(engine.steps_seen for engine in engines), last_seen_unix_ns)

    @property
    def hit_ratio(self) -> float | None:
        """Share of prompt tokens since the first scrape that were in the prefix cache; None without such a counter."""
        newest = self.windows.newest
        if newest is None:
            return None
        hits, prompts = newest.value(Meaning.PREFIX_HIT_TOKENS), newest.value(Meaning.PROMPT_TOKENS)
        if self._prompts_before is None or prompts < self._prompts_before[1]:
            self._prompts_before = hits, prompts
        hits, prompts = hits - self._prompts_before[0], prompts - self._prompts_before[1]
        return hits / prompts if 0.0 <= hits <= prompts and prompts > 0.0 else None


TelemetrySource = Engine | ApiProcess | PassEngine


class PageEngines:
    """All page engines by key."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self.by_key: dict[Key, PageEngine] = {}

    @property
    def completeness(self) -> float:
        """Share of the counted steps that arrived, of the worst engine; NaN where nothing can be compared."""
        ratios = [e.completeness.ratio for e in self.by_key.values() if e.completeness.ratio is not None]
        return min(ratios, default=math.nan)

    def preferred_sources(self, page: PageEngine, sources: Sequence[TelemetrySource]) -> list[TelemetrySource]:
        """The emitters of the same engine that tell more than its page.

        A single server is that of every emitter. Of several, an emitter's is the one whose host it names. Two ranks of
        one server cannot be distinguished, so the emitters are preferred for both.
        """
        others = [source for source in sources if source.recording == page.recording]
        servers = {each.server for each in self.by_key.values() if each.recording == page.recording} if others else {}
        return [each for each in others if len(servers) == 1 or (page.host and page.host in each.instance)]

    def compare(self, page: PageEngine, processes: Iterable[ApiProcess]) -> None:
        """Give API processes their share of the requests that the page counted; ranks that share a page count apart.

        Each of several API servers of an engine knows a part of every batch. A page that stopped counts nothing more.
        """
        own = [each for each in self.preferred_sources(page, [*processes]) if isinstance(each, ApiProcess)]
        if not own or not self._counts_requests(page):
            return
        lately_ns = max(each.event_unix_ns for each in own) - self._settings.lateness_ns
        lively = [each for each in own if each.event_unix_ns >= lately_ns]  # others are gone, or idle
        hit_ratio = page.hit_ratio
        silent_ns = self._settings.timeout_ns + int(self._settings.scrape_interval_s * 1e9)
        counted_ns = (page.newest_unix_ns or math.inf) + silent_ns  # a restored page will come
        page.spans = {each.key: page.spans.get(each.key) or Completeness() for each in own}
        for process in own:
            spans = page.spans[process.key]
            spans.record(process.requests_seen, process.event_unix_ns)
            # of several that tell, one may not be of this server: its trace ids may say that it is sampled
            told = process.sampling.share if len(lively) > 1 else 1.0
            process.is_counted, process.hit_ratio = process.event_unix_ns <= counted_ns, hit_ratio
            process.counted_share = None if spans.ratio is None or told is None else min(spans.ratio, told)

    def counts_requests_of(self, source: TelemetrySource) -> bool:
        """Whether a page says how many of a source's requests there are."""
        return any(self._counts_requests(page) for page in self.pages_of(source))

    def pages_of(self, source: TelemetrySource) -> list[PageEngine]:
        """Pages of the server that this emitter belongs to."""
        return [page for page in self.by_key.values() if self.preferred_sources(page, [source])]

    def _counts_requests(self, page: PageEngine) -> bool:
        """Whether the page's requests can be compared: where ranks share a page, a span belongs to an unknown one."""
        key = page.recording, page.server
        return sum((one.recording, one.server) == key for one in self.by_key.values()) == 1


def keys_of(page: ScrapedPage) -> list[Key]:
    """Keys of the engines on a page: the first rank goes by its server's name."""
    return [
        (page.recording, page.instance if reading.engine == "0" else f"{page.instance}#{reading.engine}")
        for reading in page.engines
    ]
