"""``tracefit doctor URL``: is telemetry coming, what is left out, what waits, what may be used, and what to change.

The address is a sidecar's, or that of an inference server whose page of counters could be learned from. Everything is
read from the pages that others read, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

import tracefit
from collector.config import is_page_url
from collector.decode.pages import PageProblem, parse_page
from collector.runtime import EXIT_FAILED, EXIT_OK, StartError
from collector.telemetry import Outcome, PullOutcome, RowDrop, Skip, table
from exporters.wording import (
    EVENT_LIMIT,
    NOTHING_YET,
    OTLP_PORT,
    QUALITY,
    UNKNOWN_MODEL,
    Advice,
    printable,
    reason_text,
)
from online import RowOutcome

from . import Report
from .ask import what_to_type

PAGE_BYTES_MAX, TEXT_CHARS_MAX = 64 << 20, 10_000
TIMEOUT_S = 5.0
GOOD, FAIR, POOR = "good", "fair", "poor"
_REASONS_SHOWN, _NAMES_SHOWN = 3, 2

_PORTS = "a sidecar's pages are on port 9464, vLLM's on 8000"
_PROBLEMS = ("_problem", "refused", "unsaved")
"""What readiness says of problems is called so, or ends so."""
_LOSSES = (
    (table.REQUESTS, "calls were refused"),
    (table.DECODED_SPANS, "spans were left out"),
    (table.MESSAGES, "messages were left out"),
    (table.DROPPED_ROWS, "intervals gave no row"),
    (table.ROWS, "rows were not learned from"),
)
_KEPT = {table.ACCEPTED, RowOutcome.LEARNED, PullOutcome.READ, RowDrop.IDLE, RowDrop.KNOWN_FROM_STEPS}
"""Outcomes and reasons that are no loss."""


class Counts:
    """What a sidecar's page counts, by metric and reason; of scrapes, those of counters."""

    def __init__(self, body: bytes) -> None:
        self._by_name: dict[str, Counter[str]] = defaultdict(Counter)
        families = text_string_to_metric_families(body.decode("utf-8", "replace"))
        try:
            for name, labels, value, *_ in chain.from_iterable(family.samples for family in families):
                if value > 0.0 and labels.get("of") != "discovery":
                    reason = labels.get("reason") or labels.get("outcome") or labels.get("version", "")
                    target = labels.get("target")
                    self._by_name[name][f"{reason} {target}" if target else reason] += int(value)
        except (ArithmeticError, LookupError, ValueError) as error:
            raise StartError(f"what answers is no page of metrics: {error}") from None

    def of(self, metric: table.Metric) -> Counter[str]:
        """By reason, or outcome, and the target of rows behind it; that of the build by version."""
        return self._by_name[metric.exposed_name]

    def losses_of(self, metric: table.Metric) -> Counter[str]:
        """The same without the outcomes that are no loss."""
        return Counter(
            {reason: number for reason, number in self.of(metric).items() if reason.partition(" ")[0] not in _KEPT}
        )

    def has_configurations(self) -> bool:
        """Whether anything is published."""
        return "tracefit_snapshot_configs" in self._by_name


class Finding(NamedTuple):
    """One line of the diagnosis; ``flags`` are typed by the user as they stand."""

    grade: str
    topic: str
    text: str
    flags: tuple[str, ...] = ()


def doctor(url: str, token: str | None) -> Report:
    """What was found, most urgent questions first; failed if anything is poor.

    Raises:
        StartError: nothing answers there, or what answers is neither a sidecar nor a server that is known.
    """
    if url and "://" not in url and (Path(url).exists() or Path(url).suffix == ".json"):
        raise StartError(f"{url} is a path, and doctor asks an address; its verdict: tracefit show {url}")
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/metrics")
    if not is_page_url(base):
        raise StartError(f"{base}/metrics is no address: http://HOST:PORT is")
    status, page = fetch(f"{base}/metrics", token)
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        raise StartError(f"{base}/metrics wants {'another' if token else 'a'} token: give --token-file FILE")
    if status != HTTPStatus.OK:
        raise StartError(f"{base}/metrics answers with {status}: no page of metrics; give http://HOST:PORT alone")
    if table.BUILD_INFO.exposed_name.encode() in page:
        findings = list(_examine_sidecar(base, page, token))
    else:
        findings = [_examine_server(base, page)]
    lines = []
    for each in findings:
        lines.append(f"{each.grade:<5} {each.topic:<10} {printable(each.text, TEXT_CHARS_MAX)}")
        lines += [f"{'':<17}{flag}" for flag in each.flags]
    code = EXIT_FAILED if any(each.grade == POOR for each in findings) else EXIT_OK
    return Report(code, lines, {"url": base, "findings": [each._asdict() for each in findings]})


