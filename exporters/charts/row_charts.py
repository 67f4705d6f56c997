"""Charts of single rows: predicted against observed, and how far off over a feature."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .svg import Plane, decade_ticks, from_zero, linear, logarithmic, nice_limit, round_ticks
from .text import compact, percent, round_duration

NEAR = 0.1
"""The 10 % that people ask for."""
_DECADES = 60.0
_FAR = 0.97
_RUNS = 8
_FEW = 3


def scatter(observed_us: Sequence[float], predicted_us: Sequence[float]) -> str:
    """Predicted against observed times, logarithmic; on the diagonal is right."""
    pairs = [(o, p) for o, p in zip(observed_us, predicted_us, strict=True) if o > 0 and p > 0]
    if not pairs:
        return '<p class="quiet">No predictions yet.</p>'
    values = [value for pair in pairs for value in pair]
    limits = (min(values) * 0.9, max(values) * 1.1)
    plane = Plane(limits, limits, logarithmic, logarithmic)
    wide = limits[1] > 4.0 * limits[0]
    ticks = (decade_ticks if wide else round_ticks)(*limits, round_duration)
    near = sum(abs(p / o - 1) <= NEAR for o, p in pairs) / len(pairs)
    body = plane.frame(ticks, ticks, f"observed: {near:.0%} within 10 %")
    body += f'<polyline class="zero" points="{plane.path([(limit, limit) for limit in limits])}"/>'
    label = f"Predicted against observed time of {len(pairs)} steps: {near:.0%} within 10 %"
    return plane.figure("chart", label, body + plane.dots(pairs))


def residuals(name: str, values: Sequence[float], observed_us: Sequence[float], predicted_us: Sequence[float]) -> str:
    """How far off each row is, over one of its features; the line is the median of each eighth of the rows."""
    rows = zip(values, observed_us, predicted_us, strict=True)
    points = sorted((value, observed / predicted - 1.0) for value, observed, predicted in rows if predicted > 0)
    if not points:
        return '<p class="quiet">No predictions yet.</p>'
    off = sorted(abs(error) for _, error in points)
    limit = nice_limit(off[int(_FAR * (len(off) - 1))])
    low, high = points[0][0], points[-1][0]
    scale = from_zero if high > _DECADES * max(low, 1.0) else linear
    plane = Plane((low, max(high, low + 1.0)), (-limit, limit), scale)
    y_ticks = [(share * limit, f"{'+' if share > 0 else ''}{percent(share * limit)}") for share in (-1.0, 0.0, 1.0)]
    ticks = _count_ticks(low, high) if scale is from_zero else round_ticks(low, max(high, low + 1.0), compact)
    course = _medians(points)
    body = plane.frame(ticks, y_ticks, name) + plane.line_across(0.0) + plane.dots(points)
    if len(course) > 1:
        body += f'<polyline class="line" points="{plane.path(course)}"/>'
    worst = max(course, key=lambda point: abs(point[1]))
    label = f"Observed against predicted time over {name}: furthest off at {compact(worst[0])}, by {percent(worst[1])}"
    return plane.figure("chart", label, body)


def _count_ticks(low: float, high: float) -> list[tuple[float, str]]:
    first = [(0.0, "0")] if low <= 0.0 else []
    ticks = decade_ticks(max(low, 1.0), high, compact)
    far = [tick for tick in ticks if from_zero(tick[0]) > from_zero(low) + 0.15 * (from_zero(high) - from_zero(low))]
    return first + (far if first else ticks)


def _medians(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of runs of rows in the order of the feature; rows of one value stay together."""
    length = max(_FEW, len(points) // _RUNS)
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if not runs or (len(runs[-1]) >= length and runs[-1][-1][0] != point[0]):
            runs.append([])
        runs[-1].append(point)
    return [
        (statistics.fmean(x for x, _ in run), statistics.median(error for _, error in run))
        for run in runs
        if len(run) >= _FEW
    ] or [(points[0][0], points[0][1])]
