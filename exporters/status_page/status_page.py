"""The status page: one HTML document at ``/``, complete without JavaScript, alive with it.

Drawn by the server from the newest snapshot, a small history, and our own metrics. No external assets, no build step;
the content-security policy allows exactly the one style and the one script inside, by hash, so that a model name can
never become code. The script asks for the page again and swaps the parts that changed.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from importlib import resources

from prometheus_client.registry import Collector

from exporters.client_view import ClientView
from exporters.pages import Request, Response
from online import ConfigSnapshot, Snapshot

from .accounting import accounting_section
from .advice import NOTHING_YET
from .fleet_section import FleetSource, fleet_section
from .history import History
from .remarks_section import Remarks, remarks_section
from .sections import config_facts, config_section, config_title
from .text import age, count, escape, percent
from .waiting_section import EngineWaiting, waiting_section
from .what_if import what_if_section

HTML = "text/html; charset=utf-8"
MAX_OVERVIEW = 200
MAX_DETAILS = 6
"""More configurations than this are in the overview only; their links open them one by one."""

_PROBLEM = "_problem"
_SUBJECTS = {"config": "Configuration"}
"""Of the problems that readiness tells; any other goes by its name."""

_STYLE = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
_SCRIPT = resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")


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
        version: str = "",
    ) -> None:
        self._source = source
        self.view = ClientView(source)
        self._own = own
        self._ready = ready
        self._unix_nano = unix_nano
        self._waiting = waiting
        self._remarks = remarks
        self._fleet = fleet
        self._version = version
        self._history = History()

    def record(self, snapshot: Snapshot) -> None:
        """Remember a generation; call it whenever one is published, so that the charts have no gaps."""
        self._history.record(snapshot)

    def answer(self, request: Request) -> Response:
        """Serve the page; ``?config=ID`` shows one configuration in detail."""
        snapshot = self._source()
        if snapshot is not None:
            self._history.record(snapshot)
        return Response(HTTPStatus.OK, HTML, self._page(snapshot, request.query).encode(), _HEADERS)

    def _page(self, snapshot: Snapshot | None, query: Mapping[str, str]) -> str:
        chosen = query.get("config")
        body = [self._header(snapshot), fleet_section(self._fleet(), snapshot, self._unix_nano())]
        waiting = self._waiting()
        if snapshot is None or not snapshot.configs:
            body.append(waiting_section(waiting, learned=False) or _empty())
        else:
            shown = [config for config in snapshot.configs if config.config_id == chosen] if chosen else []
            body.append(_overview(snapshot, chosen if shown else None))
            body += [config_section(config, self._history) for config in (shown or snapshot.configs[:MAX_DETAILS])]
            body.append(what_if_section(snapshot, self.view, query))
            body.append(waiting_section(waiting, learned=True))
        body.append(remarks_section(self._remarks(), snapshot))
        body.append(accounting_section(self._own))
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><title>tracefit</title>'
            '<noscript><meta http-equiv="refresh" content="15"></noscript>'
            f"<style>{_STYLE}</style></head><body>"
            '<a class="skip" href="#main">Skip to the coefficients</a>'
            f'{body[0]}<main id="main">{"".join(body[1:])}</main>{_footer()}'
            '<p id="connection" role="status" class="sr"></p>'
            f"<script>{_SCRIPT}</script></body></html>"
        )

    def _header(self, snapshot: Snapshot | None) -> str:
        ready, detail = self._ready()
        state = '<span class="state ok">ready</span>' if ready else '<span class="state bad">not ready</span>'
        words = [state]
        if snapshot is not None:
            seconds = (self._unix_nano() - snapshot.created_unix_nano) / 1e9
            rows = sum(_rows(config) for config in snapshot.configs)
            plural = "configuration" if len(snapshot.configs) == 1 else "configurations"
            words += [
                f"<span>{len(snapshot.configs)} {plural}</span>",
                f"<span>{count(rows)} rows learned</span>",
                f"<span>generation {snapshot.generation}, {age(seconds)} old</span>",
            ]
        version = f' <span class="version">{escape(self._version)}</span>' if self._version else ""
        problems = [(name.removesuffix(_PROBLEM), text) for name, text in detail.items() if name.endswith(_PROBLEM)]
        noted = "".join(
            f'<p class="states" role="status">{escape(_SUBJECTS.get(name, name.capitalize()))}: {escape(str(text))}</p>'
            for name, text in problems
        )
        return (
            f'<header class="page" id="page-header" data-live><p class="brand">tracefit{version}</p>'
            "<h1>Latency coefficients, learned live from vLLM’s traces</h1>"
            f'<p class="states">{" ".join(words)}</p>{noted}</header>'
        )


def _rows(config: ConfigSnapshot) -> int:
    return sum(max((model.rows for model in target.models.values()), default=0) for target in config.targets.values())


def _overview(snapshot: Snapshot, chosen: str | None) -> str:
    if len(snapshot.configs) == 1:
        return ""
    rows = "".join(_overview_row(config, chosen) for config in snapshot.configs[:MAX_OVERVIEW])
    hidden = len(snapshot.configs) - MAX_OVERVIEW
    more = f'<p class="quiet">{hidden} more in <a href="/snapshot">/snapshot</a>.</p>' if hidden > 0 else ""
    back = '<p><a href="/">All configurations</a></p>' if chosen else ""
    return (
        '<section id="overview" aria-labelledby="overview-title" data-live><h2 id="overview-title">Configurations</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="overview-title"><table class="overview">'
        '<thead><tr><th scope="col">model</th><th scope="col">facts</th><th scope="col">telemetry</th>'
        '<th scope="col" class="num">rows</th><th scope="col" class="num">step error</th><th scope="col">id</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>{more}{back}</section>"
    )


def _overview_row(config: ConfigSnapshot, chosen: str | None) -> str:
    step = config.targets.get("step_time")
    model = step.models.get(step.champion) if step is not None else None
    error = "–" if model is None or model.error is None else percent(model.error.median_ape)
    name = escape(config.config_id)
    current = ' aria-current="true"' if config.config_id == chosen else ""
    return (
        f'<tr{current}><th scope="row"><a href="/?config={name}">{escape(config_title(config))}</a></th>'
        f"<td>{escape(config_facts(config))}</td><td>{escape(config.telemetry)}</td>"
        f'<td class="num">{count(_rows(config))}</td><td class="num">{error}</td><td><code>{name}</code></td></tr>'
    )


def _empty() -> str:
    flags = " ".join(f"<code>{escape(flag)}</code>" for flag in NOTHING_YET.flags)
    return (
        '<section id="empty" class="config" data-live><h2>Waiting for telemetry</h2>'
        f"<p>Nothing has been learned yet. {escape(NOTHING_YET.remedy)} {flags}</p></section>"
    )


def _footer() -> str:
    pages = ("/metrics", "/snapshot", "/healthz", "/readyz")
    links = " ".join(f'<a href="{page}">{page}</a>' for page in pages)
    return f'<footer><nav aria-label="Pages for machines">{links}</nav></footer>'