def fetch(url: str, token: str | None) -> tuple[int, bytes]:
    """The status of a page and the page; no redirect is followed, and no proxy of the environment is asked.

    Raises:
        StartError: nothing answers, or not in time.
    """
    try:
        return asyncio.run(_fetch(url, {"Authorization": f"Bearer {token}"} if token else {}))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        why = getattr(error, "strerror", "no HTTP") or "not in time"
        raise StartError(f"nothing answers at {url}: {why}; {_PORTS}") from None


async def _fetch(url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
        session.get(url, headers=headers, allow_redirects=False) as answer,
    ):
        page = bytearray()
        async for part in answer.content.iter_any():
            page += part
            if len(page) > PAGE_BYTES_MAX:
                raise StartError(f"{url} is larger than {PAGE_BYTES_MAX >> 20} MiB, which no page of metrics is")
        return answer.status, bytes(page)


def _examine_server(base: str, body: bytes) -> Finding:
    """Whether the page of an inference server can be learned from."""
    readings = parse_page(body)
    if isinstance(readings, PageProblem):
        if readings.lacks:
            return Finding(POOR, "server", f"an engine that is known, but its page lacks {', '.join(readings.lacks)}")
        raise StartError(f"{base} is neither a sidecar nor a server that is known ({readings}); {_PORTS}")
    flavours = sorted({str(reading.flavour) for reading in readings})
    return Finding(
        GOOD,
        "server",
        f"{len(readings)} engine(s) of {', '.join(flavours)}: this page can be learned from as it is",
        (f"tracefit run --scrape {base}/metrics",),
    )


def _examine_sidecar(base: str, body: bytes, token: str | None) -> Iterator[Finding]:
    counts, (status, readyz) = Counts(body), fetch(f"{base}/readyz", token)
    try:
        detail = msgspec.json.decode(readyz, type=dict[str, Any])
    except msgspec.DecodeError:
        detail = {}
    nothing_yet = NOTHING_YET.for_port(detail.get("otlp_grpc_port", OTLP_PORT))
    problems = [f"{name}: {said}" for name, said in detail.items() if name.endswith(_PROBLEMS) and said]
    takes, version = status == HTTPStatus.OK and "refused" not in detail, ", ".join(counts.of(table.BUILD_INFO))
    sources = counts.of(table.FLEET_SOURCES)
    state = f"tracefit {version}, {'takes' if takes else 'refuses'} {'states' if sources else 'telemetry'}"
    yield Finding(POOR if not takes else FAIR if problems else GOOD, "running", "; ".join([state, *problems]))
    if sources:
        said = ", ".join(f"{number:,} {outcome}" for outcome, number in sources.items())
        yield Finding(GOOD if sources.keys() == {PullOutcome.MERGED} else FAIR, "pulling", f"sources of states: {said}")
    else:
        yield from _reception(counts, detail, nothing_yet)
    if pending := detail.get("pending"):
        yield Finding(FAIR, "pending", str(pending))
    try:
        snapshot = tracefit.load(base, token=token)
    except tracefit.LoadError as error:
        yield Finding(POOR, "learned", f"{error}{what_to_type(base, str(error))}")
        return
    if not snapshot.configs:
        yield _finding("learned", nothing_yet)
    configs_of: dict[Finding, list[tracefit.Config]] = defaultdict(list)
    for config in snapshot.configs:
        for finding in _configuration(config, snapshot.as_of_unix_nano, nothing_yet):
            configs_of[finding].append(config)
    for finding, configs in configs_of.items():
        names = ", ".join(f"{config.name} ({config.config_id})" for config in configs[:_NAMES_SHOWN])
        more = f" and {len(configs) - _NAMES_SHOWN} more" * (len(configs) > _NAMES_SHOWN)
        yield finding._replace(text=f"{names}{more}: {finding.text}")


