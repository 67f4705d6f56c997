"""Inline SVG of the report, drawn from data alone; style comes from the page's classes, colour never means alone.

Each plot is a figure of fixed size with a label in words for who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from exporters.status_page import duration, escape

from .protocol import HISTOGRAM_REACH, FittedCoefficient, Picture

_WIDTH, _HEIGHT = 320.0, 230.0
_LEFT, _BOTTOM, _TOP, _RIGHT = 46.0, 30.0, 10.0, 12.0
_EDGE = 12.0
Z_95 = 1.96
_ERROR_TOPS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def _figure(label: str, body: str, width: float = _WIDTH, height: float = _HEIGHT) -> str:
    words = escape(label)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{words}">{body}</svg>'


class _Axes:
    """Maps values to the plane of a figure, linear or logarithmic."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], *, log: bool = False) -> None:
        self._log = log
        self._x, self._y = (tuple(map(self._scale, limits)) for limits in (x, y))

    def _scale(self, value: float) -> float:
        return math.log(max(value, 1e-9)) if self._log else value

    def x(self, value: float) -> float:
        share = (self._scale(value) - self._x[0]) / max(self._x[1] - self._x[0], 1e-12)
        return _LEFT + min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (self._scale(value) - self._y[0]) / max(self._y[1] - self._y[0], 1e-12)
        return _TOP + (1.0 - min(max(share, 0.0), 1.0)) * (_HEIGHT - _TOP - _BOTTOM)

    def frame(self, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]) -> str:
        out = ""
        for value, text in y_ticks:
            y = self.y(value)
            out += f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
            out += f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
        for value, text in x_ticks:
            x = self.x(value)
            anchor = "end" if x > _WIDTH - _RIGHT - _EDGE else "middle"
            out += f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 14:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        return out


