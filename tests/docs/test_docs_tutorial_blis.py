"""docs/blis.md: each command runs, up to the file that BLIS loads."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.support.paths import DATA, DOCS
from tests.support.tutorials import assert_said, steps_of

TEXT = (DOCS / "blis.md").read_text(encoding="utf-8")
STEPS = steps_of(TEXT)
FOLDER, BLIS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)[:2]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA / "c10_long" / "otlp.pb.gz", tmp_path / "recording.pb.gz")
    monkeypatch.setenv("TRACEFIT_LEARNERS", "[rls]")  # the others take most of the time and are not exported
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as without the extra: the document shows no baseline of it
    return tmp_path


def test_every_command_says_what_stands_below_it_and_leaves_what_blis_is_started_with(home):
    subprocess.run(["bash", "-euc", FOLDER], cwd=home, check=True)
    for step in STEPS:
        assert_said(step)
    named = re.findall(r"--(?:trace-header|trace-data|defaults-filepath|model-config-folder) (\S+)", BLIS)
    assert len(named) == 4
    assert all((home / path).exists() for path in named)
    file = yaml.safe_load((home / "tiny.blis.yaml").read_text())
    assert set(file) == {"version", "defaults", "workloads", "trained_physics_coefficients"}
    coefficients = file["trained_physics_coefficients"]
    assert (len(coefficients["alpha_coeffs"]), len(coefficients["beta_coeffs"])) == (3, 11)
    assert min(coefficients["alpha_coeffs"] + coefficients["beta_coeffs"]) >= 0
    with (home / "traffic" / "trace.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) > 600
    assert {"last_chunk_time_us", "arrival_time_us"} <= set(rows[0])


def test_blis_is_told_the_hardware_of_the_export():
    (export,) = [step.command for step in STEPS if "blis-yaml" in step.command]
    hardware = re.compile(r"--hardware (\w+)")
    assert hardware.findall(export) == hardware.findall(BLIS)
