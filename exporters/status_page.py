"""The status page: one HTML document at ``/``, complete without JavaScript, alive with it.

Drawn by the server from the newest snapshot, the history of each configuration, and our own metrics. No external
assets, no build step; the content-security policy allows exactly the one style and the one script inside, by hash, so
that a model name can never become code. The script asks for the page again and swaps the parts that changed.

The accounting lists nothing by hand: a gauge whose name has ``capacity`` and its twin with ``size`` are a meter; a
counter whose name has one of ``LOSSES`` is a way of losing something; other counters are flow. A fleet's page shows
every source of states, and every engine against its siblings.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from exporters.advice import NOTHING_YET, OTLP_PORT, EngineWaiting, Remarks, remarks_section, waiting_section
from exporters.client_view import ClientView
from exporters.config_section import choose, config_section, learned_rows, overview, told_apart_of
from exporters.routing import Request, Response
from exporters.step_charts import Seen
from exporters.what_if_form import what_if_section
from exporters.wording import age, count, escape, name_of, newest_change, percent
from online import ConfigSnapshot, HistoryView, Snapshot

PREFIX = "tracefit_"
LOSSES = ("refused", "failed", "skipped", "dropped", "evicted", "errors", "late", "lost", "rejected", "withheld")


class Flow(NamedTuple):
    """A counter family: its total, and the parts that are not zero."""

    name: str
    help: str
    total: float
    parts: tuple[tuple[str, float], ...]


class Meter(NamedTuple):
    """How full one bounded thing is."""

    name: str
    help: str
    size: float
    capacity: float


class Accounting(NamedTuple):
    """Everything the page shows of our own metrics."""

    meters: tuple[Meter, ...]
    flows: tuple[Flow, ...]
    losses: tuple[Flow, ...]


def account(own: Collector) -> Accounting:
    """Sort our own metrics into meters, flows and losses."""
    families = [family for family in own.collect() if family.name.startswith(PREFIX)]
    gauges = {family.name: family for family in families if family.type == "gauge"}
    flows = [_flow(family) for family in families if family.type == "counter"]
    return Accounting(
        tuple(_meters(gauges)),
        tuple(flow for flow in flows if not _is_loss(flow.name)),
        tuple(flow for flow in flows if _is_loss(flow.name)),
    )


def _is_loss(name: str) -> bool:
    return any(word in LOSSES for word in name.split("_"))


def _flow(family: Metric) -> Flow:
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    parts = tuple((_labels(sample), sample.value) for sample in samples if sample.labels and sample.value)
    return Flow(family.name, family.documentation, sum(sample.value for sample in samples), parts)


def _labels(sample: Sample) -> str:
    return ", ".join(sample.labels.values())


def _meters(gauges: dict[str, Metric]) -> Iterable[Meter]:
    for name, family in sorted(gauges.items()):
        twin = gauges.get(name.replace("capacity", "size"))
        if "capacity" in name and twin is not None:
            yield Meter(twin.name, twin.documentation, _value(twin), _value(family))


def _value(family: Metric) -> float:
    return sum(sample.value for sample in family.samples)


def accounting_section(own: Collector) -> str:
    """The section of the page."""
    sums = account(own)
    lost = [flow for flow in sums.losses if flow.total]
    quiet = [flow for flow in sums.losses if not flow.total]
    verdict = "Nothing was lost or left out." if not lost else "Some telemetry was left out; each reason is counted."
    parts = [
        '<section id="accounting" aria-labelledby="accounting-title" data-live>',
        '<h2 id="accounting-title">Queue and losses</h2>',
        f'<p class="verdict {"some" if lost else "none"}">{verdict}</p>',
        _meter_table(sums.meters),
        _flow_table("Left out", lost),
        _flow_table("Flow", [flow for flow in sums.flows if flow.total]),
    ]
    if quiet:
        names = "".join(f"<li><code>{escape(flow.name)}</code> {escape(flow.help)}</li>" for flow in quiet)
        parts.append(
            f'<details id="accounting-zero"><summary>{len(quiet)} kinds of loss that did not happen</summary>'
            f"<ul>{names}</ul></details>"
        )
    parts.append("</section>")
    return "".join(parts)


def _meter_table(meters: Iterable[Meter]) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(m.name.removeprefix(PREFIX))}</code></th>'
        f'<td class="num">{count(m.size)}</td><td>{percent(m.size / m.capacity if m.capacity else 0.0)}</td>'
        f'<td class="quiet">of {count(m.capacity)}. {escape(m.help)}</td></tr>'
        for m in meters
    )
    return f'<table class="flows"><caption>Bounds</caption><tbody>{rows}</tbody></table>' if rows else ""


def _flow_table(caption: str, flows: Iterable[Flow]) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(flow.name.removeprefix(PREFIX))}</code></th>'
        f'<td class="num">{count(flow.total)}</td><td>{_parts(flow)}</td>'
        f'<td class="quiet">{escape(flow.help)}</td></tr>'
        for flow in flows
    )
    return f'<table class="flows"><caption>{caption}</caption><tbody>{rows}</tbody></table>' if rows else ""


def _parts(flow: Flow) -> str:
    return " ".join(f'<span class="part">{escape(name)} {count(value)}</span>' for name, value in flow.parts[:24])


MAX_SOURCES = 200
_MERGED = "merged"


class FleetSource(NamedTuple):
    """A source of states at the last pull."""

    name: str
    outcome: str
    detail: str = ""
    engines: tuple[str, ...] = ()
    rows: int = 0
    last_unix_nano: int = 0


def fleet_section(sources: Sequence[FleetSource], snapshot: Snapshot | None, now_unix_nano: int) -> str:
    """The table of sources, those first that are not in the coefficients; empty without any."""
    if not sources:
        return ""
    odd = _odd_engines(snapshot)
    ordered = sorted(sources, key=lambda s: (s.outcome == _MERGED, not any(e in odd for e in s.engines), s.name))
    rows = "".join(_row(source, odd, now_unix_nano) for source in ordered[:MAX_SOURCES])
    missing = sum(source.outcome != _MERGED for source in sources)
    verdict = f"{missing} not in the coefficients" if missing else "all in the coefficients"
    hidden = len(sources) - MAX_SOURCES
    more = f'<p class="quiet">{hidden} more sources.</p>' if hidden > 0 else ""
    return (
        '<section id="fleet" aria-labelledby="fleet-title" data-live><h2 id="fleet-title">Fleet</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of sources"><table class="overview">'
        f"<caption>{len(sources)} sources: {verdict}</caption>"
        '<thead><tr><th scope="col">source</th><th scope="col">last pull</th><th scope="col">engines</th>'
        '<th scope="col" class="num">time ÷ the others’</th><th scope="col" class="num">rows</th>'
        f'<th scope="col" class="num">newest row</th></tr></thead><tbody>{rows}</tbody></table></div>{more}</section>'
    )


def _odd_engines(snapshot: Snapshot | None) -> dict[str, str]:
    """What is said of each engine that differs."""
    odd = {}
    for config in snapshot.configs if snapshot is not None else ():
        step = config.targets.get("step_time")
        for replica in step.replicas if step is not None else ():
            if replica.differs and replica.ratio is not None:
                odd[replica.engine] = f"×{replica.ratio:.3f}"
    return odd


def _row(source: FleetSource, odd: dict[str, str], now_unix_nano: int) -> str:
    engines = ", ".join(escape(engine) for engine in source.engines[:3])
    if len(source.engines) > 3:  # noqa: PLR2004 -- a pod has one or two
        engines += f" and {len(source.engines) - 3} more"
    speeds = ", ".join(odd[engine] for engine in source.engines if engine in odd)
    mark = ' <span class="champion">differs</span>' if speeds else ""
    outcome = escape(source.outcome) if not source.detail else f"{escape(source.outcome)}: {escape(source.detail)}"
    newest = age((now_unix_nano - source.last_unix_nano) / 1e9) if source.last_unix_nano else "–"
    return (
        f'<tr><th scope="row">{escape(source.name)}{mark}</th><td>{outcome}</td><td>{engines or "–"}</td>'
        f'<td class="num">{speeds or "–"}</td><td class="num">{count(source.rows)}</td>'
        f'<td class="num">{newest}</td></tr>'
    )


HTML = "text/html; charset=utf-8"
_PROBLEM = "_problem"
NEWS_MAX = 6
"""So many pieces of news stand at the top; of the others there is the number."""
_SUBJECTS = {"config": "Configuration"}
"""Of the problems that readiness tells; any other goes by its name."""

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_POLICY = (
    f"default-src 'none'; style-src {_csp_hash(_STYLE)}; script-src {_csp_hash(_SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)


class StatusPage:
    """Renders ``/``.

    Args:
        source: returns the newest snapshot, or None before the first.
        own: registry with the process's own metrics.
        ready: (ok, detail) of the receivers.
        unix_nano: the clock, for ages only.
        waiting: what engines hold that is not learned yet.
        remarks: what senders lose or send in vain.
        fleet: where the states were pulled from, if this is a fleet's page.
        otlp_port: where OTLP over gRPC is taken, for advice.
        history_of: last rows and coefficients of the last day of a configuration, as of the newest snapshot.
        version: shown in the header.

    Attributes:
        view: answers the what-if form; /predict and /plan may share it.
    """

    def __init__(
        self,
        source: Callable[[], Snapshot | None],
        own: Collector,
        *,
        ready: Callable[[], tuple[bool, Mapping[str, object]]],
        unix_nano: Callable[[], int],
        waiting: Callable[[], Sequence[EngineWaiting]] = tuple,
        remarks: Callable[[], Remarks] = Remarks,
        fleet: Callable[[], Sequence[FleetSource]] = tuple,
        history_of: Callable[[str], HistoryView | None] = lambda _: None,
        version: str = "",
        otlp_port: Callable[[], int] = lambda: OTLP_PORT,
    ) -> None:
        self._source = source
        self.view = ClientView(source)
        self._own = own
        self._ready = ready
        self._unix_nano = unix_nano
        self._waiting = waiting
        self._remarks = remarks
        self._fleet = fleet
        self._history_of = history_of
        self._started_unix_nano = unix_nano()
        self._version = version
        self._otlp_port = otlp_port

    def answer(self, request: Request) -> Response:
        """Serve the page; ``?config=ID`` shows one configuration in detail."""
        return Response(HTTPStatus.OK, HTML, self._page(self._source(), request.query).encode(), _HEADERS)

    def _page(self, snapshot: Snapshot | None, query: Mapping[str, str]) -> str:
        body = [self._header(snapshot), fleet_section(self._fleet(), snapshot, self._unix_nano())]
        waiting = self._waiting()
        if snapshot is None or not snapshot.configs:
            body.append(waiting_section(waiting, learned=False) or _empty(self._otlp_port()))
        else:
            chosen, opened = choose(snapshot.configs, query)
            body.append(overview(snapshot.configs, chosen))
            body += [config_section(self._seen(each), apart) for each, apart in told_apart_of(snapshot.configs, opened)]
            body.append(waiting_section(waiting, learned=True))
            body.append(what_if_section(snapshot, self.view, query))
        body.append(remarks_section(self._remarks(), snapshot, self._otlp_port()))
        body.append(accounting_section(self._own))
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><title>tracefit</title>'
            f"<style>{_STYLE}</style></head><body>"
            '<a class="skip" href="#main">Skip to the coefficients</a>'
            f'{body[0]}<main id="main">{"".join(body[1:])}</main>{_footer()}'
            '<p id="connection" role="status" class="sr"></p>'
            f"<script>{_SCRIPT}</script></body></html>"
        )

    def _seen(self, config: ConfigSnapshot) -> Seen:
        return Seen(config, self._history_of(config.config_id), self._started_unix_nano, self._otlp_port())

    def _header(self, snapshot: Snapshot | None) -> str:
        ready, detail = self._ready()
        news = [] if snapshot is None else list(_news(snapshot))
        problems = [(name.removesuffix(_PROBLEM), text) for name, text in detail.items() if name.endswith(_PROBLEM)]
        words = [_state(len(news) + len(problems) if ready else None)]
        if snapshot is not None:
            seconds = (self._unix_nano() - snapshot.created_unix_nano) / 1e9
            rows = sum(learned_rows(config) for config in snapshot.configs)
            plural = "configuration" if len(snapshot.configs) == 1 else "configurations"
            words += [
                f"<span>{len(snapshot.configs)} {plural}</span>",
                f"<span>{count(rows)} rows learned</span>",
                f"<span>generation {snapshot.generation}, {age(seconds)} old</span>",
            ]
        version = f' <span class="version">{escape(self._version)}</span>' if self._version else ""
        noted = "".join(
            f'<p class="states" role="status">{escape(_SUBJECTS.get(name, name.capitalize()))}: {escape(str(text))}</p>'
            for name, text in problems
        )
        return (
            f'<header class="page" id="page-header" data-live><p class="brand">tracefit{version}</p>'
            "<h1>Latency coefficients, learned live from vLLM’s traces</h1>"
            f'<p class="states">{" ".join(words)}</p>{noted}{_banner(news)}</header>'
        )


def _state(problems: int | None) -> str:
    """The dot: green only where there is nothing to look at. None: not ready."""
    if problems is None:
        return '<span class="state bad">not ready</span>'
    if not problems:
        return '<span class="state ok">ready</span>'
    return f'<span class="state fair">ready, {count(problems)} {"problem" if problems == 1 else "problems"}</span>'


def _news(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """What a person should hear first, with the id of the configuration: what ended, what is in doubt, what changed."""
    for config in snapshot.configs:
        name, change = name_of(config), newest_change(config)
        if config.quarantined:
            yield config.config_id, f"{name}: put aside, its learner failed"
        for doubt in config.doubts:
            yield config.config_id, f"{name}: not usable: {doubt}"
        if change is not None and change.is_news(snapshot.created_unix_nano):
            yield config.config_id, f"{name}: {change.text(snapshot.created_unix_nano)}"


def _banner(news: Sequence[tuple[str, str]]) -> str:
    lines = "".join(
        f'<p><a href="?config={escape(config_id)}">{escape(text)}</a></p>' for config_id, text in news[:NEWS_MAX]
    )
    more = f"<p>{count(len(news) - NEWS_MAX)} more</p>" if len(news) > NEWS_MAX else ""
    return f'<div class="quality poor" id="news" role="status">{lines}{more}</div>' if news else ""


def _empty(otlp_port: int) -> str:
    flags = " ".join(f"<code>{escape(flag)}</code>" for flag in NOTHING_YET.for_port(otlp_port).flags)
    return (
        '<section id="empty" class="config" data-live><h2>Waiting for telemetry</h2>'
        f"<p>Nothing has been learned yet. {escape(NOTHING_YET.remedy)} {flags}</p></section>"
    )


def _footer() -> str:
    pages = ("/metrics", "/snapshot", "/healthz", "/readyz")
    links = " ".join(f'<a href="{page}">{page}</a>' for page in pages)
    return f'<footer><nav aria-label="Pages for machines">{links}</nav></footer>'
