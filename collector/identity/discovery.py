"""Discovery: vLLM servers asked about themselves, off the hot path, and never waited for.

    GET /v1/models   data[0].id -> model    data[0].root -> model_root    data[0].max_model_len
    GET /version     version -> vllm_version
    GET /metrics     vllm:cache_config_info{block_size, num_gpu_blocks, enable_prefix_caching, ...}

Each is optional: what answers is taken. Bounded in time (per call, headers and body together) and in bytes; redirects
are refused, for they could send us anywhere; an answer of another kind is counted by reason. An endpoint is asked every
30 s until it has answered, then every ten minutes, for servers restart with other flags.

Servers whose pages are scraped are asked the first two as well, with the scraper's token and certificates.
"""

from __future__ import annotations

import asyncio
import glob
import ssl
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from collector.config import Config, Owned, parse_owned
from collector.decode.pages import facts_in
from collector.runtime import Background, Clock, Health, IoLoop
from collector.runtime.http import FetchError, HttpClient
from collector.telemetry import PullOutcome

from .experts import Fact
from .resolver import TEXT_CHARS_MAX, ConfigResolver

BODY_BYTES_MAX = 2 * 2**20
RETRY_S = 30.0
REFRESH_S = 600.0
TIMEOUT_S = 2.0
_ACCEPT = "application/json, text/plain"
LOOK_EVERY_S = 5.0
"""Scraped servers come and go."""


class ScrapedServers(NamedTuple):
    """What discovery needs of the scraper: by name where a server can be asked, the token to send, whom to trust."""

    base_urls: Callable[[], Mapping[str, str]]
    token: Callable[[], str]
    tls: ssl.SSLContext | None


class Discovery:
    """Asks the configured endpoints and tells :class:`ConfigResolver` what they say."""

    def __init__(
        self,
        config: Config,
        resolver: ConfigResolver,
        clock: Clock,
        io: IoLoop,
        count: Callable[[PullOutcome], None] = lambda _: None,
        scraped: ScrapedServers | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        health: Health | None = None,
    ) -> None:
        self._configured = [Owned(url, instance or "*") for url, instance in map(parse_owned, config.discover)]
        self._scraped = scraped
        self._count = count
        self._resolver = resolver
        self._clock = clock
        self._due_ns: dict[Owned, int] = {}
        self._client = HttpClient(timeout_s)
        self._scraped_client = HttpClient(timeout_s, None if scraped is None else scraped.tls)
        self._background = Background("discovery", health, io)

    def start(self) -> None:
        """Begin, if there is anybody to ask."""
        if self._configured or self._scraped is not None:
            self._background.start(self._run())

    def stop(self) -> bool:
        """Ask no more; a question under way ends."""
        self._background.stop()
        return True

    async def _run(self) -> None:
        try:
            while True:
                await self.ask_due()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        await self._scraped_client.close()

    async def ask_due(self) -> None:
        """Ask those who have not been asked for long enough, side by side: who does not answer keeps nobody waiting."""
        servers = {} if self._scraped is None else self._scraped.base_urls()
        scraped = [Owned(url, glob.escape(name)) for name, url in servers.items()]
        now_ns = self._clock.monotonic_ns()
        self._due_ns = {each: self._due_ns.get(each, now_ns) for each in (*self._configured, *scraped)}
        due = [each for each, due_ns in self._due_ns.items() if due_ns <= now_ns]
        answered = await asyncio.gather(*(self.ask(each, scraped=each in scraped) for each in due))
        for each, has_answered in zip(due, answered, strict=True):
            self._due_ns[each] = now_ns + int((REFRESH_S if has_answered else RETRY_S) * 1e9)

    async def ask(self, endpoint: Owned, *, scraped: bool = False) -> bool:
        """Ask one server everything that its page has not told; whether any was answered."""
        answers: dict[str, Fact] = {}
        client, token = self._client, ""
        if scraped and self._scraped is not None:
            client, token = self._scraped_client, self._scraped.token()
        for path, read in QUESTIONS.items():
            if scraped and read is facts_in:
                continue
            try:
                body = await client.get(
                    endpoint.address.rstrip("/") + path, BODY_BYTES_MAX, accept=_ACCEPT, token=token
                )
            except FetchError as error:
                self._count(PullOutcome(error.outcome))
                continue
            facts = read(body)
            self._count(PullOutcome.READ if facts else PullOutcome.UNEXPECTED)
            answers |= facts
        if answers:
            self._resolver.discovered(endpoint.instance, answers)
        return bool(answers)


Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
T = TypeVar("T")


class _Card(msgspec.Struct):
    id: Text = ""
    root: Text | None = None
    parent: Text | None = None
    max_model_len: Annotated[int, msgspec.Meta(gt=0)] | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: Text


def read_models(body: bytes) -> dict[str, Fact]:
    """The first served model, what was loaded under its name, and whether adapters, which come after it, are served."""
    models = _read(body, _Models)
    if models is None or not models.data:
        return {}
    first, *others = models.data
    told = {
        "model": first.id,
        "model_root": first.root if first.root != first.id else None,
        "enable_lora": any(card.parent for card in others),
        "max_model_len": first.max_model_len,
    }
    return {name: fact for name, fact in told.items() if fact}


def read_version(body: bytes) -> dict[str, Fact]:
    """The version of vLLM, out of what ``/version`` answered."""
    told = _read(body, _Version)
    return {"vllm_version": told.version} if told is not None and told.version else {}


def _read(body: bytes, kind: type[T]) -> T | None:
    """An answer in JSON; None where it is something else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


QUESTIONS: Mapping[str, Callable[[bytes], Mapping[str, Fact]]] = {
    "/v1/models": read_models,
    "/version": read_version,
    "/metrics": facts_in,
}