def _axis_names(x: str, y: str) -> str:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return (
        f'<text class="name" x="{middle:.0f}" y="{_HEIGHT - 3}" text-anchor="middle">{escape(x)}</text>'
        f'<text class="name" x="{_LEFT}" y="{_TOP - 1}">{escape(y)}</text>'
    )


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    ticks = []
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in (1, 2, 5):
            value = digit * 10.0**exponent
            if low <= value <= high:
                ticks.append((value, duration(value)))
    keep = max(1, -(-len(ticks) // 4))
    return ticks[::keep]


def scatter(picture: Picture) -> str:
    """Predicted against observed step times, logarithmic; on the diagonal is right."""
    pairs = [(o, p) for o, p in zip(picture.observed_us, picture.predicted_us, strict=True) if o > 0 and p > 0]
    if not pairs:
        return '<p class="quiet">no predictions</p>'
    values = [v for pair in pairs for v in pair]
    limits = (min(values) * 0.9, max(values) * 1.1)
    axes = _Axes(limits, limits, log=True)
    ticks = _decades(*limits)
    body = axes.frame(ticks, ticks)
    corners = " ".join(f"{axes.x(limit):.1f},{axes.y(limit):.1f}" for limit in limits)
    body += f'<polyline class="zero" points="{corners}"/>'
    body += "".join(f'<circle class="point" cx="{axes.x(o):.1f}" cy="{axes.y(p):.1f}" r="2"/>' for o, p in pairs)
    near = sum(abs(p / o - 1) <= 0.1 for o, p in pairs) / len(pairs)  # noqa: PLR2004  the 10 % that people ask for
    label = f"Predicted against observed step time, {len(pairs)} steps: {near:.0%} within 10 %"
    return _figure(label, body + _axis_names("observed", "predicted"))


def error_course(picture: Picture) -> str:
    """Prequential error over time: line = median of a block, area up to the 90th percentile; dashed = drift found."""
    if len(picture.course_s) < 2:  # noqa: PLR2004  a line has two ends
        return '<p class="quiet">too few rows for a course</p>'
    highest = sorted(picture.course_p90)[int(0.95 * (len(picture.course_p90) - 1))]
    top = next((t for t in _ERROR_TOPS if highest <= t), _ERROR_TOPS[-1])
    end = max(picture.course_s[-1], 1e-9)
    axes = _Axes((0.0, end), (0.0, top))
    body = axes.frame(
        [(0.0, "0 s"), (end, f"{end:.0f} s")], [(s * top, f"{100 * s * top:g} %") for s in (0.0, 0.5, 1.0)]
    )
    upper = [f"{axes.x(s):.1f},{axes.y(v):.1f}" for s, v in zip(picture.course_s, picture.course_p90, strict=True)]
    lower = [f"{axes.x(s):.1f},{axes.y(v):.1f}" for s, v in zip(picture.course_s, picture.course_median, strict=True)]
    body += f'<polygon class="band" points="{" ".join([*upper, *reversed(lower)])}"/>'
    body += f'<polyline class="line" points="{" ".join(lower)}"/>'
    for at_s in picture.drifts_s:
        x = axes.x(at_s)
        body += f'<line class="drift" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"/>'
    label = (
        f"Prequential error over {end:.0f} s: last median {picture.course_median[-1]:.1%}, "
        f"last 90th percentile {picture.course_p90[-1]:.1%}, {len(picture.drifts_s)} changes of speed"
    )
    return _figure(label, body + _axis_names("time in the recording", "error"))


def histogram(picture: Picture) -> str:
    """Residuals: how far the observed time lies from the predicted, in per cent of it; the outer bars hold the rest."""
    total = sum(picture.histogram)
    if not total:
        return '<p class="quiet">no residuals</p>'
    top = max(picture.histogram)
    axes = _Axes((-HISTOGRAM_REACH, HISTOGRAM_REACH), (0.0, float(top)))
    ticks = [(v, f"{100 * v:+.0f} %") for v in (-HISTOGRAM_REACH, 0.0, HISTOGRAM_REACH)]
    body = axes.frame(ticks, [(0.0, "0"), (float(top), str(top))])
    width = 2 * HISTOGRAM_REACH / len(picture.histogram)
    for i, count in enumerate(picture.histogram):
        left, right = axes.x(-HISTOGRAM_REACH + i * width), axes.x(-HISTOGRAM_REACH + (i + 1) * width)
        y = axes.y(count)
        high = _HEIGHT - _BOTTOM - y
        body += (
            f'<rect class="bar" x="{left + 0.5:.1f}" y="{y:.1f}" width="{right - left - 1:.1f}" height="{high:.1f}"/>'
        )
    body += f'<line class="zero" x1="{axes.x(0):.1f}" y1="{_TOP}" x2="{axes.x(0):.1f}" y2="{_HEIGHT - _BOTTOM}"/>'
    return _figure(f"Residuals of {total} steps", body + _axis_names("observed ÷ predicted - 1", "steps"))


def coefficients(shown: Sequence[FittedCoefficient]) -> str:
    """Coefficients with their 95 % intervals, each relative to itself: how sure, not how large."""
    if not shown:
        return '<p class="quiet">no coefficients are published</p>'
    step, label_width, value_width, width = 20.0, 150.0, 230.0, 620.0
    height = step * len(shown) + 24
    reach = 1.0

    def at(ratio: float) -> float:
        return label_width + (1 + max(-1.0, min(1.0, ratio / reach))) / 2 * (width - label_width - value_width)

    body = f'<line class="zero" x1="{at(0):.1f}" y1="2" x2="{at(0):.1f}" y2="{height - 20:.1f}"/>'
    for i, c in enumerate(shown):
        y = step * i + 12
        body += f'<text x="{label_width - 10}" y="{y + 4}" text-anchor="end">{escape(c.name)}</text>'
        if c.stderr is not None and c.coefficient > 0:
            half = Z_95 * c.stderr / c.coefficient
            left, right = at(-half), at(half)
            body += f'<line class="error" x1="{left:.1f}" y1="{y}" x2="{right:.1f}" y2="{y}"/>'
            body += "".join(
                f'<line class="error" x1="{x:.1f}" y1="{y - 4}" x2="{x:.1f}" y2="{y + 4}"/>' for x in (left, right)
            )
        body += f'<circle class="point" cx="{at(0):.1f}" cy="{y}" r="3"/>'
        value = f"{c.coefficient:.4g} {c.unit}"
        body += f'<text x="{width - value_width + 16}" y="{y + 4}">{escape(value)} {escape(c.status)}</text>'
    for ratio in (-reach, 0.0, reach):
        body += f'<text x="{at(ratio):.1f}" y="{height - 4}" text-anchor="middle">{100 * ratio:+.0f} %</text>'
    return _figure("Coefficients with 95 % intervals relative to themselves", body, width, height)
