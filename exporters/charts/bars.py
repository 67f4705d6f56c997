"""Charts of bars: how sure, how far apart, how full, and which part of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .courses import Z_95
from .svg import WIDTH, nice_limit, svg
from .text import escape, percent

_SHARES_WIDTH = 1000.0


def whisker(relative_stderr: float | None, limit: float) -> str:
    """Uncertainty of a coefficient relative to itself: the bar is its 95 % interval.

    Args:
        relative_stderr: standard error divided by the coefficient.
        limit: half-width of the axis, as a ratio.
    """
    width, middle = 200.0, 10.0

    def at(ratio: float) -> float:
        return width / 2 + max(-1.0, min(1.0, ratio / limit)) * (width / 2 - 8)

    body = f'<line class="axis" x1="8" y1="{middle}" x2="{width - 8}" y2="{middle}"/>'
    body += f'<line class="zero" x1="{width / 2}" y1="3" x2="{width / 2}" y2="17"/>'
    words = []
    if relative_stderr is not None:
        reach = Z_95 * relative_stderr
        left, right = at(-reach), at(reach)
        body += f'<line class="bar" x1="{left:.1f}" y1="{middle}" x2="{right:.1f}" y2="{middle}"/>'
        body += "".join(f'<line class="cap" x1="{x:.1f}" y1="6" x2="{x:.1f}" y2="14"/>' for x in (left, right))
        words.append(f"95 % interval plus or minus {percent(reach)}")
    body += f'<circle class="dot" cx="{width / 2}" cy="{middle}" r="3.5"/>'
    return svg(width, 20, "whisker", "; ".join(words) or "uncertainty unknown", body)


def calibration_chart(rows: Sequence[tuple[str, tuple[float, float, float]]]) -> str:
    """Observed divided by predicted, per operating point: band = 10th to 90th percentile, dot = median."""
    width, label_width, step = WIDTH, 96.0, 22.0
    height = step * len(rows) + 26
    far = max((abs(math.log(q)) for _, band in rows for q in band if q > 0), default=0.02)
    limit = math.log(1 + nice_limit(math.expm1(min(far, 2.0))))  # beyond, the band ends at the edge

    def x(ratio: float) -> float:
        share = max(-1.0, min(1.0, math.log(max(ratio, 1e-9)) / limit))
        return label_width + (1 + share) / 2 * (width - label_width - 24) + 8

    body = f'<line class="zero" x1="{x(1):.1f}" y1="2" x2="{x(1):.1f}" y2="{height - 20:.1f}"/>'
    for row, (name, (low, middle, high)) in enumerate(rows):
        y = step * row + 13
        body += f'<text class="row-label" x="{label_width - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>'
        wide = max(2.0, x(high) - x(low))
        body += f'<rect class="band" x="{x(low):.1f}" y="{y - 6}" width="{wide:.1f}" height="12" rx="6"/>'
        body += f'<circle class="dot" cx="{x(middle):.1f}" cy="{y}" r="4"/>'
    for ratio in (math.exp(-limit), 1.0, math.exp(limit)):
        at = f'x="{x(ratio):.1f}" y="{height - 5}" text-anchor="middle"'
        body += f'<text class="tick" {at}>{ratio:.2f}</text>'
    words = ", ".join(f"{name} {low:.2f} to {high:.2f}" for name, (low, _, high) in rows)
    return svg(width, height, "calibration", f"Observed divided by predicted: {words}", body)


def meter(size: float, capacity: float, label: str) -> str:
    """How full something is."""
    share = max(0.0, min(1.0, size / capacity)) if capacity > 0 else 0.0
    full = "meter full" if share >= 0.8 else "meter"  # noqa: PLR2004 - where an alert would fire
    body = '<rect class="track" x="0" y="0" width="160" height="10" rx="5"/>'
    if share:
        body += f'<rect class="fill" x="0" y="0" width="{max(4.0, 160 * share):.1f}" height="10" rx="5"/>'
    return svg(160, 10, full, f"{label}: {percent(share)} full", body)


def shares(parts: Sequence[tuple[str, float]]) -> str:
    """Parts of a whole side by side, in the order in which a list beside it has them."""
    whole = sum(size for _, size in parts) or 1.0
    body, left = "", 0.0
    for number, (_, size) in enumerate(parts):
        width = _SHARES_WIDTH * size / whole
        body += f'<rect class="series-{number}" x="{left:.1f}" y="0" width="{max(width - 2, 0):.1f}" height="26"/>'
        left += width
    words = ", ".join(f"{name} {percent(size / whole)}" for name, size in parts)
    drawn = svg(_SHARES_WIDTH, 26, "shares", words, body)
    return drawn.replace("<svg ", '<svg preserveAspectRatio="none" ', 1)
