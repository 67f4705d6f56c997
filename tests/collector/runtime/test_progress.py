"""How far a command is: lines with rate and time left, or a bar in a terminal above which remarks stand."""

from __future__ import annotations

import io
import logging
import re

import pytest

from collector.runtime import Progress, TerminalRemarks, remarks_on
from tests.support.clocks import FakeClock

S = 1_000_000_000


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


def test_of_a_pipe_whose_size_nobody_knows_rate_is_said_and_no_share():
    clock, said = FakeClock(), []
    with Progress("read", 0, clock, said.append) as progress:
        clock.advance(2.0)
        progress.advance_to(5e6)
        clock.advance(2.0)
    assert said == ["read  5.0 MB, 2.5 MB/s"]


def test_where_not_even_a_position_is_known_the_remark_is_said():
    clock, said = FakeClock(), []
    for total in (0, 40):
        with Progress("read", total, clock, said.append) as progress:
            clock.advance(2.0)
            progress.advance_to(0, "7 spans")
    assert said == ["read  7 spans", "read   0%  7 spans"]


def test_things_are_counted_and_shares_have_no_rate():
    clock, said = FakeClock(), []
    with (
        Progress("asked", 8, clock, said.append, "sources") as asked,
        Progress("evaluated", 1.0, clock, said.append, "") as share,
    ):
        clock.advance(2.0)
        asked.advance(2)
        share.advance_to(0.5, "portable")
    assert said == ["asked  25%  2 sources, 1.0/s, 6 s left", "evaluated  50%  2 s left  portable"]


def test_more_than_there_was_to_do_is_all_of_it():
    clock, said = FakeClock(), []
    with Progress("read", 10, clock, said.append) as progress:
        clock.advance(1.0)
        progress.advance_to(11)
    assert said[0].startswith("read 100%")
    assert said[0].endswith(" 0 s left")


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


def test_remarks_stand_above_the_bar_and_an_interruption_takes_it_away():
    clock, stream = FakeClock(), Terminal()
    note = TerminalRemarks(stream)

    def interrupted():
        with Progress("read", 100, clock, note) as progress:
            clock.advance(1.0)
            progress.advance(10)
            note("x.json: damaged after 6 bytes")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    note("stopped")
    assert "\rx.json: damaged after 6 bytes\n" in stream.getvalue()
    assert stream.getvalue().endswith("\rstopped\n")


def test_bars_are_for_terminals_that_can_draw():
    said = []
    assert isinstance(remarks_on(Terminal(), "xterm", said.append), TerminalRemarks)
    assert isinstance(remarks_on(Terminal(), None, said.append), TerminalRemarks)
    for stream, term in ((Terminal(), "dumb"), (io.StringIO(), "xterm"), (None, "xterm")):
        remarks_on(stream, term, said.append)("a line")
    assert said == ["a line"] * 3
