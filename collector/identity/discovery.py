"""Discovery: vLLM servers asked about themselves, off the hot path, and never waited for.

    GET /v1/models   data[0].id -> model    data[0].max_model_len
    GET /version     version -> vllm_version
    GET /metrics     vllm:cache_config_info{block_size, num_gpu_blocks, enable_prefix_caching, ...}

Each is optional: what answers is taken. Bounded in time (per call, headers and body together) and in bytes; redirects
are refused, for they could send us anywhere; an answer of another kind is counted by reason. An endpoint is asked every
``interval_s`` until it has answered, then every ``refresh_s``, for servers restart with other flags.
"""

from __future__ import annotations

import http.client
import re
import socket
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from collector.config import DiscoveryConfig, DiscoveryEndpoint
from collector.runtime import Clock, Task
from collector.telemetry import DiscoveryOutcome

from .facts import TEXT_CHARS_MAX, Fact
from .knowledge import Knowledge

BODY_BYTES_MAX = 2 * 2**20
_CHUNK_BYTES = 65_536
_OK = 200
_REDIRECTS = range(300, 400)

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CACHE_LINE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)


class Discovery:
    """Asks the configured endpoints and tells :class:`Knowledge` what they say."""

    def __init__(
        self,
        config: DiscoveryConfig,
        knowledge: Knowledge,
        clock: Clock,
        count: Callable[[DiscoveryOutcome], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._count = count
        self._knowledge = knowledge
        self._clock = clock
        self._due_ns = dict.fromkeys(config.endpoints, 0)
        self._task = Task("discovery", self._ask_due)

    def start(self) -> None:
        """Begin, if there is anybody to ask."""
        if self._config.endpoints:
            self._task.start()

    def stop(self) -> bool:
        """Ask no more; a question under way ends by its own timeout."""
        self._task.request_stop()
        return True

    def _ask_due(self) -> float:
        for endpoint, due_ns in self._due_ns.items():
            if due_ns <= self._clock.monotonic_ns():
                answered = self.ask(endpoint)
                wait_s = self._config.refresh_s if answered else self._config.interval_s
                self._due_ns[endpoint] = self._clock.monotonic_ns() + int(wait_s * 1e9)
        left_ns = min(self._due_ns.values()) - self._clock.monotonic_ns()
        return max(left_ns / 1e9, 0.05)

    def ask(self, endpoint: DiscoveryEndpoint) -> bool:
        """Ask one server all three questions; whether any was answered."""
        answers: dict[str, Fact] = {}
        for path, read in QUESTIONS.items():
            outcome, body = fetch(endpoint.url, path, self._config.timeout_s, self._clock)
            if outcome is DiscoveryOutcome.ANSWERED:
                facts = read(body)
                outcome = outcome if facts else DiscoveryOutcome.UNEXPECTED
                answers |= facts
            self._count(outcome)
        if answers:
            self._knowledge.discovered(endpoint.instance, answers)
        return bool(answers)


def fetch(base: str, path: str, timeout_s: float, clock: Clock) -> tuple[DiscoveryOutcome, bytes]:
    """Send one GET whose answer is bounded in bytes and time."""
    parts = urllib.parse.urlsplit(base)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    deadline_ns = clock.monotonic_ns() + int(timeout_s * 1e9)
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        try:
            connection.request("GET", path, headers={"Accept": "application/json, text/plain"})
            response = connection.getresponse()
            if response.status != _OK:
                redirected = response.status in _REDIRECTS
                return (DiscoveryOutcome.REDIRECT if redirected else DiscoveryOutcome.REFUSED), b""
            return _read(response, deadline_ns, clock)
        finally:
            connection.close()
    except TimeoutError:
        return DiscoveryOutcome.TIMEOUT, b""
    except (OSError, socket.gaierror):
        return DiscoveryOutcome.UNREACHABLE, b""
    except (http.client.HTTPException, ValueError):
        return DiscoveryOutcome.UNEXPECTED, b""


def _read(response: http.client.HTTPResponse, deadline_ns: int, clock: Clock) -> tuple[DiscoveryOutcome, bytes]:
    body = b""
    while chunk := response.read1(_CHUNK_BYTES):
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            return DiscoveryOutcome.TOO_LARGE, b""
        if clock.monotonic_ns() > deadline_ns:  # a server that drips never trips the socket's own timeout
            return DiscoveryOutcome.TIMEOUT, b""
    return DiscoveryOutcome.ANSWERED, body


def read_models(body: bytes) -> dict[str, Fact]:
    """The first served model; adapters come after it."""
    answer = _json(body)
    data = answer.get("data") if isinstance(answer, Mapping) else None
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], Mapping) else {}
    out: dict[str, Fact] = {}
    name, longest = first.get("id"), first.get("max_model_len")
    if isinstance(name, str) and name:
        out["model"] = name[:TEXT_CHARS_MAX]
    if isinstance(longest, int) and not isinstance(longest, bool) and longest > 0:
        out["max_model_len"] = longest
    return out


def read_version(body: bytes) -> dict[str, Fact]:
    """The version of vLLM, out of what ``/version`` answered."""
    answer = _json(body)
    version = answer.get("version") if isinstance(answer, Mapping) else None
    return {"vllm_version": version[:64]} if isinstance(version, str) and version else {}


def read_metrics(body: bytes) -> dict[str, Fact]:
    """The labels of ``vllm:cache_config_info`` that are facts of a configuration."""
    line = _CACHE_LINE.search(body.decode("utf-8", "replace"))
    labels = dict(_LABEL.findall(line[1])) if line else {}
    out: dict[str, Fact] = {}
    for name in ("block_size", "num_gpu_blocks"):
        text = labels.get(name, "")
        if text.isascii() and text.isdigit() and int(text[:18]) > 0:
            out[name] = int(text[:18])
    if labels.get("enable_prefix_caching") in ("True", "False"):
        out["enable_prefix_caching"] = labels["enable_prefix_caching"] == "True"
    return out


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


QUESTIONS: Mapping[str, Callable[[bytes], dict[str, Fact]]] = {
    "/v1/models": read_models,
    "/version": read_version,
    "/metrics": read_metrics,
}
