"""Charts over time: the error, and coefficients with their error bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .svg import Plane, Tick, nice_limit, round_ticks
from .text import age, coefficient, compact, percent, round_duration

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


def error_course(points: Sequence[ErrorPoint], marks: Sequence[Mark], ends: tuple[str, str], name: str = "") -> str:
    """Error over time: line = median, area = up to the 90th percentile, dashed = what happened."""
    if len(points) < 2:  # noqa: PLR2004 - a line has two ends
        return '<p class="quiet">The course of the error appears after a few blocks of rows.</p>'
    highest = sorted(point.p90_ape for point in points)[int(_CALM * (len(points) - 1))]
    plane = Plane((points[0].at_s, points[-1].at_s), (0.0, nice_limit(highest)))
    y_ticks = [(share * plane.y[1], percent(share * plane.y[1])) for share in (0.0, 0.5, 1.0)]
    upper, lower = [(p.at_s, p.p90_ape) for p in points], [(p.at_s, p.median_ape) for p in points]
    body = plane.frame(_ends(plane, ends), y_ticks, name)
    body += f'<polygon class="band" points="{plane.path([*upper, *reversed(lower)])}"/>'
    body += f'<polyline class="line" points="{plane.path(lower)}"/>{plane.marks(_inside(plane, marks), "drift")}'
    now = points[-1]
    label = (
        f"Error over time: last median {percent(now.median_ape)}, last 90th percentile {percent(now.p90_ape)}; "
        f"{_in_words(plane, marks)}"
    )
    return plane.figure("chart", label, body)


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
    body += f'<polyline class="line" points="{line}"/>{plane.marks(_inside(plane, marks), "drift")}'
    first, last = (coefficient(value, unit) for value in (values[0], values[-1]))
    label = f"{name} over the last {age(plane.x[1] - plane.x[0])}: from {first} to {last}; {_in_words(plane, marks)}"
    return plane.figure("chart", label, body)


def _round_coefficient(value: float, unit: str) -> str:
    return round_duration(value) if unit.startswith("us") and unit != "us/us" else compact(value)


def _ends(plane: Plane, texts: tuple[str, str]) -> list[Tick]:
    return [(at, text) for at, text in zip(plane.x, texts, strict=True) if text]


def _inside(plane: Plane, marks: Sequence[Mark]) -> list[Mark]:
    return [mark for mark in marks if plane.x[0] <= mark.at_s <= plane.x[1]]


def _drawn(plane: Plane, marks: Sequence[Mark]) -> str:
    return plane.marks(_inside(plane, marks), "drift")


def _in_words(plane: Plane, marks: Sequence[Mark]) -> str:
    inside = _inside(plane, marks)
    return ", ".join(mark.text for mark in inside[-4:]) if inside else "nothing happened meanwhile"
