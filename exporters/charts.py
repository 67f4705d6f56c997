"""What the pictures of a configuration show, in coordinates that ``templates/charts.html.j2`` draws as SVG.

A step's time by its parts, predicted against observed times, and each coefficient's course over a day.
Each picture says in words what it shows; nothing leaves its frame, whatever the numbers; colour never means alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from exporters.questions import significant
from exporters.wording import FEATURE_NAMES, FEATURE_PLURALS, Z_95, age, coefficient
from online import FeatureSnapshot, HistoryView, ModelSnapshot, TargetSnapshot

WIDTH = 360.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 22.0, 38.0
"""Margins of a figure, for the ticks of the axes."""
_SQUARE, _FLAT = 230.0, 170.0

NEAR = 0.1
"""The 10 % that people ask for."""
_RARE = 12
"""One in twelve values at each end may lie beyond the axis."""
_READABLE = 0.02
"""Room beside the values, in parts of the largest."""
_TINY = 1e-9
_PARTS_MAX = 5
"""Parts of a step with a colour of their own."""
_REST = "beyond the coefficients: batch shape, stalls"

Points = Sequence[tuple[float, float]]


class Figure(NamedTuple):
    """A plane with ticks at values of its axes, and what is drawn on it, in units of the picture."""

    caption: str
    note: str
    label: str
    plane: Plane
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    x_name: str = ""
    band: Points = ()
    line: Points = ()
    diagonal: Points = ()
    dots: str = ""


class Plane(NamedTuple):
    """From values to places: limits of both axes, their scale, and the height of the figure."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float
    scale: Callable[[float], float] = float

    def at_x(self, value: float) -> float:
        """Where a value stands from the left; beyond a limit, at its edge."""
        return _LEFT + self._share(value, self.x) * (WIDTH - _LEFT - _RIGHT)

    def at_y(self, value: float) -> float:
        """Where a value stands from the top; beyond a limit, at its edge."""
        return _TOP + (1.0 - self._share(value, self.y)) * (self.height - _TOP - _BOTTOM)

    def path(self, points: Points) -> str:
        """Corners of a line."""
        return " ".join(f"{self.at_x(x):.1f},{self.at_y(y):.1f}" for x, y in points)

    def _share(self, value: float, limits: tuple[float, float]) -> float:
        low, high = self.scale(limits[0]), self.scale(limits[1])
        return min(max((self.scale(value) - low) / max(high - low, 1e-12), 0.0), 1.0)


def _logarithmic(value: float) -> float:
    return math.log(max(value, _TINY))


def _ticks(values: Sequence[float], unit: str = "us") -> list[tuple[float, str]]:
    """Of an axis, each in its own unit: more digits have no room."""
    return [(value, coefficient(value, unit).partition("/")[0]) for value in values]


class Part(NamedTuple):
    """One part of a step's time, where it begins and how wide it is."""

    name: str
    us: float
    share: float
    left: float
    width: float


def step_shares(target: TargetSnapshot, model: ModelSnapshot) -> list[Part]:
    """Where the time of a typical step goes: coefficients times the mean of their features; empty if not known."""
    means = [1.0 if feature.name == "intercept" else feature.mean for feature in model.features]
    if None in means or len(means) < 2:  # noqa: PLR2004 - parts of a whole
        return []
    work = [(feature, mean) for feature, mean in zip(model.features, means, strict=True) if mean is not None]
    sizes = [(_of_mean(feature.name, mean), feature.coefficient * mean) for feature, mean in work]
    shown = sorted(sizes[:_PARTS_MAX], key=lambda part: -part[1])
    whole_us = sum(us for _, us in shown)
    if target.mean_us is not None and target.mean_us > whole_us:
        shown.append((_REST, target.mean_us - whole_us))
        whole_us = target.mean_us
    parts, left = [], 0.0
    for name, us in shown if whole_us > 0 else ():
        width = 1000.0 * us / whole_us
        parts.append(Part(name, us, us / whole_us, round(left, 1), round(max(width - 2.0, 0.0), 1)))
        left += width
    return parts


def _of_mean(name: str, mean: float) -> str:
    if name == "intercept" or not mean:
        return FEATURE_NAMES.get(name, name)
    return f"{significant(mean)} {FEATURE_PLURALS.get(name, f'× {name}')}"


def scatter(history: HistoryView | None) -> Figure | None:
    """Predicted against observed times of the last rows, logarithmic; on the diagonal is right. None without rows."""
    rows = () if history is None else zip(history.observed_us, history.predicted_us, strict=True)
    pairs = [(o, p) for o, p in rows if o > 0 and p > 0]
    if not pairs:
        return None
    values = [value for pair in pairs for value in pair]
    limits = (min(values) * 0.9, max(values) * 1.1)
    plane = Plane(limits, limits, _SQUARE, _logarithmic)
    ticks = _ticks((limits[0], math.sqrt(limits[0] * limits[1]), limits[1]))
    near = sum(abs(p / o - 1) <= NEAR for o, p in pairs) / len(pairs)
    places = dict.fromkeys((round(plane.at_x(o)), round(plane.at_y(p))) for o, p in pairs)
    return Figure(
        "Predicted against observed",
        f"last {len(pairs)} rows, before learning; predicted upwards, right on the dotted line",
        f"Predicted against observed time of {len(pairs)} steps: {near:.0%} within 10 %",
        plane,
        ticks,
        ticks,
        f"observed: {near:.0%} within 10 %",
        diagonal=[(limit, limit) for limit in limits],
        dots="".join(f"M{x} {y}h0" for x, y in places),
    )


def courses(model: ModelSnapshot, history: HistoryView | None) -> list[Figure]:
    """Each coefficient over the last day. Empty before there are two points."""
    if history is None or len(history.at_ns) < 2:  # noqa: PLR2004 - of a line
        return []
    at_s = [at_ns / 1e9 for at_ns in history.at_ns]
    told = zip(history.coefficients, history.stderrs, strict=True)
    points = {
        name: list(zip(at_s, values, (Z_95 * stderr for stderr in stderrs), strict=True))
        for name, (values, stderrs) in zip(history.features, told, strict=True)
    }
    return [_course(feature, points[feature.name]) for feature in model.features if feature.name in points]


def _course(feature: FeatureSnapshot, points: Sequence[tuple[float, float, float]]) -> Figure:
    """Of a coefficient at some seconds, within ± 95 %.

    The axis holds the values but the rarest, and the last interval; what is beyond is drawn at the edge.
    """
    name, unit, values = FEATURE_NAMES.get(feature.name, feature.name), feature.unit, [value for _, value, _ in points]
    usual = sorted(values)[len(values) // _RARE : -(len(values) // _RARE) or None]
    half = points[-1][2]
    low, high = min(*usual, values[-1]) - half, max(*usual, values[-1]) + half
    slack = max(_READABLE * high, _TINY)
    bottom, top = max(low - slack, 0.0), high + slack
    plane = Plane((points[0][0], points[-1][0]), (bottom, top), _FLAT)
    span = age(plane.x[1] - plane.x[0])
    first, last = (coefficient(value, unit) for value in (values[0], values[-1]))
    upper = [(at_s, value + half) for at_s, value, half in points]
    return Figure(
        name,
        f"now {coefficient(feature.coefficient, unit)}",
        f"{name} over the last {span}: from {first} to {last}",
        plane,
        [(plane.x[0], f"{span} ago"), (plane.x[1], "now")],
        _ticks((bottom, (bottom + top) / 2.0, top), unit),
        band=[*upper, *((at_s, value - half) for at_s, value, half in reversed(points))],
        line=[(at_s, value) for at_s, value, _ in points],
    )
