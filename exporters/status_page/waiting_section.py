"""What engines hold that is not in the coefficients yet, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from exporters.wording import age, count, escape

MAX_SHOWN = 12

REASONS: dict[str, str] = {
    "context": "whether journeys will come, which tell the decode context",
    "scheduling": "end stamps, which tell how the engine schedules",
    "first_steps": "more steps: the first ones of an engine process wait for each other",
    "next_steps": "more steps: rows of a few are made with those of the next ones",
    "journeys": "requests that have not ended, or whose spans have not come",
    "late_spans": "steps without a summary, which may still come",
    "kv_events": "KV events, which come later than their steps",
    "requests": "requests that may overlap, or their API spans",
    "turn": "rows of other engines that may end before",
}


class EngineWaiting(NamedTuple):
    """One engine; ``reason`` of the first that waits, ``silent_s`` since anything was heard of it."""

    engine: str
    steps: int
    requests: int
    rows: int
    reason: str
    silent_s: float


def waiting_section(waiting: Sequence[EngineWaiting], *, learned: bool) -> str:
    """The section of the page; empty when nothing waits. ``learned``: coefficients stand above."""
    if not waiting:
        return ""
    shown = sorted(waiting, key=lambda one: -(one.steps + one.requests + one.rows))[:MAX_SHOWN]
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(one.engine)}</code></th><td class="num">{count(one.steps)}</td>'
        f'<td class="num">{count(one.requests)}</td><td class="num">{count(one.rows)}</td>'
        f'<td>{escape(REASONS.get(one.reason, one.reason))}</td><td class="num">{age(one.silent_s)}</td></tr>'
        for one in shown
    )
    heads = "".join(f'<th scope="col" class="num">{head}</th>' for head in ("steps", "requests", "rows"))
    hidden = len(waiting) - len(shown)
    more = f'<p class="quiet">{hidden} more engines.</p>' if hidden else ""
    title = "Not learned from yet" if learned else "Telemetry arrives, and none of it is complete yet"
    return (
        f'<section id="waiting" aria-labelledby="waiting-title" data-live><h2 id="waiting-title">{title}</h2>'
        '<p class="quiet">What waits is published when it is complete, or when nothing has been heard of its engine '
        "for join.grace_s.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Engines that wait"><table class="flows">'
        f'<thead><tr><th scope="col">engine</th>{heads}<th scope="col">waits for</th>'
        f'<th scope="col" class="num">silent</th></tr></thead><tbody>{rows}</tbody></table></div>{more}</section>'
    )
