"""The status page: one HTML document at ``/``, complete without JavaScript, alive with it.

Made from the newest snapshot, the verdict of the client on each configuration, the history of its steps, and our own
metrics. Functions here make small dictionaries and tuples; the templates beside this module lay them out and escape
whatever they are given. Every condition of a configuration is read from its verdict, and nowhere else.

No external assets, no build step; the content-security policy allows exactly the one style and the one script inside,
by hash, so that a model name can never become code. The script asks for the page again and swaps the parts that
changed. The what-if form asks the page itself, so that question and answer are one address.

Our own metrics are not listed by hand: a counter whose name has one of ``LOSSES``, or whose outcome is none of
``KEPT``, tells of a loss; the others are flow. How full each bound is, /metrics has.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import jinja2
from prometheus_client.registry import Collector

from exporters.config_view import STEP_TIME, Judged, PageView, View, config_view, overview_view, replica_ratio
from exporters.pages import Request, Response
from exporters.questions import (
    LOAD,
    PLAN,
    PREDICT,
    RATE,
    SIZED,
    STEP,
    TARGETS,
    Parameter,
    QuestionError,
    ask,
    duration,
    read_plan,
    read_prediction,
    read_query,
)
from exporters.what_if import Advisory, ClientView, identities_of
from exporters.wording import (
    FEATURE_NAMES,
    NOTHING_YET,
    OTLP_PORT,
    PLUGIN_REMEDIES,
    REASONS,
    SHARED_ID,
    STATUS,
    Z_95,
    Advice,
    age,
    coefficient,
    count,
    factor,
    name_of,
    percent,
    reason_text,
)
from online import HistoryView, Snapshot
from tracefit import TracefitError, Verdict, term_text, told_apart

LOSSES = ("refused", "failed", "skipped", "dropped", "evicted", "errors", "late", "lost", "rejected", "withheld")
KEPT = ("accepted", "learned", "taken", "done", "sent", "left_out")
"""Outcomes that are no loss."""
MAX_OVERVIEW = 200
"""Configurations that the page judges and lists; the others are in /snapshot."""
MAX_DETAILS = 6
"""More configurations than this are in the table only; their links open them one by one."""
MAX_NEWS = 6
MAX_SOURCES = 200
MAX_PARTS = 24
"""Reasons of a loss."""
CONFLICTS_MIN = 10
"""A process that is restarted again and again makes a few."""
_PREFIX = "tracefit_"
_PROBLEM = "_problem"
_MERGED = "merged"
_STEPLESS = ("requests", "metrics")

# ----------------------------------------------------------------- what the page is told


class PendingTelemetry(NamedTuple):
    """What some engines have sent that is not learned yet, and when (unix ns) all of it is if nothing more comes."""

    engines: int
    steps: int
    requests: int
    rows: int
    until_unix_ns: int

    @property
    def text(self) -> str:
        """One sentence."""
        parts = ((self.steps, "step"), (self.requests, "request"), (self.rows, "row"))
        held = ", ".join(f"{count(number)} {name}{'s' * (number != 1)}" for number, name in parts if number)
        engines = f"{count(self.engines)} engine{'s' * (self.engines != 1)}"
        until = dt.datetime.fromtimestamp(self.until_unix_ns // 10**9, dt.UTC)
        return (
            f"{held} of {engines} are pending: they are learned when their other half has come, "
            f"at the latest at {until:%H:%M:%S} UTC if nothing more comes."
        )


class Remarks(NamedTuple):
    """What the receiving side saw.

    ``conflicting_steps`` fit no process of their engine: several send as one, and nothing tells them apart.
    """

    foreign_scopes: tuple[str, ...] = ()
    plugin_losses: Mapping[str, float] = {}
    unbound_publishers: int = 0
    conflicting_steps: int = 0


class FleetSource(NamedTuple):
    """A source of states at the last pull."""

    name: str
    outcome: str
    detail: str = ""
    engines: tuple[str, ...] = ()
    rows: int = 0
    last_unix_nano: int = 0


# ----------------------------------------------------------------- the page

_TEMPLATES = Path(__file__).with_name("templates")
_STYLE = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
)
_ENVIRONMENT.filters |= {
    "coefficient": coefficient,
    "count": count,
    "duration": duration,
    "factor": factor,
    "percent": percent,
    "ratio": replica_ratio,
}
_ENVIRONMENT.globals |= {
    "FEATURE_NAMES": FEATURE_NAMES,
    "REASONS": REASONS,
    "STATUS": STATUS,
    "Z_95": Z_95,
    "term_text": term_text,
}


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_HEADERS = (
    (
        "Content-Security-Policy",
        (
            f"default-src 'none'; style-src {_csp_hash(_STYLE)}; script-src {_csp_hash(_SCRIPT)}; connect-src 'self'; "
            "base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
        ),
    ),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)


@dataclass
class StatusPage:
    """Renders ``/``.

    Attributes:
        source: returns the newest snapshot, or None before the first.
        own: registry with the process's own metrics.
        ready: (ok, detail) of the receivers.
        unix_nano: the clock, for ages only.
        advisory: verdicts, and what the coefficients say of the load of the last minutes.
        pending: what engines have sent that is not learned yet.
        remarks: what senders lose or send in vain.
        fleet: where the states were pulled from, if this is a fleet's page.
        history_of: last rows and coefficients of the last day of a configuration, as of the newest snapshot.
        version: shown in the header.
        otlp_port: where OTLP over gRPC is taken, for advice.
    """

    source: Callable[[], Snapshot | None]
    own: Collector
    _: KW_ONLY
    ready: Callable[[], tuple[bool, Mapping[str, object]]]
    unix_nano: Callable[[], int]
    advisory: Advisory | None = None
    pending: Callable[[], PendingTelemetry | None] = lambda: None
    remarks: Callable[[], Remarks] = Remarks
    fleet: Callable[[], Sequence[FleetSource]] = tuple
    history_of: Callable[[str], HistoryView | None] = lambda _: None
    version: str = ""
    otlp_port: Callable[[], int] = lambda: OTLP_PORT

    def __post_init__(self) -> None:
        """Its own advisory, if none is given."""
        self._advisory = self.advisory or Advisory(ClientView(self.source))
        self._started_unix_nano = self.unix_nano()
        self._template = _ENVIRONMENT.get_template("page.html.j2")

    def answer(self, request: Request) -> Response:
        """Serve the page; ``?config=ID`` shows one configuration in detail."""
        body = self._template.render(self._view(self.source(), request.query)).encode("utf-8", "replace")
        return Response(HTTPStatus.OK, "text/html; charset=utf-8", body, _HEADERS)

    def _view(self, snapshot: Snapshot | None, query: Mapping[str, str]) -> View:
        now, ready = self.unix_nano(), self.ready()
        judged = [] if snapshot is None else self._judged(snapshot)
        chosen = [each for each in judged if each.config.config_id == query.get("config")]
        opened = chosen or judged[:MAX_DETAILS]
        given: set[Advice] = set()
        page = PageView(self._started_unix_nano, self.otlp_port(), self.history_of)
        return {
            "style": _STYLE,
            "script": _SCRIPT,
            "version": self.version,
            "now": now,
            "since": lambda unix_nano: age((now - unix_nano) / 1e9),
            **_header_view(snapshot, judged, ready, now),
            "fleet": _fleet_view(self.fleet(), snapshot),
            "overview": overview_view(snapshot, judged, chosen) if snapshot is not None else None,
            "opened": [config_view(each, page, given) for each in opened],
            "what_if": _what_if_view(snapshot, self._advisory.view, judged, opened, query) if judged else None,
            "empty": None if judged else NOTHING_YET.for_port(self.otlp_port()),
            "asked": ready[1].get("scrape", ()),
            "pending": self.pending(),
            "remarks": list(remarks_of(self.remarks(), snapshot, self.otlp_port())),
            "accounting": _accounting_view(self.own),
        }

    def _judged(self, snapshot: Snapshot) -> list[Judged]:
        judged, apart = [], told_apart(identities_of(snapshot.configs))
        for config, words in zip(snapshot.configs[:MAX_OVERVIEW], apart, strict=False):
            try:
                load = self._advisory.of(snapshot, config)
                judged.append(Judged(config, load, load.config.verdict, words))
            except TracefitError as error:
                judged.append(Judged(config, None, Verdict(usable=False, reasons=(str(error),)), words))
        return sorted(judged, key=lambda each: each.rank(snapshot.created_unix_nano))


def _header_view(
    snapshot: Snapshot | None, judged: Sequence[Judged], ready: tuple[bool, Mapping[str, object]], now: int
) -> View:
    """The state beside the dot, what the process is troubled with, and what a person should hear first."""
    is_ready, detail = ready
    news = [
        (each.config.config_id, name_of(each.config), problem)
        for each in judged
        for problem in each.verdict.problems(now if snapshot is None else snapshot.created_unix_nano)
    ]
    news.sort(key=lambda item: not item[2].is_defect)
    noted = [(name.removesuffix(_PROBLEM), str(text)) for name, text in detail.items() if name.endswith(_PROBLEM)]
    problems = len(news) + len(noted)
    return {
        "ready": is_ready,
        "problems": problems,
        "noted": [("Configuration" if name == "config" else name.capitalize(), text) for name, text in noted],
        "news": news[:MAX_NEWS],
        "news_hidden": max(len(news) - MAX_NEWS, 0),
        "generation": None if snapshot is None else snapshot.generation,
        "created_unix_nano": 0 if snapshot is None else snapshot.created_unix_nano,
        "configs": 0 if snapshot is None else len(snapshot.configs),
    }


# ----------------------------------------------------------------- what if


class _Form(NamedTuple):
    """One question: its path, title and button, the parameters that are its inputs, and its switches."""

    path: str
    title: str
    button: str
    inputs: tuple[Parameter, ...]
    switches: tuple[Parameter, ...] = ()


_ASK = "ask"
_FORMS = {
    "plan": _Form("/plan", "How many requests fit?", "Plan", (*SIZED, *TARGETS[:2], RATE), TARGETS[2:]),
    "load": _Form("/predict", "What do requests see?", "Predict requests", LOAD),
    "step": _Form("/predict", "What does a step cost?", "Predict step", STEP),
}


def _what_if_view(
    snapshot: Snapshot | None,
    view: ClientView,
    judged: Sequence[Judged],
    opened: Sequence[Judged],
    query: Mapping[str, str],
) -> View:
    """The forms, filled with the question that was asked, else with today's load; and the answer."""
    asked = _FORMS.get(query.get(_ASK, ""))
    first = next((each for each in opened if each.verdict.usable), opened[0])
    usual = _usual_load(first) if asked is None else {}
    chosen = query.get("config", "") or first.config.config_id
    choices = [
        (each.config.config_id, f"{each.title} ({each.config.config_id})", each.config.config_id == chosen)
        for each in judged
    ]
    return {
        "forms": [(name, form, query if form is asked else usual) for name, form in _FORMS.items()],
        "choices": choices if len(choices) > 1 else [],
        "answer": None if asked is None or snapshot is None else _answer(asked, snapshot, view, query),
        "is_usual": bool(usual),
    }


