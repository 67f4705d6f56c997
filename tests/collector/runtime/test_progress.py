"""How far a command is: a bar in a terminal; in a file, its remarks alone."""

import io
import sys

from collector.runtime import print_stderr, progress


def test_a_file_gets_the_remarks_alone(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("read", 40e6) as bar:
        bar.update(20e6)
        print_stderr("a remark")
    assert stream.getvalue() == "a remark\n"


def test_a_command_without_standard_error_ends_as_any_other(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress("read", 40e6):
        print_stderr("nobody reads it")
