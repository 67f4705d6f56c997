"""The status page: one HTML document at ``/``, complete without JavaScript, alive with it.

Functions here make small dictionaries and tuples of the newest snapshot and our own metrics; the templates beside this
module lay them out and escape them. Every condition of a configuration is read from its verdict, and nowhere else.

The content-security policy allows exactly the one style and the one script inside, by hash, so that a model name can
never become code. The script asks for the page again and swaps the parts that changed. The what-if form asks the page
itself, so that question and answer are one address.

A counter whose name has one of ``LOSSES``, or whose outcome is none of ``NO_LOSSES``, is a loss, but for the reasons
among these; the others are flow.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import jinja2
from prometheus_client.registry import Collector

from exporters import wording
from exporters.config_view import ConfigVerdict, View, config_view
from exporters.pages import Probe, Request, Response, Routes, make_routes, not_found
from exporters.questions import LOAD, RATE, SIZED, STEP, TARGETS, answer_query, duration, plain
from exporters.what_if import Advisory, identities_of, meant_config
from exporters.wording import OTLP_PORT, STEP_TIME, Advice, count
from online import HistoryView, ReplicaSnapshot, Snapshot
from tracefit import NotFoundError, Problem, TracefitError, distinctions, term_text

LOSSES = ("failed", "dropped")
NO_LOSSES = ("accepted", "learned", "read", "done", "sent", "left_out", "unknown_scope", "idle", "known_from_steps")
"""Outcomes and reasons that are no loss.

Of unknown scopes are the spans of other programs, and of every vLLM's start. An idle engine has no step that could be
missing.
"""
MAX_OVERVIEW = 200
"""Configurations that the page judges and lists; the others are in /snapshot."""
MAX_DETAILS = 6
"""More configurations than this are in the table only; their links open them one by one."""
_PREFIX = "tracefit_"
_PROBLEM = "_problem"

# ----------------------------------------------------------------- what the page is made of


class FleetSource(NamedTuple):
    """A source of states at the last pull."""

    name: str
    outcome: str
    detail: str
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
_ENVIRONMENT.filters |= {each.__name__: each for each in (wording.coefficient, count, duration, wording.percent)}
_ENVIRONMENT.globals |= {"wording": wording, "term_text": term_text}


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


@dataclass
class StatusPage:
    """Renders ``/``.

    Attributes:
        source: returns the newest snapshot, or None before the first.
        own: registry with the process's own metrics.
        ready: (ok, detail) of the receivers.
        unix_nano: the clock, for ages only.
        advisory: verdicts, and what the coefficients say of the load of the last minute.
        pending: what engines have sent that is not learned yet, in a sentence; empty while nothing is.
        fleet: where the states were pulled from, if this is a fleet's page.
        history_of: last rows and coefficients of the last day of a configuration, as of the newest snapshot.
        version: shown in the header.
        otlp_port: where OTLP over gRPC is taken, for advice.
    """

    source: Callable[[], Snapshot | None]
    own: Collector
    _: KW_ONLY
    ready: Probe
    unix_nano: Callable[[], int]
    advisory: Advisory = field(default_factory=Advisory)
    pending: Callable[[], str] = lambda: ""
    fleet: Callable[[], Sequence[FleetSource]] = tuple
    history_of: Callable[[str], HistoryView | None] = lambda _: None
    version: str = ""
    otlp_port: Callable[[], int] = lambda: OTLP_PORT

    def routes(self, alive: Probe, state: Callable[[], bytes | None] | None = None) -> Routes:
        """This page and those beside it; ``alive`` is of the process, and ``state`` what /state shows, if anything."""
        return make_routes(
            self.source,
            self.own,
            self.unix_nano,
            alive=alive,
            ready=self.ready,
            advisory=self.advisory,
            status_page=self.answer,
            state=state,
        )

    def answer(self, request: Request) -> Response:
        """Serve the page; ``?config=ID`` shows one configuration in detail, and is a 404 where there is none."""
        snapshot, which = self.source(), request.query.get("config", "")
        try:
            shown = meant_config(snapshot, which).config_id if snapshot is not None and which else ""
        except NotFoundError as error:
            return not_found(error)
        page = _ENVIRONMENT.get_template("page.html.j2").render(self._view(snapshot, request.query, shown))
        body = page.encode("utf-8", "replace")
        return Response(HTTPStatus.OK, "text/html; charset=utf-8", body, _HEADERS)

    def _view(self, snapshot: Snapshot | None, query: Mapping[str, str], shown: str) -> View:
        now, (ready, detail) = self.unix_nano(), self.ready()
        judged = [] if snapshot is None else self._judged(snapshot, now, shown)
        chosen = [each for each in judged if each.config.config_id == shown]
        opened = chosen or judged[:MAX_DETAILS]
        given: set[Advice] = set()
        otlp_port = self.otlp_port()
        return {
            "style": _STYLE,
            "script": _SCRIPT,
            "version": self.version,
            "now": now,
            "since": lambda unix_nano: wording.age((now - unix_nano) / 1e9),
            "ready": ready,
            "noted": _noted(detail),
            "news": [] if snapshot is None else _news(judged, now),
            "fleet": _fleet_view(self.fleet(), snapshot),
            "snapshot": snapshot,
            "judged": judged,
            "chosen": chosen,
            "opened": [config_view(each, given, otlp_port, self.history_of(each.config.config_id)) for each in opened],
            "what_if": None if snapshot is None else _what_if_view(snapshot, self.advisory, opened, query, now),
            "nothing_yet": wording.NOTHING_YET.for_port(otlp_port),
            "scraped": detail.get("scrape", ()),
            "pending": self.pending(),
            "accounting": _accounting_view(self.own),
        }

    def _judged(self, snapshot: Snapshot, now: int, shown: str) -> list[ConfigVerdict]:
        apart = distinctions(identities_of(snapshot.configs))
        judged = [
            ConfigVerdict(config, self.advisory.of(snapshot, config), words)
            for number, (config, words) in enumerate(zip(snapshot.configs, apart, strict=True))
            if number < MAX_OVERVIEW or config.config_id == shown
        ]
        return sorted(judged, key=lambda each: each.rank(now))


def _noted(detail: Mapping[str, object]) -> dict[str, str]:
    """What the process itself is troubled with, by what it is of."""
    noted = {name.removesuffix(_PROBLEM): str(text) for name, text in detail.items() if name.endswith(_PROBLEM)}
    return {"Configuration" if name == "config" else name.capitalize(): text for name, text in noted.items()}


def _news(judged: Sequence[ConfigVerdict], now: int) -> list[tuple[str, str, Problem]]:
    """What a person should hear first: id and name of a configuration, and its problem; defects before the others."""
    news = [(each.config.config_id, each.title, p) for each in judged for p in each.verdict.problems(now)]
    return sorted(news, key=lambda item: not item[2].is_defect)


# ----------------------------------------------------------------- what if


_ASK = "ask"
_FORMS = {"plan": (*SIZED, *TARGETS[:2], RATE, TARGETS[2]), "load": LOAD, "step": STEP}
"""Each question with the parameters that it has fields for."""


def _what_if_view(
    snapshot: Snapshot, advisory: Advisory, opened: Sequence[ConfigVerdict], query: Mapping[str, str], now: int
) -> View:
    """The forms, filled with the question that was asked, else with today's load; and the answer."""
    if not opened:
        return {}
    asked = query.get(_ASK, "")
    first = next((each for each in opened if each.verdict.usable), opened[0])
    usual = {} if asked in _FORMS else _usual_load(first)
    return {
        "forms": [(name, form, query if name == asked else usual) for name, form in _FORMS.items()],
        "chosen": query.get("config", "") or first.config.config_id,
        "answer": _answer(snapshot, advisory, query, now) if asked in _FORMS else None,
        "is_usual": "prompt" in usual,
    }


