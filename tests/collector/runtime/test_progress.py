"""How far a command is: a bar in a terminal, above which remarks stand; nothing in a file."""

import io
import sys

import pytest

from collector.runtime import note, progress


class Terminal(io.StringIO):
    """A terminal, as far as a bar asks."""

    def isatty(self):
        return True


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
