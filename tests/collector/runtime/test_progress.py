"""How far a command is: a bar in a terminal, above which remarks stand; nothing in a file."""

import io
import logging
import sys

import pytest

from collector.runtime import note, progress


class Terminal(io.StringIO):
    """A terminal, as far as a bar asks."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("total", "unit"), [(40e6, "B"), (0, "B"), (40, "sources")])
def test_a_terminal_gets_a_bar_that_is_gone_when_it_is_done(total, unit, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("read", total, unit) as bar:
        bar.update(total / 2 or 20e6)
        bar.refresh()
        note("a remark")
        logging.getLogger().warning("a line of the log")
    note("afterwards")
    drawn = stream.getvalue()
    assert "read" in drawn
    assert not total or "50%" in drawn
    assert "a remark\n" in drawn
    assert "\x1b[3" not in drawn, "no colours"
    assert drawn.endswith("afterwards\n")
    assert drawn.removesuffix("afterwards\n").endswith("\r"), "the line was cleared before"


@pytest.mark.parametrize("shown", [True, False])
def test_a_file_gets_the_remarks_alone(shown, monkeypatch):
    stream = io.StringIO() if shown else Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("read", 40e6, shown=shown) as bar:
        bar.update(20e6)
        note("a remark")
    assert stream.getvalue() == "a remark\n"


def test_a_command_without_standard_error_ends_as_any_other(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress("read", 40e6):
        note("nobody reads it")