def _usual_load(judged: ConfigVerdict) -> dict[str, str]:
    """Today's load by the names of parameters, as far as it is known."""
    load, step = judged.load, judged.step
    portable = None if step is None else step.models.get("portable")
    means = {} if portable is None else {each.name: each.mean for each in portable.features}
    usual = {each.name: means.get(each.field) for each in STEP}
    if (mix := load.workload) is not None:
        usual |= {"prompt": mix.prompt_tokens, "output": mix.output_tokens, "concurrency": max(mix.concurrency, 1.0)}
        usual["prefix_hit"] = None if judged.config.prefix_hits_hidden else mix.prefix_hit or None
    texts = {name: plain(value) for name, value in usual.items() if value is not None}
    return {**texts, "itl": f"{load.fits[0].itl_ms:g}ms"} if load.fits else texts


def _answer(snapshot: Snapshot, advisory: Advisory, query: Mapping[str, str], now: int) -> View:
    wanted = {name: value for name, value in query.items() if value and name != _ASK}
    method = "plan" if query[_ASK] == "plan" else "predict"
    try:
        answer = answer_query(method, wanted, partial(advisory.meant, snapshot), now)
    except TracefitError as error:
        return {"error": str(error)}
    lines = [*answer.lines(), *answer.caveats()]
    return {"error": "", "lines": lines, "link": f"/{method}?{urlencode(wanted)}"}


# ----------------------------------------------------------------- what comes in, and what is lost


def _accounting_view(own: Collector) -> View:
    """Our own counters as losses and other flows: name, help, and the parts that are not zero."""
    view: dict[str, list[tuple[str, str, list[tuple[str, float]]]]] = {"lost": [], "flows": []}
    for family in own.collect():
        name = family.name.removeprefix(_PREFIX)
        if family.type == "counter" and name != family.name:
            counted = [each for each in family.samples if each.name.endswith("_total") and each.value]
            for kind, is_lost in (("lost", True), ("flows", False)):
                these = [each for each in counted if _is_loss(name, each.labels) == is_lost]
                if these:
                    parts = [(", ".join(map(wording.reason_text, each.labels.values())), each.value) for each in these]
                    view[kind].append((name, family.documentation, parts))
    return view


def _is_loss(name: str, labels: Mapping[str, str]) -> bool:
    if not set(labels.values()).isdisjoint(NO_LOSSES):
        return False
    return "outcome" in labels or any(word in LOSSES for word in name.split("_"))


def _fleet_view(
    sources: Sequence[FleetSource], snapshot: Snapshot | None
) -> list[tuple[FleetSource, list[ReplicaSnapshot]]]:
    """Sources of states with their engines: those first that are not in the coefficients, then those that differ."""
    steps = [config.targets.get(STEP_TIME) for config in (snapshot.configs if snapshot is not None else ())]
    replicas = {each.engine: each for step in steps if step is not None for each in step.replicas}
    rows = [(source, [replicas[each] for each in source.engines if each in replicas]) for source in sources]
    return sorted(
        rows, key=lambda row: (row[0].outcome == "merged", not any(each.differs for each in row[1]), row[0].name)
    )
