"""What a person sees: log lines, progress, and what fits a terminal.

Logs for people: a line per change of state, and the same complaint at most every ten seconds.

Whatever happens per item is a counter; a log line about it would fill the disk when it is needed least.

How a command writes: through an argument, so that it knows no stream and tests read what it says.

How far a long command is, with rate and time left: a bar in a terminal, a line now and then elsewhere.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from .tasks import Clock

INTERVAL_S = 10.0
TOLD_ONCE = {"told_once": True}
"""As ``extra`` of a line that is news of one thing: who writes it does so once, and others are not like it."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class OncePerInterval(logging.Filter):
    """Lets a message text of a logger through once per interval, with the number of those held back.

    The texts are constants of the code, so the table of them is bounded.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the line may be written."""
        if getattr(record, "told_once", False):
            return True
        key = (record.name, str(record.msg))
        now_ns = self._clock.monotonic_ns()
        last_ns, held_back = self._seen.get(key, (0, 0))
        if key in self._seen and now_ns - last_ns < INTERVAL_S * 1e9:
            self._seen[key] = (last_ns, held_back + 1)
            return False
        self._seen[key] = (now_ns, 0)
        if held_back:
            record.msg = f"{record.msg} ({held_back} more like this held back)"
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per line, for who collects logs by machine."""

    def format(self, record: logging.LogRecord) -> str:
        """RFC 3339 time in UTC, level, logger, message; the traceback where there is one."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_log_format(name: Literal["text", "json"]) -> None:
    """Lines for people, or for machines."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter() if name == "json" else logging.Formatter(FORMAT))


def set_log_level(level: str) -> None:
    """How much is said; from any thread."""
    logging.getLogger().setLevel(level.upper())


def configure_logs(clock: Clock) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(OncePerInterval(clock))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


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


LINE_INTERVAL_NS = 1_000_000_000
BAR_INTERVAL_NS = 100_000_000


class Progress:
    """One count towards a total; a context, so that an end of any kind takes the bar away.

    Args:
        doing: what is under way, in a word.
        total: how much there is; 0 if nobody knows.
        clock: for rate and time left.
        note: receives lines, or is a terminal that draws a bar.
        unit: of the total: ``B`` for bytes, a word for things that are counted, nothing for a share.
    """

    def __init__(self, doing: str, total: float, clock: Clock, note: PrintLine, unit: str = "B") -> None:
        self._doing = doing
        self._total = total
        self._clock = clock
        self._note = note
        self._unit = unit
        self._done = 0.0
        self._start_ns = self._shown_ns = clock.monotonic_ns()
        self._interval_ns = BAR_INTERVAL_NS if isinstance(note, TerminalRemarks) else LINE_INTERVAL_NS
        self._bar: Any = None
        self._drawn = ExitStack()

    def __enter__(self) -> Self:
        """Begin to draw."""
        if isinstance(self._note, TerminalRemarks):
            self._bar = self._drawn.enter_context(self._note.bar(self._doing, self._total, self._unit))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self._drawn.close()
        self._bar = None

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return (self._clock.monotonic_ns() - self._start_ns) / 1e9

    @property
    def is_due(self) -> bool:
        """It is time to show something; for who would have to work out how far it is."""
        return self._clock.monotonic_ns() - self._shown_ns >= self._interval_ns

    def advance(self, amount: float, remark: str = "") -> None:
        """So much more is done."""
        self.advance_to(self._done + amount, remark)

    def advance_to(self, done: float, remark: str = "") -> None:
        """So much is done; shown if it is due."""
        self._done = done
        if not self.is_due:
            return
        self._shown_ns = self._clock.monotonic_ns()
        if self._bar is None:
            self._note(self._line(remark))
            return
        self._bar.set_postfix_str(remark, refresh=False)
        self._bar.update(done - self._bar.n)

    def _line(self, remark: str) -> str:
        elapsed_s = max(self.elapsed_s, 1e-9)
        texts = []
        if self._done and self._unit == "B":
            texts = [f"{self._done / 1e6:,.1f} MB, {self._done / 1e6 / elapsed_s:,.1f} MB/s"]
        elif self._done and self._unit:
            texts = [f"{self._done:,.0f} {self._unit}, {self._done / elapsed_s:,.1f}/s"]
        share_text = ""
        if self._total:
            share = min(self._done / self._total, 1.0)
            share_text = f" {share:4.0%}"
            texts += [f"{elapsed_s * (1.0 - share) / share:,.0f} s left"] if share else []
        return "  ".join(part for part in (f"{self._doing}{share_text}", ", ".join(texts), remark) if part)