def _usual_load(judged: Judged) -> dict[str, str]:
    """Today's load by the names of parameters, as far as it is known."""
    load, step = judged.load, judged.step
    usual: dict[str, float | None] = {}
    portable = None if step is None else step.models.get("portable")
    if portable is not None:
        means = {each.name: each.mean for each in portable.features}
        usual = {each.name: means.get(each.field) for each in STEP}
    texts = {name: f"{value:.4g}" for name, value in usual.items() if value is not None}
    if load is None or load.mix is None:
        return texts
    mix = load.mix
    of_mix = {"prompt": mix.prompt_tokens, "output": mix.output_tokens, "concurrency": max(mix.concurrency, 1.0)}
    if mix.prefix_hit and not load.config.prefix_hits_hidden:
        of_mix["prefix_hit"] = mix.prefix_hit
    texts |= {name: f"{value:.4g}" for name, value in of_mix.items()}
    return {**texts, "itl": f"{load.fits[0].itl_ms:g}ms"} if load.fits else texts


def _answer(form: _Form, snapshot: Snapshot, view: ClientView, query: Mapping[str, str]) -> View:
    wanted = {name: value for name, value in query.items() if name != _ASK}
    is_plan = form.path == "/plan"
    try:
        given = read_query(wanted, PLAN if is_plan else PREDICT)
        config = view.config(snapshot, given.get("config", ""))
        answer = ask(config, read_plan(given) if is_plan else read_prediction(given))
    except (QuestionError, TracefitError) as error:
        return {"error": str(error)}
    return {"error": "", "lines": [*answer.lines(), *answer.caveats()], "link": f"{form.path}?{urlencode(wanted)}"}


