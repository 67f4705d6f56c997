"""The bill of materials lists what runs; a database of vulnerabilities that is away is a warning and no failure."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib import metadata

import pytest

from tests.support.paths import ROOT

FOUND = {"name": "grpcio", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
CLEAN = {"name": "numpy", "version": "2.0", "vulns": []}
SKIPPED = {"name": "river", "skip_reason": "not found"}


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", ROOT / "deploy" / "audit" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


@pytest.fixture
def tool(tmp_path):
    """A pip-audit that says this."""

    def saying(text, code):
        path = tmp_path / "pip-audit"
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\necho 'no route to pypi.org' >&2\nexit {code}\n")
        path.chmod(0o755)
        return str(path)

    return saying


@pytest.mark.parametrize(
    ("packages", "code", "expected", "out", "err"),
    [
        ([CLEAN], 0, 0, "1 packages asked about, 0 known", ""),
        ([CLEAN, FOUND], 1, 1, "grpcio 1.0: PYSEC-1, mended in 1.1", ""),
        (
            [CLEAN, SKIPPED],
            0,
            0,
            "1 packages asked about, 0 known",
            "WARNING: vulnerabilities of 1 of 2 packages are NOT",
        ),
    ],
)
def test_what_is_known_is_said(audit, tool, capsys, packages, code, expected, out, err):
    assert audit.ask_known(tool(json.dumps({"dependencies": packages}), code)) == expected
    said = capsys.readouterr()
    assert out in said.out
    assert err in said.err


@pytest.mark.parametrize(("text", "code"), [("", 1), ("<html>", 0), ("[]", 0), ('{"dependencies": null, "x"', 1)])
def test_who_cannot_be_asked_is_a_warning(audit, tool, capsys, text, code):
    assert audit.ask_known(tool(text, code)) == 0
    assert capsys.readouterr().err == "WARNING: vulnerabilities are NOT checked: no route to pypi.org\n"


def test_a_tool_that_hangs_or_is_not_there_is_a_warning(audit, tmp_path, capsys):
    hanging = tmp_path / "hang"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    assert audit.ask_known(str(hanging), 0.1) == 0
    assert "no answer within 0.1 s" in capsys.readouterr().err
    assert audit.ask_known(str(tmp_path / "absent")) == 0
    assert "NOT checked" in capsys.readouterr().err
    assert audit.WAIT_S == 60


def test_what_is_listed_is_what_runs_with_its_hashes(audit):
    lock = (ROOT / "requirements.lock").read_text()
    runs = audit.runtime_lock(lock)
    names = {line.partition("==")[0] for line in runs.splitlines() if "==" in line}
    assert {"grpcio", "numpy", "river", "pyzmq", "tqdm"} <= names
    assert not names & {"pytest", "mypy", "ruff"}
    assert runs.count("--hash=sha256:") >= len(names)
    assert set(runs.splitlines()) <= set(lock.splitlines())
    assert len(names) == 16
    assert "Sixteen packages run" in (ROOT / "docs" / "security.md").read_text()


def test_a_package_that_another_needs_with_extras_is_pinned_with_them():
    """Or pip takes the newest of it, which no hash allows, from the day on which there is a newer one."""
    pinned = set(re.findall(r"^(\S+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    names = {name.partition("[")[0] for name in pinned}
    needed = {
        found[0]
        for name in names & {each.metadata["Name"].lower() for each in metadata.distributions()}
        for requirement in metadata.requires(name) or ()
        if (found := re.match(r"[\w.-]+\[[\w,-]+\]", requirement)) and "extra ==" not in requirement
    }
    assert "coverage[toml]" in needed
    assert needed <= pinned
