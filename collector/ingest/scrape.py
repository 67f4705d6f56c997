"""Servers' pages of counters: which servers there are, how often each is asked, and what comes of it.

**Which.** A static list, the addresses behind a name, and files in Prometheus's file discovery format:

    [{"targets": ["10.0.0.7:8000", ...], "labels": {"__scheme__": "https", "__metrics_path__": "/metrics"}}, ...]

JSON or YAML. Names and files are looked at again every ``refresh_s``; while a name does not resolve or a file cannot be
read, what it gave before stays.

**How often.** A window shall hold enough steps, and the page shall cost its server next to nothing:

    interval = clip(10 T, interval_min, interval_max), T: seconds per step of late       a window of 5 to 30 steps
    interval >= cost / 2 %                               cost: time that the page took of late, an upper limit
    after k failures in a row: interval 2^k, 30 s at most

Both means forget within some ten pages. An idle server is asked every ``interval_max``.

**What comes.** Every server has a task in the loop, over a connection that is kept; an answer is bounded in time and
bytes, redirects are refused. Pages wait in a bounded queue for the worker; beyond it the oldest go, counted: a window
just becomes longer. Whose page is read, and whose is not and why, is logged when that changes, several to a line.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from collector.config import Config, ConfigError, is_page_url
from collector.decode.pages import PAGE_BYTES_MAX, EngineReading, Meaning, PageFault, ScrapedPage, parse_page
from collector.runtime import Background, Clock, Health, IoLoop
from collector.runtime.http import FetchError, HttpClient
from collector.telemetry import PullOutcome

STEPS_WANTED = 10.0
COST_SHARE = 0.02
INTERVAL_MAX_S = 15.0
BACKOFF_MAX_S = 30.0
_RATE = 0.2
_BACKOFF_DOUBLINGS_MAX = 8
INTERVAL_MIN_S = 0.25
"""Shortest pause between two pages of one server."""
TIMEOUT_S = 2.0
"""How long a page may take."""
REFRESH_S = 30.0
"""How often names and files are looked at again."""
SERVERS_MAX = 256
"""Servers asked, of all targets together."""
QUEUE_PAGES = 1024
"""Pages that wait for the worker; beyond it the oldest go, counted."""
ALL_ADDRESSES = "dns+"
"""Before the URL of a target: ask every address behind the name, as of a headless Service."""


EVERY_S = 15.0
"""More than the time for which a logger holds back what it has just said."""
SERVERS_SHOWN = 10
_log = logging.getLogger(__name__)


class OutcomeLog:
    """Collects news about servers for one line; in the loop."""

    def __init__(self) -> None:
        self._news: dict[str, str] = {}
        self._due_ns = 0

    def note(self, server: str, news: str, now_ns: int) -> None:
        """Remember what came of asking this server, if it is news, and say what is to be said by now."""
        if news:
            self._news[server] = news
        if not self._news or now_ns < self._due_ns:
            return
        told, self._news = self._news, {}
        self._due_ns = now_ns + int(EVERY_S * 1e9)
        read = [server for server, outcome in told.items() if outcome == PullOutcome.READ]
        failed = [f"{server} ({outcome})" for server, outcome in told.items() if outcome != PullOutcome.READ]
        if read:
            _log.info("page read of %s", _listed(read))
        if failed:
            _log.warning("no page of %s", _listed(failed))


def _listed(servers: list[str]) -> str:
    more = len(servers) - SERVERS_SHOWN
    return ", ".join(servers[:SERVERS_SHOWN]) + (f" and {more} more" if more > 0 else "")


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


FILE_BYTES_MAX = 2**20

Resolve = Callable[[str, int], list[str]]


def addresses_of(host: str, port: int) -> list[str]:
    """All addresses behind a name, sorted; OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class TargetList:
    """Remembers what each source gave last."""

    def __init__(self, config: Config, resolve: Resolve = addresses_of) -> None:
        self._sources = config.scrape
        self._resolve = resolve
        self._known: dict[str, list[ScrapeTarget]] = {}

    def find_targets(self) -> list[ScrapeTarget]:
        """All servers as of now, without doubles, at most ``servers_max``."""
        problems = []
        for source in self._sources:
            try:
                self._known[source] = read_targets(Path(source)) if _is_path(source) else self._behind(source)
            except (OSError, ValueError) as error:
                problems.append(f"{source.partition('?')[0]}: {error}")  # a token may stand behind it
        if problems:
            _log.warning("scrape targets of %s", "; ".join(problems))
        every = dict.fromkeys(target for targets in self._known.values() for target in targets)
        return list(every)[:SERVERS_MAX]

    def _behind(self, source: str) -> list[ScrapeTarget]:
        url = source.removeprefix(ALL_ADDRESSES)
        url = url if "://" in url else f"http://{url}"
        if not source.startswith(ALL_ADDRESSES):
            return [ScrapeTarget(url)]
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return [ScrapeTarget(url, address) for address in self._resolve(parts.hostname or "", port)]


def _is_path(source: str) -> bool:
    return source.startswith(("/", "./", "../"))


def read_targets(path: Path, default_path: str = "/metrics") -> list[ScrapeTarget]:
    """Targets of one file; ``default_path``: what is asked of those that name none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no list of targets.
    """
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError("larger than 1 MiB")
    try:
        groups: Any = yaml.safe_load(data)  # JSON is YAML
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"neither JSON nor YAML ({type(error).__name__})") from None
    out = []
    for group in groups if isinstance(groups, list) else [groups]:
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(targets, list):
            raise ValueError("expected a list of groups with targets")  # noqa: TRY004 -- of the file, not of ours
        labels = group.get("labels") or {}
        if not isinstance(labels, dict):
            raise ValueError("expected labels with their values")  # noqa: TRY004
        scheme, where = labels.get("__scheme__", "http"), labels.get("__metrics_path__", default_path)
        out += [ScrapeTarget(_checked(scheme, target, where)) for target in targets]
    return out


def _checked(scheme: object, target: object, where: object) -> str:
    texts = all(isinstance(part, str) for part in (scheme, target, where))
    url = f"{scheme}://{target}{where}" if texts else ""
    if not is_page_url(url):  # what stands before an @ is a password
        raise ValueError(f"{url.rpartition('@')[2][:256]!r} is no target")
    return url


