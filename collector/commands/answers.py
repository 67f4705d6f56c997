"""What the commands that ask a snapshot share: how numbers are written, which configuration is meant."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from exporters.what_if import QuestionError
from tracefit import Config, Estimate, Prediction, Snapshot

_SECOND_US, _MILLISECOND_US = 1e6, 1e3


def counted(number: float, noun: str) -> str:
    """``1 request``, ``20 requests``."""
    return f"{number:.4g} {noun}{'' if number == 1 else 's'}"


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


def refusal(error: Exception) -> str:
    """Why there is no answer; of a question it names the option."""
    if isinstance(error, QuestionError):
        return f"error: --{error.parameter.replace('_', '-')}: {error.problem}"
    return f"error: {error}"
