"""The check of vLLM's releases finds what is missing, and looks for all that the plugin needs."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from tracefit_vllm.batch import REQUIRED_OUTPUT
from tracefit_vllm.journeys import FINISH
from tracefit_vllm.tap import REQUIRED, REQUIRED_JOURNEYS

from tests.plugin.conftest import PLUGIN

SPEC = importlib.util.spec_from_file_location("check_wheels", PLUGIN / "matrix" / "check_wheels.py")
check_wheels = importlib.util.module_from_spec(SPEC)
sys.modules["check_wheels"] = check_wheels
SPEC.loader.exec_module(check_wheels)


def sources():
    """The least that satisfies the check, by file and class."""
    found = {file: {} for file in check_wheels.FILES}
    for file, name, members in check_wheels.MEMBERS:
        found[file].setdefault(name, []).extend(members)
    found[check_wheels.REQUEST]["RequestStatus"] = sorted(FINISH)
    return found


def write(root, found, core="load_general_plugins()\n", group="vllm.general_plugins"):
    for file, names in found.items():
        text = ""
        for name, members in names.items():
            text += f"class {name}:\n"
            for member in members:
                arguments = check_wheels.SIGNATURES.get(member)
                text += f"    {member} = 0\n" if arguments is None else ""
            for member, arguments in check_wheels.SIGNATURES.items():
                if name == "Scheduler" and f"-{member}" not in members:
                    text += f"    def {member}({', '.join(arguments)}):\n        pass\n"
            text += "    pass\n"
        text += core if file == check_wheels.CORE else ""
        text += f"GROUP = {group!r}\n" if file == check_wheels.PLUGINS else ""
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)


@pytest.mark.parametrize(
    ("file", "name", "member"),
    [(file, name, member) for file, name, members in check_wheels.MEMBERS for member in members],
)
def test_each_member_that_is_missing_is_named(tmp_path, file, name, member):
    found = sources()
    found[file][name].remove(member)
    write(tmp_path, found)
    assert list(check_wheels.problems(tmp_path)) == [f"{name} has no {member}"]


def test_changed_parameters_an_unknown_end_and_an_engine_without_plugins_are_named(tmp_path):
    found = sources()
    found[check_wheels.REQUEST]["RequestStatus"].append("FINISHED_BORED")
    write(tmp_path, found, core="", group="other")
    scheduler = tmp_path / check_wheels.SCHEDULER
    scheduler.write_text(scheduler.read_text().replace("(self, request):", "(self, request, extra):"))
    problems = "\n".join(check_wheels.problems(tmp_path))
    assert "RequestStatus.FINISHED_BORED is unknown" in problems
    assert "Scheduler.add_request" in problems
    assert "loads no general plugins" in problems
    assert "no entry-point group" in problems


def test_all_that_the_plugin_needs_is_looked_for():
    looked_for = {member for _, _, members in check_wheels.MEMBERS for member in members} | set(check_wheels.SIGNATURES)
    for path in (*REQUIRED, *REQUIRED_OUTPUT, *REQUIRED_JOURNEYS):
        assert set(path.split(".")) <= looked_for, path
    assert set(FINISH) == check_wheels.FINISHED