class ScrapedServer:
    """One server: what it answers, and how long it is left alone until the next question."""

    def __init__(self, target: ScrapeTarget, client: HttpClient, clock: Clock, interval_max_s: float) -> None:
        self.target = target
        self.failures = 0
        """In a row."""
        parts = urllib.parse.urlsplit(target.url)
        self._url = target.url if parts.path not in ("", "/") else parts._replace(path="/metrics").geturl()
        self._client = client
        self._clock = clock
        self._interval_max_s = interval_max_s
        self._got_ns = 0
        self._steps = self._cost_s = 0.0
        self._step_s: float | None = None
        self._outcome: PullOutcome | None = None

    async def scrape(self, token: str) -> tuple[PullOutcome, str, ScrapedPage | None]:
        """Ask for the page once: what came of it; the same in words, if that is another thing than the last time."""
        unix_ns, sent_ns = self._clock.unix_nano(), self._clock.monotonic_ns()
        body = await self._fetch(token)
        got_ns = self._clock.monotonic_ns()
        # in a thread: the page of a server with many ranks takes longer than the loop may be held
        readings = body if isinstance(body, PageFault) else await asyncio.to_thread(parse_page, body)
        if isinstance(readings, PageFault):
            self.failures += 1
            return readings.outcome, self._news(readings.outcome, str(readings)), None
        self._pace(readings, sent_ns, got_ns)
        page = ScrapedPage(self.target.server, unix_ns, sent_ns, readings)
        return PullOutcome.READ, self._news(PullOutcome.READ, PullOutcome.READ.value), page

    def _news(self, outcome: PullOutcome, text: str) -> str:
        """The text, if the outcome is another one than the last time."""
        before, self._outcome = self._outcome, outcome
        return text if outcome is not before else ""

    async def _fetch(self, token: str) -> bytes | PageFault:
        address = self.target.address
        try:
            return await self._client.get(self._url, PAGE_BYTES_MAX, accept=_ACCEPT, token=token, address=address)
        except FetchError as error:
            return PageFault(PullOutcome(error.outcome))

    def _pace(self, readings: Sequence[EngineReading], sent_ns: int, got_ns: int) -> None:
        """Follow the time of a step and the cost of a page; ranks of one server step together: the busiest counts."""
        self.failures = 0
        cost_s, elapsed_s = (got_ns - sent_ns) / 1e9, (got_ns - self._got_ns) / 1e9 if self._got_ns else 0.0
        self._cost_s += (cost_s - self._cost_s) * (_RATE if self._cost_s else 1.0)
        counted = max(_steps_of(reading.values) for reading in readings)
        steps = counted - self._steps
        if elapsed_s > 0.0 and steps < 1.0:
            self._step_s = None
        elif elapsed_s > 0.0:
            step_s = elapsed_s / steps
            self._step_s = step_s if self._step_s is None else self._step_s + _RATE * (step_s - self._step_s)
        self._steps, self._got_ns = counted, got_ns

    @property
    def interval_s(self) -> float:
        """Until the next question."""
        wanted_s = self._interval_max_s if self._step_s is None else STEPS_WANTED * self._step_s
        paced_s = min(max(wanted_s, INTERVAL_MIN_S), self._interval_max_s)
        backoff_s = self._interval_max_s * 2.0 ** min(self.failures, _BACKOFF_DOUBLINGS_MAX) if self.failures else 0.0
        return max(paced_s, min(self._cost_s / COST_SHARE, INTERVAL_MAX_S), min(backoff_s, BACKOFF_MAX_S))


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

    def __init__(
        self,
        config: Config,
        clock: Clock,
        count: Callable[[PullOutcome], None] = lambda _: None,
        io: IoLoop | None = None,
        health: Health | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._config = config
        self._clock = clock
        self._count = count
        self._targets = TargetList(config)
        self.tls = _tls(config) if self.enabled or config.ca_file else None
        self._client = HttpClient(timeout_s, self.tls)
        self._lock = threading.Lock()
        """Guards the pages; all else belongs to the loop."""
        self._pages: deque[ScrapedPage] = deque()
        self._servers: dict[ScrapeTarget, asyncio.Task[None]] = {}
        self._outcomes = OutcomeLog()
        self._background = Background("scraper", health, io)
        _ = self.token()  # a file that is not there is said at start

    @property
    def enabled(self) -> bool:
        """Whether there is anything to scrape."""
        return bool(self._config.scrape)

    @property
    def servers(self) -> int:
        """How many servers are asked now."""
        return len(self._servers)

    def base_urls(self) -> dict[str, str]:
        """Name of each server -> where it can be asked who it is."""
        return {target.server: target.base_url for target in list(self._servers) if target.base_url}

    def token(self) -> str:
        """Read for every question: a mounted Secret is swapped under us."""
        if not self._config.scrape_token_file:
            return ""
        try:
            return Path(self._config.scrape_token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            if not self._servers:
                raise ConfigError("scrape_token_file", "cannot be read") from None
            return ""

    def start(self) -> None:
        """Begin, if there is anybody to ask."""
        if self.enabled:
            self._background.start(self._run())

    def stop(self) -> bool:
        """Ask no more; questions under way end. Always True: no page is owed to anybody."""
        self._background.stop()
        return True

    def take(self) -> list[ScrapedPage]:
        """Pages since the last call, in the order in which they were asked for."""
        with self._lock:
            pages = sorted(self._pages, key=lambda page: page.unix_ns)
            self._pages.clear()
        return pages

    async def _run(self) -> None:
        """Look at the list of servers again and again."""
        try:
            while True:
                self._take_over_targets(await asyncio.to_thread(self._targets.find_targets))  # resolves names
                await asyncio.sleep(REFRESH_S)
        finally:
            for task in self._servers.values():
                task.cancel()
            await asyncio.gather(*self._servers.values(), return_exceptions=True)
            await self._client.close()

    def _take_over_targets(self, targets: list[ScrapeTarget]) -> None:
        """Begin with servers that are new, end with those that are gone."""
        for target in [target for target in self._servers if target not in targets]:
            self._servers.pop(target).cancel()
        new = [target for target in targets if target not in self._servers]
        for number, target in enumerate(new):
            # spread over an interval, so that a hundred servers are not asked at once
            offset_s = number / len(new) * self._config.scrape_interval_s
            self._servers[target] = asyncio.create_task(self._ask_often(target, offset_s))

    async def _ask_often(self, target: ScrapeTarget, offset_s: float) -> None:
        server = ScrapedServer(target, self._client, self._clock, self._config.scrape_interval_s)
        await asyncio.sleep(offset_s)
        while True:
            began_ns = self._clock.monotonic_ns()
            try:
                await self._ask(server)
            except Exception:  # noqa: BLE001 -- a fault of ours must not end the scraping of this server
                _log.exception("scrape failed")
                server.failures += 1
            spent_s = (self._clock.monotonic_ns() - began_ns) / 1e9
            await asyncio.sleep(max(server.interval_s - spent_s, 0.0))

    async def _ask(self, server: ScrapedServer) -> None:
        outcome, text, page = await server.scrape(self.token())
        self._count(outcome)
        if page is not None:
            with self._lock:
                self._pages.append(page)
                dropped = len(self._pages) > QUEUE_PAGES
                if dropped:
                    self._pages.popleft()
            if dropped:
                self._count(PullOutcome.DROPPED)
        self._outcomes.note(server.target.server, text, self._clock.monotonic_ns())


def _tls(config: Config) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("ca_file", f"cannot be loaded: {error}") from None
    return context
