"""Charts as inline SVG: they show without script, style comes from classes alone, colour never means alone.

Each chart says in words what it shows (``role="img"`` with a label). Whatever the numbers, nothing leaves its frame.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from exporters.wording import age, coefficient, compact, escape, percent, round_duration

WIDTH, HEIGHT = 360.0, 230.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 22.0, 38.0
_EDGE, _DIGIT = 20.0, 3.7
_NICE = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 5.0)
_TINY = 1e-9

Tick = tuple[float, str]
Scale = Callable[[float], float]


def svg(width: float, height: float, css: str, label: str, body: str) -> str:
    """A picture with its description."""
    return f'<svg class="{css}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>'


def nice_limit(largest: float) -> float:
    """The smallest round limit of an axis of ratios that holds a value; the last one for any larger."""
    return next((limit for limit in _NICE if largest <= limit), _NICE[-1])


def linear(value: float) -> float:
    """As it is."""
    return value


def logarithmic(value: float) -> float:
    """For values over several decades, none of them 0."""
    return math.log(max(value, _TINY))


def from_zero(value: float) -> float:
    """For counts over several decades, with 0."""
    return math.log1p(max(value, 0.0))


def round_ticks(low: float, high: float, text: Callable[[float], str], fewest: int = 3) -> list[Tick]:
    """Round values between two: as few as there can be, but so many."""
    span = high - low
    if not (math.isfinite(span) and span > 0.0):
        return [(low, text(low))]
    decade = 10.0 ** math.floor(math.log10(span))
    for share in (5.0, 2.0, 1.0, 0.5, 0.2, 0.1):
        step = decade * share
        values = range(math.ceil(low / step - _TINY), math.floor(high / step + _TINY) + 1)
        if len(values) >= fewest:
            break
    return [(i * step, text(i * step)) for i in values]


def decade_ticks(low: float, high: float, text: Callable[[float], str], most: int = 4) -> list[Tick]:
    """1, 2 and 5 of each decade between two positive values, thinned to so many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    inside = [value for value in values if low <= value <= high]
    return [(value, text(value)) for value in inside[:: max(1, -(-len(inside) // most))]]


class Plane(NamedTuple):
    """A figure's plane between two corners.

    Attributes:
        x, y: limits in units of what is drawn.
        x_scale, y_scale: to where a value stands.
        height: of the figure.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    x_scale: Scale = linear
    y_scale: Scale = linear
    height: float = HEIGHT

    def at_x(self, value: float) -> float:
        """Where a value stands from the left; beyond a limit, at its edge."""
        return _LEFT + _share(value, self.x, self.x_scale) * (WIDTH - _LEFT - _RIGHT)

    def at_y(self, value: float) -> float:
        """Where a value stands from the top; beyond a limit, at its edge."""
        return _TOP + (1.0 - _share(value, self.y, self.y_scale)) * (self.height - _TOP - _BOTTOM)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """Corners of a line."""
        return " ".join(f"{self.at_x(x):.1f},{self.at_y(y):.1f}" for x, y in points)

    def dots(self, points: Sequence[tuple[float, float]]) -> str:
        """All points as one path, so that five hundred weigh a few kilobytes."""
        places = dict.fromkeys((round(self.at_x(x)), round(self.at_y(y))) for x, y in points)
        return f'<path class="dots" d="{"".join(f"M{x} {y}h0" for x, y in places)}"/>'

    def line_across(self, y: float) -> str:
        """A horizontal line to compare with."""
        at = self.at_y(y)
        return f'<line class="zero" x1="{_LEFT:g}" y1="{at:.1f}" x2="{WIDTH - _RIGHT:g}" y2="{at:.1f}"/>'

    def marks(self, marks: Sequence[tuple[float, str]]) -> str:
        """Vertical lines, and words above those where there is room."""
        out, free_from = "", 0.0
        for x, text in marks:
            half = _DIGIT * len(text)
            middle = min(max(self.at_x(x), _LEFT + half), WIDTH - _RIGHT - half)
            at, bottom = self.at_x(x), self.height - _BOTTOM
            out += f'<line class="drift" x1="{at:.1f}" y1="{_TOP:g}" x2="{at:.1f}" y2="{bottom:g}"/>'
            if text and middle - half > free_from:
                free_from = middle + half
                place = f'x="{middle:.1f}" y="{_TOP - 6:g}" text-anchor="middle"'
                out += f'<text class="mark" {place}>{escape(text)}</text>'
        return out

    def frame(self, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], x_name: str) -> str:
        """Grid, ticks and the name of the horizontal axis; that of the vertical one stands in the caption."""
        bottom = self.height - _BOTTOM
        out = ""
        for value, text in y_ticks:
            y = self.at_y(value)
            out += f'<line class="grid" x1="{_LEFT:g}" y1="{y:.1f}" x2="{WIDTH - _RIGHT:g}" y2="{y:.1f}"/>'
            out += f'<text class="tick" x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        for value, text in x_ticks:
            x = self.at_x(value)
            anchor = "end" if x > WIDTH - _RIGHT - _EDGE else "start" if x < _LEFT + _EDGE / 4 else "middle"
            out += f'<text class="tick" x="{x:.1f}" y="{bottom + 15:g}" text-anchor="{anchor}">{escape(text)}</text>'
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        name = f'<text class="name" x="{middle:g}" y="{self.height - 6:g}" text-anchor="middle">{escape(x_name)}</text>'
        return out + (name if x_name else "")

    def figure(self, label: str, body: str) -> str:
        """The whole."""
        return svg(WIDTH, self.height, "chart", label, body)


def _share(value: float, limits: tuple[float, float], scale: Scale) -> float:
    low, high = scale(limits[0]), scale(limits[1])
    return min(max((scale(value) - low) / max(high - low, 1e-12), 0.0), 1.0)


Z_95 = 1.96
_CALM = 0.95
_HEIGHT = 170.0
_SLACK = 0.06
_READABLE = 0.02
_RARE = 12


class Mark(NamedTuple):
    """Something that happened: when, and a word for it."""

    at_s: float
    text: str


class ErrorPoint(NamedTuple):
    """Error of predictions at one time, as ratios."""

    at_s: float
    median_ape: float
    p90_ape: float


class ValuePoint(NamedTuple):
    """A coefficient at one time."""

    at_s: float
    value: float
    stderr: float | None


def error_course(points: Sequence[ErrorPoint], marks: Sequence[Mark], ends: tuple[str, str]) -> str:
    """Error over time: line = median, area = up to the 90th percentile, dashed = what happened."""
    if len(points) < 2:  # noqa: PLR2004 - a line has two ends
        return '<p class="quiet">The course of the error appears after a few blocks of rows.</p>'
    highest = sorted(point.p90_ape for point in points)[int(_CALM * (len(points) - 1))]
    plane = Plane((points[0].at_s, points[-1].at_s), (0.0, nice_limit(highest)))
    y_ticks = [(share * plane.y[1], percent(share * plane.y[1])) for share in (0.0, 0.5, 1.0)]
    upper, lower = [(p.at_s, p.p90_ape) for p in points], [(p.at_s, p.median_ape) for p in points]
    body = plane.frame(_ends(plane, ends), y_ticks, "")
    body += f'<polygon class="band" points="{plane.path([*upper, *reversed(lower)])}"/>'
    body += f'<polyline class="line" points="{plane.path(lower)}"/>{plane.marks(_inside(plane, marks))}'
    now = points[-1]
    label = (
        f"Error over time: last median {percent(now.median_ape)}, last 90th percentile {percent(now.p90_ape)}; "
        f"{_in_words(plane, marks)}"
    )
    return plane.figure(label, body)


def coefficient_course(name: str, unit: str, points: Sequence[ValuePoint], marks: Sequence[Mark]) -> str:
    """A coefficient over time: line = value, area = 95 % interval, dashed = what happened.

    The axis holds the values but the rarest, and half of the intervals; what is beyond is drawn at the edge.
    """
    if len(points) < 2:  # noqa: PLR2004
        return '<p class="quiet">The course appears after a few blocks of rows.</p>'
    values = [point.value for point in points]
    usual = sorted(values)[len(values) // _RARE : -(len(values) // _RARE) or None]
    bars = sorted(Z_95 * point.stderr for point in points if point.stderr is not None)
    reach = bars[len(bars) // 2] if bars else 0.0
    low, high = min(*usual, values[-1]) - reach, max(*usual, values[-1]) + reach
    slack = max(_SLACK * (high - low), _READABLE * max(abs(high), abs(low)), 1e-9)
    bottom = max(low - slack, 0.0) if usual[0] >= 0.0 else low - slack
    plane = Plane((points[0].at_s, points[-1].at_s), (bottom, high + slack), height=_HEIGHT)
    y_ticks = round_ticks(*plane.y, lambda value: _round_coefficient(value, unit))
    ago = (f"{age(points[-1].at_s - points[0].at_s)} ago", "now")
    body = plane.frame(_ends(plane, ago), y_ticks, "")
    known = [point for point in points if point.stderr is not None]
    upper = [(p.at_s, p.value + Z_95 * (p.stderr or 0.0)) for p in known]
    lower = [(p.at_s, p.value - Z_95 * (p.stderr or 0.0)) for p in reversed(known)]
    if known:
        body += f'<polygon class="band" points="{plane.path([*upper, *lower])}"/>'
    line = plane.path([(p.at_s, p.value) for p in points])
    body += f'<polyline class="line" points="{line}"/>{plane.marks(_inside(plane, marks))}'
    first, last = (coefficient(value, unit) for value in (values[0], values[-1]))
    label = f"{name} over the last {age(plane.x[1] - plane.x[0])}: from {first} to {last}; {_in_words(plane, marks)}"
    return plane.figure(label, body)


def _round_coefficient(value: float, unit: str) -> str:
    return round_duration(value) if unit.startswith("us") and unit != "us/us" else compact(value)


def _ends(plane: Plane, texts: tuple[str, str]) -> list[Tick]:
    return [(at, text) for at, text in zip(plane.x, texts, strict=True) if text]


def _inside(plane: Plane, marks: Sequence[Mark]) -> list[Mark]:
    return [mark for mark in marks if plane.x[0] <= mark.at_s <= plane.x[1]]


def _in_words(plane: Plane, marks: Sequence[Mark]) -> str:
    inside = _inside(plane, marks)
    return ", ".join(mark.text for mark in inside[-4:]) if inside else "nothing happened meanwhile"


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
    return plane.figure(label, body + plane.dots(pairs))


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
    return plane.figure(label, body)


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
