"""What the commands that ask a snapshot share: where it comes from, how numbers are written, which configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import tracefit
from collector.config import is_endpoint
from collector.runtime import StartError
from exporters.what_if import QuestionError
from tracefit import Config, Estimate, NotFoundError, Prediction, Snapshot

_SECOND_US, _MILLISECOND_US = 1e6, 1e3


def load_snapshot(source: str, token_file: Path | None) -> Snapshot:
    """A snapshot from a file or an address.

    Raises:
        StartError: the snapshot or the token cannot be read.
    """
    try:
        return tracefit.load(source, token=read_token(token_file))
    except tracefit.LoadError as error:
        meant = f"; did you mean 'http://{source}'?" if is_endpoint(source) and not Path(source).exists() else ""
        raise StartError(f"{error}{meant}") from None


def read_token(path: Path | None) -> str | None:
    """The first line of a file, if one was named.

    Raises:
        StartError: it cannot be read.
    """
    try:
        return None if path is None else path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartError(f"cannot read {path}: it is not UTF-8 text") from None


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
    return f"config {config.config_id}  {config.name}"


def caveats(config: Config, extrapolated: Collection[str]) -> Iterator[str]:
    """Why an answer should be taken with care, a line each."""
    for reason in config.reasons:
        yield f"not usable yet: {reason}"
    if extrapolated:
        seen = config.targets["step_time"].seen
        ranges = {} if seen is None else seen.features
        names = [f"{n} ({ranges[n][0]:,.0f} to {ranges[n][1]:,.0f} seen)" if n in ranges else n for n in extrapolated]
        yield f"outside of what was learned from: {', '.join(names)}"
    for caveat in config.caveats(extrapolated):
        yield f"not usable there: {caveat}"


def refusal(error: Exception) -> str:
    """Why there is no answer; of a question it names the option."""
    if isinstance(error, QuestionError):
        return f"error: --{error.parameter.replace('_', '-')}: {error.problem}"
    if isinstance(error, NotFoundError):
        return f"error: --which: {error}"
    return f"error: {error}"
