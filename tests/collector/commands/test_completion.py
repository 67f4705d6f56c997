"""The shell is offered commands, options and values, by click's own completion."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


def printed(**asked):
    """What the program prints where the shell asks it by these variables."""
    command, environment = [sys.executable, "-m", "collector"], os.environ | asked
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tracefit exp", {"export"}),
        ("tracefit export --forma", {"--format"}),
        ("tracefit fleet p", {"pull"}),
        ("tracefit export --format blis-", {"blis-yaml", "blis-flags", "blis-trace"}),
    ],
)
def test_the_shell_is_offered_what_fits(words, expected):
    said = printed(_TRACEFIT_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert {line.partition(",")[2] for line in said.split()} == expected


def test_bash_is_given_a_script_it_can_read():
    script = printed(_TRACEFIT_COMPLETE="bash_source")
    assert "complete" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
