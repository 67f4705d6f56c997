"""What we write for Dynamo, read by Dynamo's own readers.

Installs ai-dynamo from the package index (a minute, some 300 MB), so it runs only where DYNAMO_TEST=1 asks for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv

import pytest

import tracefit
from exporters.files import Assumptions, render_dynamo
from online import Snapshot
from tests.support.paths import ROOT
from tests.tracefit.example_snapshot import encoded

VERSION = "1.6.1"
THEIRS = [f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}"]
READERS_NEED = ["numpy", "msgspec", "scikit-learn", "pydantic", "PyYAML"]

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("DYNAMO_TEST") != "1", reason="installs ai-dynamo to read what we write for it: DYNAMO_TEST=1"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What its readers found in our directory."""
    place = tmp_path_factory.mktemp("dynamo")
    venv.create(place / "venv", with_pip=True)
    python = place / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--no-deps", *THEIRS], check=True)
    subprocess.run([*install, *READERS_NEED], check=True)
    snapshot = Snapshot.from_json(encoded())
    for name, data in render_dynamo(snapshot, snapshot.configs[0], Assumptions()).items():
        (place / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "out" / name).write_bytes(data)
    reader = ROOT / "tests" / "support" / "read_dynamo.py"
    done = subprocess.run([python, "-I", reader, place / "out"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_both_forms_are_what_it_takes_them_for(found):
    assert found["is_directory"]
    assert found["is_mocker"]
    assert found["converted_is_mocker"]


def test_its_planner_reads_our_steps(found):
    config = tracefit.load(encoded()).config()
    assert len(found["decode"]) > 50
    for requests, kv_tokens, wall_s, _ in found["decode"]:
        step = config.step_time(requests=requests, decode_context_tokens=kv_tokens)
        assert wall_s * 1e6 == pytest.approx(step.us * config.targets["step_time"].mean_factor, rel=1e-6)


def test_its_own_regression_finds_the_same_machine(found):
    errors = [abs(fitted / wall_s - 1.0) for _, _, wall_s, fitted in found["decode"]]
    assert sum(errors) / len(errors) < 0.02
    assert max(errors) < 0.05
    errors = [abs(fitted / wall_s - 1.0) for _, wall_s, fitted in found["prefill"]]
    sys.stdout.write(f"prefill: mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}\n")
    assert sum(errors) / len(errors) < 0.06
