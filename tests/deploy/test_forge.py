"""What a forge runs for us is what we run by hand, on every Python that the project claims."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import pytest
import yaml

from tests.support.command_lines import every_command
from tests.support.manifests import at, read_yaml
from tests.support.paths import DOCS, ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path) -> dict:
    return yaml.safe_load(path.read_text())["jobs"]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_help_and_documents_name_the_same_commands():
    text = "\n".join(path.read_text() for path in (*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"))
    helped = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^make ([a-z0-9-]+)", helped, re.MULTILINE)) == targets() - {"help"}
    assert set(re.findall(r"(?:`|^ +)make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets()
    commands = {name for name, _ in every_command()}
    assert [name for name in commands if f"tracefit {name}" not in text] == []
    fenced = "\n".join(re.findall(r"^```\w*\n(.+?)^```", text, re.MULTILINE | re.DOTALL))
    typed = re.findall(r"^(?:\$ )?tracefit ([a-z]+)(?: (\w+))?", fenced, re.MULTILINE)
    assert len(typed) > 10
    assert [(first, second) for first, second in typed if not commands & {first, f"{first} {second}"}] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_commands_that_exist(path):
    lines = [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]
    made = {word for line in lines for call in re.findall(r"^make (.+)", line, re.MULTILINE) for word in call.split()}
    assert made, "a workflow that makes nothing"
    assert made <= targets()
    assert all((ROOT / line).exists() for line in lines if line.startswith("."))
    assert all("timeout-minutes" in job for job in jobs(path).values())


def test_the_suite_runs_on_every_python_that_the_project_claims():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = [kind.rpartition(" ")[2] for kind in project["classifiers"] if re.search(r":: 3\.\d+$", kind)]
    (check,) = (path for path in WORKFLOWS if path.name == "check.yml")
    assert at(jobs(check), "tests.strategy.matrix.python") == claimed


def test_hooks_and_the_container_of_an_editor_use_what_make_builds():
    hooks = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    of_lint = (ROOT / "Makefile").read_text().partition("lint: ")[2].partition("clean:")[0]
    for hook in hooks:
        assert hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") in of_lint
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    exposed = re.search(r"^EXPOSE (.+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1].split()
    assert [str(port) for port in container["forwardPorts"]] == exposed
