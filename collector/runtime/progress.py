"""How far a long command is, with rate and time left: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from .clock import Clock
from .terminal import PrintLine, TerminalRemarks

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