def _reception(counts: Counts, detail: Mapping[str, Any], nothing_yet: Advice) -> Iterator[Finding]:
    """What came in, and what of it was refused, left out or lost."""
    spans, pages = counts.of(table.SPANS)[table.ACCEPTED], counts.of(table.SCRAPES)[PullOutcome.READ]
    messages, unanswered = counts.of(table.MESSAGES)[table.ACCEPTED], counts.losses_of(table.SCRAPES)
    received = spans + pages + messages > 0
    if received:
        said = f"{spans:,} spans, {pages:,} pages and {messages:,} messages since its start"
        yield Finding(GOOD, "receiving", said)
    elif counts.has_configurations():
        yield Finding(FAIR, "receiving", "nothing since its start; what it knows was learned before", nothing_yet.flags)
    elif not (unanswered or counts.losses_of(table.REQUESTS)):
        yield _finding("receiving", nothing_yet)
    if unanswered:
        asked = detail.get("scrape")
        of = f" of {', '.join(map(str, asked))}" if isinstance(asked, list) else ""
        why = f"{unanswered.total():,} pages{of} could not be used: {_reasons(unanswered)}"
        yield Finding(FAIR if received else POOR, "receiving", why)
    if refused := counts.of(table.LIMIT_EXCEEDED).total():
        yield Finding(POOR, "left out", f"{refused} engines or configurations have no place: raise engines_max")
    for metric, what in _LOSSES:
        lost = counts.losses_of(metric)
        if spans:  # every vLLM traces its own start, too
            del lost[Skip.UNKNOWN_SCOPE]
        if lost:
            header = ('OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20…"',) * (Outcome.UNAUTHENTICATED in lost)
            grade = FAIR if received else POOR
            yield Finding(grade, "left out", f"{lost.total():,} {what}: {_reasons(lost)}", header)
    if dropped := counts.of(table.SDK_DROPPED_EVENTS).total():
        text = f"{dropped:,} events were dropped by the SDK of the server, which holds 128 for each span by default:"
        yield Finding(FAIR, "left out", text, (EVENT_LIMIT,))


def _reasons(lost: Counter[str]) -> str:
    shown = []
    for reason, count in lost.most_common(_REASONS_SHOWN):
        word, _, target = reason.partition(" ")
        shown.append(f"{count:,} {f'of {target}: ' * bool(target)}{reason_text(word)}")
    return ", ".join([*shown, *(["…"] if len(lost) > _REASONS_SHOWN else [])])


def _configuration(config: tracefit.Config, now_unix_nano: int, nothing_yet: Advice) -> Iterator[Finding]:
    """What is to be said of it, without its name: what many share is said once."""
    verdict = config.verdict
    silent_since = verdict.silent_since(now_unix_nano)
    if silent_since:
        replaced = "; its server sends another configuration now" * verdict.replaced
        yield Finding(FAIR, "silent", f"since {tracefit.minute(silent_since)}{replaced}")
    if verdict.replaced:
        return  # nobody can mend it, and nothing waits for it
    yield _finding("telemetry", QUALITY.get(config.telemetry, nothing_yet))
    if not config.model:
        yield _finding("identity", UNKNOWN_MODEL)
    for clause in verdict.hidden:
        yield Finding(FAIR, "hidden", clause)
    said = "; ".join((verdict.state, *verdict.reasons))
    yield Finding(GOOD if verdict.usable else POOR, "usable", said)
    change = verdict.change
    if change is not None and change.is_recent(now_unix_nano):
        yield Finding(POOR if change.factor > 1.0 else FAIR, "speed", change.text(now_unix_nano))
    for odd in verdict.outliers:
        yield Finding(POOR if odd.ratio > 1.0 else FAIR, "speed", odd.text)


def _finding(topic: str, advice: Advice) -> Finding:
    return Finding(advice.level, topic, f"{advice.meaning} {advice.remedy}".strip(), advice.flags)