# ----------------------------------------------------------------- what comes in, and what is lost


def remarks_of(remarks: Remarks, snapshot: Snapshot | None, otlp_port: int = OTLP_PORT) -> Iterator[Advice]:
    """What senders lose or send in vain, and what would help."""
    for reason, lost in remarks.plugin_losses.items():
        if lost:
            remedy = PLUGIN_REMEDIES[reason].for_port(otlp_port)
            yield remedy._replace(meaning=f"{count(lost)} {remedy.meaning}.")
    if remarks.foreign_scopes:
        names = ", ".join(remarks.foreign_scopes)
        yield Advice("fair", f"Spans of these scopes tell nothing of steps or requests and are left out: {names}.")
    stepless = [] if snapshot is None else [each for each in snapshot.configs if each.telemetry in _STEPLESS]
    if remarks.unbound_publishers and stepless:
        yield Advice(
            "fair",
            f"{count(remarks.unbound_publishers)} KV publishers belong to no engine that is known: their events say "
            "something of steps, and this vLLM sends none. They are not used.",
            "Let the tracefit producer plugin (deploy/vllm-plugin) send steps over OTLP.",
        )
    if remarks.conflicting_steps >= CONFLICTS_MIN:
        yield SHARED_ID._replace(
            meaning=f"{count(remarks.conflicting_steps)} steps contradict others of the same service.instance.id: "
            "several processes seem to send under one, and neither process.pid nor host.name tells them apart."
        )


