"""The fleet view: every engine against its siblings, and what became of every source of states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from exporters.wording import age, count, escape
from online import Snapshot

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
