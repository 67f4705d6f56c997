"""Servers' pages of counters: which servers there are, and what comes of asking each again and again.

**Which.** Addresses, and names behind which there may be many (``dns+``). Names are looked up again every
``REFRESH_S``; while one does not resolve, what it gave before stays.

**How often.** Every ``scrape_interval_s``; after k failures in a row 2^k times as rarely, up to ``BACKOFF_MAX_S``.

**Who it is.** A server is asked that too (:mod:`.discovery`), every ``REFRESH_S``, for servers restart with other
flags. So are the servers of ``discover``, which get no token.

**What comes.** Every server has a task in the loop, over a connection that is kept; an answer is bounded in time and
bytes, redirects are refused. Pages wait in a bounded queue for the worker; beyond it the oldest go, counted: a window
just becomes longer. Whether a server's page is read, and why not, is logged when that changes.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import socket
import ssl
import threading
import urllib.parse
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from collector.config import Config, ConfigError, parse_owned, read_file, refuse_special
from collector.decode.pages import PAGE_BYTES_MAX, PageProblem, ScrapedPage, parse_page
from collector.runtime import REPORT_ONCE, Background, Clock, Health, end_tasks, in_own_thread, sentence
from collector.runtime.http import FetchError, HttpClient
from collector.telemetry import PullOutcome

from .access import WatchedFiles
from .discovery import BESIDE_PAGES, QUESTIONS, Facts, Questions, request_facts

BACKOFF_MAX_S = 30.0
"""Longest pause after failures, where the usual one is not longer."""
TIMEOUT_S = 2.0
"""How long a page may take."""
REFRESH_S = 30.0
"""How often names are looked up again, and servers are asked who they are."""
SERVERS_MAX = 256
"""Servers asked, of all targets together."""
QUEUE_PAGES = 1024
"""Pages that wait for the worker; beyond it the oldest go, counted."""
ALL_ADDRESSES = "dns+"
"""Before the URL of a target: ask every address behind the name, as of a headless Service."""
_log = logging.getLogger(__name__)
_ROOT_PATHS = ("", "/", "/metrics", "/metrics/")
_ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4"


class ScrapeTarget(NamedTuple):
    """Where a page is; ``address`` is dialled in the host's stead, if there is one."""

    url: str
    address: str = ""

    @property
    def server(self) -> str:
        """The name under which its engines are known."""
        parts = urllib.parse.urlsplit(self.url)
        host = self.address or parts.hostname or ""
        port = f":{parts.port}" if parts.port is not None else ""
        path = parts.path if parts.path not in _ROOT_PATHS else ""
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}{path}"

    @property
    def base_url(self) -> str:
        """Where the server answers other questions; empty if that cannot be told from where its page is.

        A page at another path may be a proxy's, and a certificate is not of an address but of the name behind it.
        """
        parts = urllib.parse.urlsplit(self.url)
        known = parts.path in _ROOT_PATHS and not (self.address and parts.scheme == "https")
        return self.server if known else ""


Resolve = Callable[[str, int], list[str]]


