"""What the commands that ask a snapshot share: how numbers are read and written, which configuration is meant.

In JSON every time is in microseconds and the keys are those of the client's results, so that a program that reads one
needs no second vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

from tracefit import Config, Estimate, Prediction, Snapshot

_UNITS_MS = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(us|µs|ms|s|)")
_SECOND_US, _MILLISECOND_US = 1e6, 1e3


def milliseconds(text: str) -> float:
    """Read ``30ms``, ``1.5s``, ``900us``; a number alone is milliseconds.

    Raises:
        ValueError: it is none of these.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no time like 30ms or 1.5s")
    return float(match[1]) * _UNITS_MS[match[2]]


def duration(us: float) -> str:
    """Three digits in the unit that suits: ``850 µs``, ``29.6 ms``, ``6.18 s``."""
    for unit_us, unit in ((_SECOND_US, "s"), (_MILLISECOND_US, "ms")):
        if us >= unit_us:
            return f"{us / unit_us:.3g} {unit}" if us < 1000 * unit_us else f"{us / unit_us:,.0f} {unit}"
    return f"{us:.3g} µs"


def with_band(value: Estimate | Prediction) -> str:
    """A time and the band that eight of ten fall into."""
    return f"{duration(value.us):<9} (8 of 10: {duration(value.low)} to {duration(value.high)})"


def headline(config: Config) -> str:
    """Which configuration an answer is about."""
    known = [f"{config.model or 'unknown model'} on {config.gpu or 'unknown GPU'}"]
    if "tensor_parallel_size" in config.facts:
        known.append(f"TP {config.facts['tensor_parallel_size']}")
    return f"config {config.config_id}  {', '.join(known)}"


def caveats(config: Config, extrapolated: Collection[str]) -> Iterator[str]:
    """Why an answer should be taken with care, a line each."""
    for reason in config.reasons:
        yield f"not usable yet: {reason}"
    if extrapolated:
        seen = config.targets["step_time"].seen
        ranges = {} if seen is None else seen.features
        names = [f"{n} ({ranges[n][0]:,.0f} to {ranges[n][1]:,.0f} seen)" if n in ranges else n for n in extrapolated]
        yield f"outside of what was learned from: {', '.join(names)}"


def chosen(snapshot: Snapshot, config_id: str | None) -> Config:
    """The configuration that is meant; the only one where none is named."""
    return snapshot.config(config_id or "")


def as_json(tree: object) -> str:
    """One document, keys in order."""
    return json.dumps(tree, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
