"""The shell is offered commands, options and values, by click's own completion."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


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
    asked = {
        "_TRACEFIT_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "collector"],
        cwd=ROOT,
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert {line.partition(",")[2] for line in done.stdout.split()} == expected


def test_bash_is_given_a_script_it_can_read():
    script = subprocess.run(
        [sys.executable, "-m", "collector"],
        cwd=ROOT,
        env=os.environ | {"_TRACEFIT_COMPLETE": "bash_source"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "complete" in script.stdout
    subprocess.run(["bash", "-n"], input=script.stdout, text=True, check=True)
