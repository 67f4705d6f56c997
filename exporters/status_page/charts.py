"""Inline SVG, drawn by the server: it shows with JavaScript off, and style comes from classes only (see the CSP).

Every chart says in words what it shows (``role="img"`` with a label); colour never carries a meaning alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .history import ErrorHistory
from .text import escape, percent

_NICE = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0)
CHART_WIDTH = 480.0
Z_95 = 1.96


def _svg(width: float, height: float, css: str, label: str, body: str) -> str:
    return f'<svg class="{css}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>'


def nice_limit(largest: float) -> float:
    """The smallest round half-width of an axis that holds a value."""
    return next((limit for limit in _NICE if largest <= limit), _NICE[-1])


def whisker(relative_stderr: float | None, relative_live: float | None, limit: float) -> str:
    """Uncertainty of a coefficient relative to itself: bar = 95 %, diamond = the live value.

    Args:
        relative_stderr: standard error divided by the coefficient.
        relative_live: live coefficient divided by the coefficient, minus 1.
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
    if relative_live is not None:
        x = at(relative_live)
        body += f'<path class="live" d="M{x:.1f} 4.5 l5.5 5.5 l-5.5 5.5 l-5.5 -5.5 z"/>'
        words.append(f"live value {percent(relative_live)} away")
    return _svg(width, 20, "whisker", "; ".join(words) or "uncertainty unknown", body)


def error_chart(course: ErrorHistory) -> str:
    """Error over time: line = median, area = up to the 90th percentile, dashed = a confirmed change of speed."""
    width, height, left, bottom = CHART_WIDTH, 190.0, 44.0, 22.0
    points = course.points
    if len(points) < 2:  # noqa: PLR2004 - a line has two ends
        return '<p class="quiet">The course of the error appears after a few generations.</p>'
    start, end = points[0].unix_nano, points[-1].unix_nano
    top = nice_limit(max(point.p90_ape for point in points))

    def x(unix_nano: int) -> float:
        return left + (unix_nano - start) / (end - start) * (width - left - 8)

    def y(ratio: float) -> float:
        return 8 + (1 - min(1.0, ratio / top)) * (height - bottom - 8)

    body = ""
    for share in (0.0, 0.5, 1.0):
        level = y(share * top)
        body += f'<line class="grid" x1="{left}" y1="{level:.1f}" x2="{width - 8}" y2="{level:.1f}"/>'
        body += f'<text class="tick" x="{left - 6}" y="{level + 4:.1f}" text-anchor="end">{percent(share * top)}</text>'
    area = [f"{x(p.unix_nano):.1f},{y(p.p90_ape):.1f}" for p in points]
    line = [f"{x(p.unix_nano):.1f},{y(p.median_ape):.1f}" for p in points]
    body += f'<polygon class="band" points="{" ".join([*area, *reversed(line)])}"/>'
    body += f'<polyline class="line" points="{" ".join(line)}"/>'
    shown = [drift for drift in course.drifts if start <= drift.unix_nano <= end]
    for drift in shown:
        at = x(drift.unix_nano)
        gain = "" if drift.gain is None else f"×{drift.gain:.2f}"
        anchor = "end" if at > width - 60 else "start"
        shift = -5 if anchor == "end" else 5
        body += f'<line class="drift" x1="{at:.1f}" y1="4" x2="{at:.1f}" y2="{height - bottom}"/>'
        body += f'<text class="drift-label" x="{at + shift:.1f}" y="14" text-anchor="{anchor}">{gain}</text>'
    minutes = (end - start) / 60e9
    span = f"{minutes:.0f} min ago" if minutes >= 2 else f"{minutes * 60:.0f} s ago"  # noqa: PLR2004
    body += f'<text class="tick" x="{left}" y="{height - 5}">{span}</text>'
    body += f'<text class="tick" x="{width - 8}" y="{height - 5}" text-anchor="end">now</text>'
    now = points[-1]
    label = (
        f"Error over time: now median {percent(now.median_ape)}, 90th percentile {percent(now.p90_ape)}; "
        f"{len(shown)} changes of speed"
    )
    return _svg(width, height, "error-chart", label, body)


def calibration_chart(rows: Sequence[tuple[str, tuple[float, float, float]]]) -> str:
    """Observed divided by predicted, per operating point: band = 10th to 90th percentile, dot = median."""
    width, label_width, step = CHART_WIDTH, 104.0, 24.0
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
    return _svg(width, height, "calibration", f"Observed divided by predicted: {words}", body)


def meter(size: float, capacity: float, label: str) -> str:
    """How full something is."""
    share = max(0.0, min(1.0, size / capacity)) if capacity > 0 else 0.0
    full = "meter full" if share >= 0.8 else "meter"  # noqa: PLR2004 - where an alert would fire
    body = '<rect class="track" x="0" y="0" width="160" height="10" rx="5"/>'
    if share:
        body += f'<rect class="fill" x="0" y="0" width="{max(4.0, 160 * share):.1f}" height="10" rx="5"/>'
    return _svg(160, 10, full, f"{label}: {percent(share)} full", body)