def addresses_of(host: str, port: int) -> list[str]:
    """All addresses behind a name, sorted; OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


def targets_behind(source: str, path: str, resolve: Resolve) -> list[ScrapeTarget]:
    """What a source names: with this path where it has none, and every address behind a name with ``dns+``.

    OSError if a name has none; ValueError where it is no address.
    """
    url = source.removeprefix(ALL_ADDRESSES)
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    url = parts.geturl() if parts.path not in ("", "/") else parts._replace(path=path).geturl()
    if not source.startswith(ALL_ADDRESSES):
        return [ScrapeTarget(url)]
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return [ScrapeTarget(url, address) for address in resolve(parts.hostname or "", port)]


class TargetList:
    """Remembers what each name gave last."""

    def __init__(self, config: Config, resolve: Resolve = addresses_of) -> None:
        self._sources = config.scrape
        self._resolve = resolve
        self._known: dict[str, list[ScrapeTarget]] = {}

    def find_targets(self) -> list[ScrapeTarget]:
        """All servers as of now, without doubles, at most ``SERVERS_MAX``."""
        problems = []
        for source in self._sources:
            try:
                self._known[source] = targets_behind(source, "/metrics", self._resolve)
            except (OSError, ValueError) as error:
                problems.append(f"{source.partition('?')[0]}: {error}")  # a token may stand behind it
        if problems:
            _log.warning("scrape targets of %s", "; ".join(problems))
        every = dict.fromkeys(target for targets in self._known.values() for target in targets)
        return list(every)[:SERVERS_MAX]


async def read_page(client: HttpClient, clock: Clock, target: ScrapeTarget, token: str) -> ScrapedPage | PageProblem:
    """Ask a server for its page once."""
    body, unix_ns, sent_ns = BytesIO(), clock.unix_nano(), clock.monotonic_ns()
    try:
        await client.get(target.url, body, PAGE_BYTES_MAX, accept=_ACCEPT, token=token, address=target.address)
    except FetchError as error:
        return PageProblem(PullOutcome(error.outcome))
    # in a thread: the page of a server with many ranks takes longer than the loop may be held
    readings = await asyncio.to_thread(parse_page, body.getvalue())
    return readings if isinstance(readings, PageProblem) else ScrapedPage(target.server, unix_ns, sent_ns, readings)


@dataclass(slots=True)
class _Answered:
    """What came of asking a server last, and how often in a row that was no page."""

    outcome: PullOutcome | None = None
    failures: int = 0


class Scraper:
    """All servers of the configuration: those that are scraped, and those of ``discover``, who are asked that alone.

    ``count`` takes what came of a question for ``counters``, or for ``discovery``; ``learn_facts`` a pattern, and what
    a server says of the engines whose name matches it.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        count: Callable[[str, PullOutcome], None] = lambda *_: None,
        learn_facts: Callable[[str, Facts], None] = lambda *_: None,
        health: Health | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._config = config
        self._clock = clock
        self._count = count
        self._learn_facts = learn_facts
        self._targets = TargetList(config)
        self._is_needed = bool(config.scrape or config.discover)
        self.tls = _tls(config) if self._is_needed or config.ca_file else None
        """Whom to trust; None where nobody is asked, since reading the system's authorities costs 2 MB."""
        self._client = HttpClient(timeout_s, self.tls)
        self._lock = threading.Lock()
        """Guards the pages; all else belongs to the loop."""
        self._pages: deque[ScrapedPage] = deque(maxlen=QUEUE_PAGES)
        self._servers: dict[ScrapeTarget, list[asyncio.Task[None]]] = {}
        """Those that are scraped, and who asks them."""
        self._background = Background("scraper", health)
        self._token: Callable[[], str] = str
        if path := config.scrape_token_file:  # a mounted Secret is swapped under us
            self._token = WatchedFiles(
                "token file", path, lambda: read_file(Path(path)).decode("ascii").strip(), "scrape_token_file", clock
            ).newest

    @property
    def servers(self) -> int:
        """How many servers are scraped now."""
        return len(self._servers)

    async def start(self) -> None:
        """Begin, if there is anybody to ask."""
        if self._is_needed:
            self._background.start(self._run())

    async def stop(self) -> bool:
        """Ask no more; questions under way end. Always True: no page is owed to anybody."""
        await self._background.stop()
        return True

    def take(self) -> list[ScrapedPage]:
        """Pages since the last call, in the order in which they were asked for."""
        with self._lock:
            pages = sorted(self._pages, key=lambda page: page.unix_ns)
            self._pages.clear()
        return pages

    async def _run(self) -> None:
        """Ask those of ``discover``, and look at the list of servers to scrape again and again."""
        discovered = [
            self._ask_often(partial(self._request_facts, url.rstrip("/"), instance or "*", QUESTIONS))
            for url, instance in map(parse_owned, self._config.discover)
        ]
        try:
            while True:
                self._take_over_targets(await in_own_thread(self._targets.find_targets))  # resolves names
                await asyncio.sleep(REFRESH_S)
        finally:
            await end_tasks([*discovered, *chain.from_iterable(self._servers.values())])
            await self._client.close()

    def _take_over_targets(self, targets: list[ScrapeTarget]) -> None:
        """Begin with servers that are new, end with those that are gone."""
        for target in [target for target in self._servers if target not in targets]:
            for task in self._servers.pop(target):
                task.cancel()
        new = [target for target in targets if target not in self._servers]
        for number, target in enumerate(new):
            # spread over an interval, so that a hundred servers are not asked at once
            offset_s = number / len(new) * self._config.scrape_interval_s
            self._servers[target] = [self._ask_often(partial(self._ask_page, target, _Answered()), offset_s)]
            if url := target.base_url:
                who = partial(self._request_facts, url, glob.escape(target.server), BESIDE_PAGES, self._token)
                self._servers[target].append(self._ask_often(who, offset_s))

    def _ask_often(self, ask: Callable[[], Awaitable[float]], offset_s: float = 0.0) -> asyncio.Task[None]:
        """Ask again and again; ``ask`` says after how many seconds."""

        async def run() -> None:
            await asyncio.sleep(offset_s)
            while True:
                began_ns = self._clock.monotonic_ns()
                try:
                    pause_s = await ask()
                except Exception:  # noqa: BLE001 -- a fault of ours must not end the asking
                    _log.exception("scrape failed")
                    pause_s = BACKOFF_MAX_S
                await asyncio.sleep(pause_s - (self._clock.monotonic_ns() - began_ns) / 1e9)

        return asyncio.create_task(run())

    async def _ask_page(self, target: ScrapeTarget, last: _Answered) -> float:
        """Queue the page of a server; what came of asking is logged where the last time something else did."""
        page = await read_page(self._client, self._clock, target, self._token())
        outcome = page.outcome if isinstance(page, PageProblem) else PullOutcome.READ
        is_news = outcome is not last.outcome
        last.outcome = outcome
        self._count("counters", outcome)
        if isinstance(page, PageProblem):
            last.failures += 1
            if is_news:
                by_default = outcome is PullOutcome.UNREACHABLE and urllib.parse.urlsplit(target.url).port is None
                hint = "; vLLM listens on port 8000, and none was given" * by_default
                _log.warning("no page of %s (%s%s)", target.server, page, hint, extra=REPORT_ONCE)
        else:
            last.failures = 0
            if is_news:
                _log.info("page read of %s", target.server, extra=REPORT_ONCE)
            with self._lock:
                is_full = len(self._pages) == QUEUE_PAGES
                self._pages.append(page)
            if is_full:
                self._count("counters", PullOutcome.DROPPED)
        interval_s = self._config.scrape_interval_s
        return max(interval_s, min(interval_s * 2.0 ** min(last.failures, 20), BACKOFF_MAX_S))

    async def _request_facts(
        self, url: str, pattern: str, questions: Questions, token: Callable[[], str] = str
    ) -> float:
        answers = await request_facts(self._client, url, questions, partial(self._count, "discovery"), token())
        if answers:
            self._learn_facts(pattern, answers)
        return REFRESH_S


def _tls(config: Config) -> ssl.SSLContext:
    try:
        refuse_special(Path(config.ca_file))
        context = ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("ca_file", f"cannot be loaded: {sentence(error)}") from None
    return context