class _Flow(NamedTuple):
    """A counter: its total, and the parts that are not zero."""

    name: str
    help: str
    total: float
    parts: list[tuple[str, float]]


def _accounting_view(own: Collector) -> View:
    """Our own counters as losses and other flows."""
    lost: list[_Flow] = []
    flows: list[_Flow] = []
    for family in own.collect():
        name = family.name.removeprefix(_PREFIX)
        if family.type == "counter" and name != family.name:
            samples = [each for each in family.samples if each.name.endswith("_total") and each.value]
            losses = [each for each in samples if _is_loss(name, each.labels)]
            for into, these in ((lost, losses), (flows, [each for each in samples if each not in losses])):
                parts = [(", ".join(map(reason_text, s.labels.values())), s.value) for s in these if s.labels]
                if these:
                    total = sum(each.value for each in these)
                    into.append(_Flow(name, family.documentation, total, parts[:MAX_PARTS]))
    return {"lost": lost, "flows": flows}


def _is_loss(name: str, labels: Mapping[str, str]) -> bool:
    return any(word in LOSSES for word in name.split("_")) or labels.get("outcome", KEPT[0]) not in KEPT


def _fleet_view(sources: Sequence[FleetSource], snapshot: Snapshot | None) -> View | None:
    """Sources of states, those first that are not in the coefficients, then those that differ; None without any."""
    if not sources:
        return None
    steps = [config.targets.get(STEP_TIME) for config in (snapshot.configs if snapshot is not None else ())]
    replicas = {each.engine: each for step in steps if step is not None for each in step.replicas}
    rows = [(source, [replicas[each] for each in source.engines if each in replicas]) for source in sources]
    rows.sort(key=lambda row: (row[0].outcome == _MERGED, not any(each.differs for each in row[1]), row[0].name))
    missing = sum(source.outcome != _MERGED for source in sources)
    hidden = max(len(sources) - MAX_SOURCES, 0)
    return {"rows": rows[:MAX_SOURCES], "all": len(sources), "missing": missing, "hidden": hidden}
