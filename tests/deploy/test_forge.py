"""What a forge runs for us is what we run by hand, on every Python that the project claims."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import yaml

from tests.support.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path) -> dict:
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_commands_that_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]
    made = {word for line in lines for call in re.findall(r"^make (.+)", line, re.MULTILINE) for word in call.split()}
    assert made, "a workflow that makes nothing"
    assert made <= targets
    assert all((ROOT / line).exists() for line in lines if line.startswith("."))
    assert all("timeout-minutes" in job for job in jobs(path).values())


def test_the_suite_runs_on_every_python_that_the_project_claims():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = [kind.rpartition(" ")[2] for kind in project["classifiers"] if re.search(r":: 3\.\d+$", kind)]
    (check,) = (path for path in WORKFLOWS if path.name == "check.yml")
    assert jobs(check)["tests"]["strategy"]["matrix"]["python"] == claimed


def test_hooks_and_the_container_of_an_editor_use_what_make_builds():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    of_lint = (ROOT / "Makefile").read_text().partition("lint: ")[2].partition("clean:")[0]
    for hook in hooks:
        assert hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") in of_lint
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    exposed = re.search(r"^EXPOSE (.+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1].split()
    assert [str(port) for port in container["forwardPorts"]] == exposed
