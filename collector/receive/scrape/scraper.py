"""Scrapes servers, off the hot path: a few threads take whoever is due, parse, and put the page where the worker looks.

A server that hangs keeps one thread for ``timeout_s`` and is asked less often each time. Pages wait in a bounded
queue; beyond it the oldest go, counted: a window just becomes longer.
"""

from __future__ import annotations

import heapq
import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from collector.config import ConfigError, ScrapeConfig
from collector.decode.pages import Meaning, PageParser, ScrapedPage
from collector.runtime import Clock
from collector.telemetry import ScrapeOutcome

from .cadence import Cadence
from .outcome_log import OutcomeLog
from .page_client import FetchedPage, PageClient, ScrapeTarget
from .target_list import TargetList

_log = logging.getLogger(__name__)

_STOP_NS = 300_000_000

CountOutcome = Callable[[ScrapeOutcome], None]


class ScrapedServer:
    """One server: its connection, the shape of its page, and its cadence."""

    def __init__(self, target: ScrapeTarget, client: PageClient, cadence: Cadence) -> None:
        self.target = target
        self.cadence = cadence
        self.gone = False
        self._client = client
        self._parser = PageParser()
        self._steps = 0.0
        self._got_ns = 0
        self._outcome: ScrapeOutcome | None = None

    def news(self, outcome: ScrapeOutcome) -> str:
        """What came of asking it, if that is another thing than the last time."""
        known, self._outcome = self._outcome, outcome
        return self._parser.explain(outcome) if outcome is not known else ""

    def scrape(self) -> tuple[ScrapeOutcome, ScrapedPage | None]:
        """Ask one server for its page once."""
        fetched = self._client.fetch()
        if isinstance(fetched, ScrapeOutcome):
            self.cadence.failed()
            return fetched, None
        readings = self._parser.parse(fetched.body)
        if isinstance(readings, ScrapeOutcome):
            self.cadence.failed()
            return readings, None
        page = ScrapedPage(self.target.server, fetched.unix_ns, fetched.sent_mono_ns, readings)
        self._pace(page, fetched)
        return ScrapeOutcome.TAKEN, page

    def _pace(self, page: ScrapedPage, fetched: FetchedPage) -> None:
        """Ranks of one server step together: the steps of the busiest one count."""
        steps = max(_steps_of(reading.values) for reading in page.engines)
        elapsed_s = (fetched.got_mono_ns - self._got_ns) / 1e9 if self._got_ns else 0.0
        cost_s = (fetched.got_mono_ns - fetched.sent_mono_ns) / 1e9
        self.cadence.answered(elapsed_s, max(steps - self._steps, 0.0), cost_s)
        self._steps, self._got_ns = steps, fetched.got_mono_ns

    def close(self) -> None:
        """Close the connection to this server."""
        self.gone = True
        self._client.close()


def _steps_of(values: tuple[float, ...]) -> float:
    steps = values[Meaning.STEPS]
    if steps == steps:  # noqa: PLR0124  not NaN
        return steps
    decoded, running = values[Meaning.ITL_COUNT], values[Meaning.RUNNING]
    return decoded / max(running, 1.0) if decoded == decoded else 0.0  # noqa: PLR0124


