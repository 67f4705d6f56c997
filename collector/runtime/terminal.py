"""How a command writes: through an argument, so that it knows no stream and tests read what it says."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

PrintLine = Callable[[str], None]
"""Prints one line: results (``say``) on standard output, remarks (``note``) on standard error."""

_BYTES_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left{postfix}"
_SHARE_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {remaining} left{postfix}"
_COLUMNS, _ROWS = 80, 24


_SPELLED = {"µ": "u", "μ": "u", "±": "+/-", "×": "x", "·": "-", "–": "-", "…": "...", "→": "->", "≤": "<=", "≥": ">="}
_SPELLING = "tracefit.spell"


def print_in_any_encoding() -> None:
    """Spell what the encoding lacks (``+/-`` before an error bar, ``us``; ``?`` for the rest), and never end there."""
    codecs.register_error(_SPELLING, _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_SPELLING)


def _spell(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101 - nothing is read through these streams
    return "".join(_SPELLED.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


class TerminalRemarks:
    """``note`` for a person at a terminal: remarks stand above the bar, if one is drawn.

    There are no colours, so nothing has to ask for NO_COLOR.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None

    def __call__(self, text: str) -> None:
        """Print one line."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    @contextmanager
    def bar(self, doing: str, total: float, unit: str) -> Iterator[Any]:
        """A bar of tqdm; log lines stand above it, too."""
        from tqdm import tqdm  # noqa: PLC0415 -- 20 ms of imports that only a long command pays
        from tqdm.contrib.logging import logging_redirect_tqdm  # noqa: PLC0415

        tqdm.monitor_interval = 0  # a thread that would watch for bars that are stuck
        known = {"bar_format": _BYTES_FORMAT if unit else _SHARE_FORMAT} if total else {}
        drawn = tqdm(
            desc=doing,
            total=total or None,
            unit=unit if unit == "B" else f" {unit}",
            unit_scale=unit == "B",
            file=self._stream,
            ncols=_columns(self._stream) - 1,
            nrows=_ROWS,
            mininterval=0,
            miniters=0,  # who calls says when
            leave=False,
            **known,
        )
        with drawn, logging_redirect_tqdm():
            self._bar = drawn
            try:
                yield drawn
            finally:
                self._bar = None


def remarks_on(stream: TextIO | None, term: str | None, lines: PrintLine) -> PrintLine:
    """``note`` for a long command: bars where somebody looks; a stream that was closed at the start is None."""
    if stream is None or not stream.isatty() or term == "dumb":
        return lines
    return TerminalRemarks(stream)


def _columns(stream: TextIO) -> int:
    """How wide it is; some terminals say 0."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS
