"""What a forge runs for us is what we run by hand, on every Python that the project claims."""

from __future__ import annotations

import re
import subprocess

import yaml

from tests.support.command_lines import every_command
from tests.support.paths import DOCS, ROOT


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