class Scraper:
    """All servers of the configuration.

    Attributes:
        tls: whom to trust; None where nobody is asked, since reading the system's authorities costs 2 MB.
    """

    def __init__(self, config: ScrapeConfig, clock: Clock, count: CountOutcome = lambda _: None) -> None:
        self._config = config
        self._clock = clock
        self._count = count
        self._targets = TargetList(config)
        self.tls = _tls(config) if self.enabled or config.ca_file else None
        self._pages: deque[ScrapedPage] = deque()
        self._servers: dict[ScrapeTarget, ScrapedServer] = {}
        self._due: list[tuple[int, int, ScrapedServer | None]] = []
        self._asked: set[ScrapedServer] = set()
        self._outcomes = OutcomeLog()
        self._number = 0
        self._wake = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"scrape-{number}", daemon=True) for number in range(config.threads)
        ]
        _ = self.token()  # a file that is not there is said at start

    @property
    def enabled(self) -> bool:
        """Whether there is anything to scrape."""
        return bool(self._config.endpoints or self._config.files)

    @property
    def servers(self) -> int:
        """How many servers are asked now."""
        return len(self._servers)

    def base_urls(self) -> dict[str, str]:
        """Name of each server -> where it can be asked who it is."""
        with self._wake:
            targets = list(self._servers)
        return {target.server: target.base_url for target in targets if target.base_url}

    def token(self) -> str:
        """Read for every question: a mounted Secret is swapped under us."""
        if not self._config.token_file:
            return ""
        try:
            return Path(self._config.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            if not self._servers:
                raise ConfigError("receivers.scrape.token_file", "cannot be read") from None
            return ""

    def start(self) -> None:
        """Begin, if there is anybody to ask."""
        if self.enabled:
            with self._wake:
                self._plan(0, None)
            for thread in self._threads:
                thread.start()

    def stop(self) -> bool:
        """Ask no more; a question under way ends by its own timeout. Always True: no page is owed to anybody."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        end_ns = self._clock.monotonic_ns() + _STOP_NS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, (end_ns - self._clock.monotonic_ns()) / 1e9))
        with self._wake:
            idle = [server for server in self._servers.values() if server not in self._asked]
        for server in idle:  # the others close their own when they are answered
            server.close()
        return True

    def take(self) -> list[ScrapedPage]:
        """Pages since the last call, in the order in which they were asked for."""
        with self._wake:
            pages = sorted(self._pages, key=lambda page: page.unix_ns)
            self._pages.clear()
        return pages

    def _plan(self, due_ns: int, server: ScrapedServer | None) -> None:
        self._number += 1
        heapq.heappush(self._due, (due_ns, self._number, server))
        self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                server = self._next()
                if self._stopped:
                    return
            try:
                due_s = self._look() if server is None else self._scrape(server)
            except Exception:  # noqa: BLE001 -- a fault of ours must not end the scraping of all others
                _log.exception("scrape failed")
                due_s = self._config.refresh_s
            with self._wake:
                if due_s is not None:
                    self._plan(self._clock.monotonic_ns() + int(due_s * 1e9), server)

    def _next(self) -> ScrapedServer | None:
        """Wait for what is due; None is the list of servers itself. Holds the lock."""
        while not self._stopped:
            if not self._due:
                self._wake.wait()
                continue
            wait_s = (self._due[0][0] - self._clock.monotonic_ns()) / 1e9
            if wait_s <= 0:
                return heapq.heappop(self._due)[2]
            self._wake.wait(wait_s)
        return None

    def _scrape(self, server: ScrapedServer) -> float | None:
        if server.gone:
            server.close()
            return None
        began_ns = self._clock.monotonic_ns()
        with self._wake:
            self._asked.add(server)
        outcome, page = server.scrape()
        self._count(outcome)
        if page is not None:
            with self._wake:
                self._pages.append(page)
                dropped = len(self._pages) > self._config.queue_pages
                if dropped:
                    self._pages.popleft()
            if dropped:
                self._count(ScrapeOutcome.DROPPED)
        with self._wake:
            self._asked.discard(server)
            stopped = self._stopped
        self._outcomes.note(server.target.server, server.news(outcome), self._clock.monotonic_ns())
        if stopped:
            server.close()
        spent_s = (self._clock.monotonic_ns() - began_ns) / 1e9
        return max(server.cadence.interval_s - spent_s, 0.0)

    def _look(self) -> float | None:
        """Begin with servers that are new, end with those that are gone; when to look again."""
        targets = self._targets.look()
        known = set(targets)
        with self._wake:
            now_ns = self._clock.monotonic_ns()
            for target in [target for target in self._servers if target not in known]:
                self._servers.pop(target).gone = True
            new = [target for target in targets if target not in self._servers]
            for number, target in enumerate(new):
                # spread over an interval, so that a hundred servers are not asked at once
                offset_ns = int(number / len(new) * self._config.interval_s * 1e9)
                server = self._servers[target] = ScrapedServer(target, self._client(target), self._cadence())
                self._plan(now_ns + offset_ns, server)
        return None if self._targets.static else self._config.refresh_s

    def _cadence(self) -> Cadence:
        return Cadence(min(self._config.interval_min_s, self._config.interval_s), self._config.interval_s)

    def _client(self, target: ScrapeTarget) -> PageClient:
        return PageClient(target, timeout_s=self._config.timeout_s, clock=self._clock, token=self.token, tls=self.tls)


def _tls(config: ScrapeConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("receivers.scrape.ca_file", f"cannot be loaded: {error}") from None
    if config.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
