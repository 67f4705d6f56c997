"""How far a command is: lines with rate and time left, or a bar in a terminal above which remarks stand."""

from __future__ import annotations

import io
import logging
import re

import pytest

from collector.runtime import Progress, TerminalRemarks
from tests.support.clocks import FakeClock


class Terminal(io.StringIO):
    """A terminal of 80 columns, as far as a bar asks."""

    def isatty(self):
        return True


def test_a_line_a_second_says_share_rate_and_time_left():
    clock, said = FakeClock(), []
    with Progress("read", 40e6, clock, said.append) as progress:
        for _ in range(4):
            clock.advance(0.5)
            progress.advance(5e6, "7 spans")
    assert said == [
        "read  25%  10.0 MB, 10.0 MB/s, 3 s left  7 spans",
        "read  50%  20.0 MB, 10.0 MB/s, 2 s left  7 spans",
    ]
    assert progress.elapsed_s == 2.0


@pytest.mark.parametrize(("total", "unit"), [(40e6, "B"), (0, "B"), (40, "sources"), (1.0, "")])
def test_a_terminal_gets_a_bar_that_is_gone_when_it_is_done(total, unit):
    clock, stream = FakeClock(), Terminal()
    note = TerminalRemarks(stream)
    with Progress("read", total, clock, note, unit) as progress:
        clock.advance(1.0)
        progress.advance_to(total / 2 or 20e6)
        logging.getLogger().warning("a line of the log")
    note("afterwards")
    drawn = stream.getvalue()
    assert "read" in drawn
    assert not total or "50%" in drawn
    assert "\x1b[3" not in drawn, "no colours"
    assert drawn.endswith("afterwards\n")
    assert re.search(r"\r *\r(afterwards)\n$", drawn), "the line was cleared before"
