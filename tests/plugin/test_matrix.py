"""The check of vLLM's releases finds what is missing."""

import importlib.util
import sys

import pytest

from tests.plugin.conftest import PLUGIN

SPEC = importlib.util.spec_from_file_location("check_wheels", PLUGIN / "matrix" / "check_wheels.py")
check_wheels = importlib.util.module_from_spec(SPEC)
sys.modules["check_wheels"] = check_wheels
SPEC.loader.exec_module(check_wheels)


def write(root, without=(), extra="", core="load_general_plugins()\n", group="vllm.general_plugins"):
    """The least that satisfies the check, but for what is left out."""
    texts = dict.fromkeys(check_wheels.FILES, "")
    for file, name, members in check_wheels.MEMBERS:
        if f"class {name}:" not in texts[file]:
            texts[file] += f"class {name}:\n    pass\n"
            if name == "Scheduler":
                for method, arguments in check_wheels.SIGNATURES.items():
                    texts[file] += f"    def {method}({', '.join(arguments)}{extra}):\n        pass\n"
        texts[file] += "".join(f"    {member} = 0\n" for member in members if (name, member) != without)
    texts[check_wheels.CORE] += core
    texts[check_wheels.PLUGINS] += f"GROUP = {group!r}\n"
    for file, text in texts.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return list(check_wheels.problems(root))


@pytest.mark.parametrize(
    ("name", "member"), [(name, member) for _, name, members in check_wheels.MEMBERS for member in members]
)
def test_each_member_that_is_missing_is_named(tmp_path, name, member):
    assert write(tmp_path, without=(name, member)) == [f"{name} has no {member}"]


def test_changed_parameters_and_an_engine_without_plugins_are_named(tmp_path):
    problems = "\n".join(write(tmp_path, extra=", more", core="", group="other"))
    assert "Scheduler.add_request('self', 'request', 'more')" in problems
    assert "loads no general plugins" in problems
    assert "no entry-point group" in problems
