"""Numbers, names, units and changes of speed in words: as people read them, and as Prometheus wants them.

Label values are closed, short and valid UTF-8; units are base units. A coefficient in ``us/token`` leaves as
``seconds_per_token``, its value divided by 1e6. Division, not multiplication by 1e-6: 1e-6 is not a binary fraction,
so the product would carry two roundings and print noise digits.
"""

from __future__ import annotations

import hashlib
import html
import math
import re
import unicodedata
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from online import ConfigSnapshot

MAX_LABEL_CHARS = 120
"""Longer values are cut; Prometheus' usual ``label_value_length_limit`` is 200 bytes and up."""

US_PER_S = 1e6

REASONS: dict[str, str] = {
    "few_rows": "too few rows so far",
    "collinear": "it moves together with other features: only their sum is known; vary the load",
    "one_size": "its feature came in one size only",
    "wide": "its standard error is a fifth of it or more",
    "clock_grain": "the clock of the telemetry is too coarse for these steps",
    "two_speeds": "the engines run at two speeds",
    "poor_fit": "half of the predictions are off by more than 15 %",
    "hidden_prefix_hits": "of a prompt token, cached or computed: request spans hide prefix-cache hits",
    "derived": "worked out from other times, by no regression of its own",
}
"""Why a coefficient should not be used alone, in words; the keys are ``online.snapshot.Reason``."""

_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})
_NOT_WORD = re.compile(r"[^a-z0-9]+")


@lru_cache(maxsize=4096)
def label_value(text: str) -> str:
    """Make any text a harmless label value.

    Control characters, newlines and lone surrogates become U+FFFD; what is too long is cut and keeps eight hex digits
    of its hash, so that two long names that differ only at the end stay two series.

    Args:
        text: whatever telemetry or configuration said.

    Returns:
        At most ``MAX_LABEL_CHARS`` characters of encodable, printable text.
    """
    return printable(text, MAX_LABEL_CHARS)


def printable(text: str, max_chars: int) -> str:
    """The same for any length: one line of encodable text, cut with a mark that keeps different texts different."""
    head = text[:max_chars]
    clean = "".join("\ufffd" if unicodedata.category(char) in _UNPRINTABLE else char for char in head)
    if len(text) <= max_chars:
        return clean
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean[: max_chars - 9]}~{digest}"


@lru_cache(maxsize=1024)
def base_unit(unit: str) -> tuple[str, float]:
    """Translate a coefficient's unit to base units.

    Args:
        unit: numerator, optionally ``/`` denominators joined by ``*``: ``us``, ``us/token``, ``us/token*request``.

    Returns:
        The label value and the divisor that brings the coefficient to it. ``us/us`` is a ``ratio``. A unit without
        microseconds keeps its value and its (tidied) name.
    """
    numerator, _, denominator = unit.partition("/")
    if unit in {"", "1", "ratio", "us/us"}:
        return "ratio", 1.0
    divisor = US_PER_S if numerator == "us" else 1.0
    words = "seconds" if numerator == "us" else _tidy(numerator)
    if denominator:
        words += "".join(f"_per_{_tidy(part)}" for part in denominator.split("*"))
    return words, divisor


def _tidy(text: str) -> str:
    spelled = text.lower().replace("²", "_squared").replace("^2", "_squared")
    return _NOT_WORD.sub("_", spelled).strip("_") or "unknown"


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


IS_NEWS_NS = 86_400_000_000_000
"""The page and ``doctor`` tell a change for a day: so far back reach the page's own charts, which show it."""


class SpeedChange(NamedTuple):
    """The newest change of the steps of a configuration: new time per old time, and the event time it began at.

    ``of_prefill``: steps with prefill alone changed.
    """

    factor: float
    since_unix_nano: int
    of_prefill: bool = False

    def is_news(self, now_unix_nano: int) -> bool:
        """Whether a person who looks now may not have heard of it."""
        return now_unix_nano - self.since_unix_nano < IS_NEWS_NS

    def text(self, now_unix_nano: int) -> str:
        """``steps take 1.42 × as long since 14:03 UTC``, with the date where that is not today's."""
        since, now = _utc(self.since_unix_nano), _utc(now_unix_nano)
        change = f"steps {'with prefill ' * self.of_prefill}take {self.factor:.2f} × as long"
        if since is None:
            return change
        day = "" if now is not None and since.date() == now.date() else f"{since:%Y-%m-%d} "
        return f"{change} since {day}{since:%H:%M} UTC"


def newest_change(config: ConfigSnapshot) -> SpeedChange | None:
    """The newest confirmed change of speed of a configuration's steps; None without any."""
    step = config.targets.get("step_time")
    drift = None if step is None else step.drift
    if drift is None or drift.last_unix_nano is None or drift.gain is None:
        return None
    return SpeedChange(drift.gain, drift.last_unix_nano, drift.of_prefill)


def name_of(config: ConfigSnapshot) -> str:
    """The name of its model, else its id; on one line, whatever telemetry said."""
    return printable(str(config.config.get("model") or config.config_id), MAX_LABEL_CHARS)


def _utc(unix_nano: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(unix_nano // 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
