"""Planes with axes as inline SVG: it shows without script, style comes from classes alone, colour never means alone.

Each chart says in words what it shows (``role="img"`` with a label). Whatever the numbers, nothing leaves its frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .text import escape

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

    def line_down(self, x: float, css: str) -> str:
        """A vertical line."""
        at, bottom = self.at_x(x), self.height - _BOTTOM
        return f'<line class="{css}" x1="{at:.1f}" y1="{_TOP:g}" x2="{at:.1f}" y2="{bottom:g}"/>'

    def marks(self, marks: Sequence[tuple[float, str]], css: str) -> str:
        """Vertical lines, and words above those where there is room."""
        out, free_from = "", 0.0
        for x, text in marks:
            half = _DIGIT * len(text)
            middle = min(max(self.at_x(x), _LEFT + half), WIDTH - _RIGHT - half)
            out += self.line_down(x, css)
            if text and middle - half > free_from:
                free_from = middle + half
                at = f'x="{middle:.1f}" y="{_TOP - 6:g}" text-anchor="middle"'
                out += f'<text class="mark" {at}>{escape(text)}</text>'
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

    def figure(self, css: str, label: str, body: str) -> str:
        """The whole."""
        return svg(WIDTH, self.height, css, label, body)


def _share(value: float, limits: tuple[float, float], scale: Scale) -> float:
    low, high = scale(limits[0]), scale(limits[1])
    return min(max((scale(value) - low) / max(high - low, 1e-12), 0.0), 1.0)
