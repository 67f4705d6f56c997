"""The bill of materials lists what runs; a database of vulnerabilities that is away is a warning and no failure."""

import importlib.util
import sys

import pytest

from tests.support.paths import ROOT


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


def test_what_is_listed_is_what_runs_with_its_hashes(audit):
    lock = (ROOT / "requirements.lock").read_text()
    runs = audit.runtime_lock(lock)
    names = {line.partition("==")[0] for line in runs.splitlines() if "==" in line}
    assert {"grpcio", "numpy", "river", "pyzmq", "tqdm"} <= names
    assert not names & {"pytest", "mypy", "ruff"}
    assert runs.count("--hash=sha256:") >= len(names)
    assert set(runs.splitlines()) <= set(lock.splitlines())
    assert len(names) == 27
    assert "Twenty-seven packages run" in (ROOT / "docs" / "reliability.md").read_text()
