"""Numbers and words as people read them."""

from __future__ import annotations

import html
import math

_RATIOS = {"us/us", "1", "ratio", ""}
_TIME_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"), (1e-3, "ns"))

TARGET_NAMES = {
    "step_time": "Step time",
    "schedule_time": "Scheduler time",
    "api_queueing": "API to queue",
    "queue_wait": "Wait in the queue",
    "post_decode": "After the last token",
    "first_response": "First token to response",
    "preemption_gap": "Preemption to resume",
}

FEATURE_NAMES = {
    "intercept": "every step",
    "prefill_tokens": "prefill token",
    "prefill_requests": "prefill request",
    "decode_context_tokens": "token of decode context",
    "requests": "request in the batch",
    "prompt_tokens": "prompt token",
    "output_tokens": "output token",
    "waiting": "waiting request",
}


def escape(text: object) -> str:
    """Text for an element or a quoted attribute."""
    return html.escape(str(text), quote=True)


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, plain, without a trailing dot."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "unknown"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 12)}f}"


def duration(value_us: float) -> str:
    """Microseconds in the unit that fits: ``16.8 ms``, ``70.0 ns``."""
    if value_us == 0:
        return "0 µs"
    size = abs(value_us)
    scale, unit = next(((s, u) for s, u in _TIME_UNITS if size >= s), _TIME_UNITS[-1])
    return f"{significant(value_us / scale)} {unit}"


def coefficient(value: float, unit: str) -> str:
    """A coefficient with its unit: ``580 µs/token``, ``1.90 ×`` for a ratio."""
    numerator, slash, denominator = unit.partition("/")
    if unit in _RATIOS:
        return f"{significant(value)} ×"
    if numerator != "us":
        return f"{significant(value)} {unit}"
    return f"{duration(value)}{slash}{denominator}"


def unit_text(unit: str) -> str:
    """A unit of a document as people read it: ``µs/token`` for ``us/token``, ``×`` for a ratio."""
    if unit in _RATIOS:
        return "×"
    numerator, slash, denominator = unit.partition("/")
    return f"{'µs' if numerator == 'us' else numerator}{slash}{denominator}"


def round_duration(value_us: float) -> str:
    """Microseconds on an axis, where values are round: ``20 ms``, ``0.5 s``."""
    number, _, unit = duration(value_us).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def percent(ratio: float) -> str:
    """A ratio in per cent, with a decimal below ten."""
    value = ratio * 100
    if not math.isfinite(value):
        return "unknown"
    if value == 0:
        return "0 %"
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:,.0f} %"  # noqa: PLR2004 - where rounding gives two digits


def factor(ratio: float) -> str:
    """A ratio around 1."""
    return f"{ratio:.2f}" if math.isfinite(ratio) else "unknown"


def age(seconds: float) -> str:
    """How long ago, roughly."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def count(value: float) -> str:
    """A whole number with thin groups."""
    return f"{value:,.0f}"


def compact(value: float) -> str:
    """A round number on an axis: ``512``, ``2k``, ``1.5M``."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"
