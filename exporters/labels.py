"""Label values and units, as Prometheus wants them: closed, short, valid UTF-8; base units.

A coefficient in ``us/token`` leaves as ``seconds_per_token``, its value divided by 1e6. Division, not multiplication
by 1e-6: 1e-6 is not a binary fraction, so the product would carry two roundings and print noise digits.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from functools import lru_cache

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
