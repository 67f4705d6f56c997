"""Tutorials that are run: the commands of a document, and what each says, in this process."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import re
import shlex
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from collector.cli import main
from collector.decode import Export
from tests.support.pages import routes_of, serving
from tests.support.pipelines import replayed

ADDRESS = "http://localhost:9464"
"""Where a tutorial's sidecar is."""
LEFT = "snapshots/demo/snapshot.json"
"""What a demo leaves: the same as a sidecar says at its end."""


class Step(NamedTuple):
    """A command, and what stands below it."""

    command: str
    expected: str


def steps_of(text: str) -> list[Step]:
    """The commands of a tutorial, in order."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    command_and_output = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
    return [Step(*found) for block in blocks for found in command_and_output.findall(block)]


@contextlib.contextmanager
def served(exports: Iterable[Export], unix_nano: int = 0) -> Iterator[str]:
    """The pages of a sidecar that has learned all of these; their address."""
    pipeline = replayed(export._replace(recording="") for export in exports)
    snapshot = pipeline.snapshot(unix_nano or 1, 1)
    with serving(routes_of(lambda: snapshot, unix_nano=unix_nano, history_of=pipeline.history_of)) as server:
        yield f"http://127.0.0.1:{server.port}"


def page_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def said(command: str, sidecar: str = "") -> str:
    """What it writes to standard output; ``> FILE`` and ``| grep`` as a shell has them."""
    command, _, file = command.partition(" > ")
    command, _, pattern = command.partition(" | grep ")
    words = shlex.split(command.replace(ADDRESS, sidecar))
    if LEFT in words:
        with tempfile.NamedTemporaryFile(suffix=".json", delete=False) as left:
            left.write(page_of(f"{sidecar}/snapshot").encode())
        words = [left.name if word == LEFT else word for word in words]
    if words[0] == "curl":
        text = page_of(words[-1])
        text = json.dumps(json.loads(text), indent=2) + "\n" if text.startswith("{") else text
    elif words[0] == "cat":
        text = Path(words[1]).read_text(encoding="utf-8")
    else:
        assert words[0] == "tracefit"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(words[1:]) == 0
        text = out.getvalue()
    if pattern:
        (expression,) = shlex.split(pattern)
        text = "".join(line for line in text.splitlines(keepends=True) if re.search(expression, line))
    if file:
        Path(file).write_text(text, encoding="utf-8")
    return "" if file else text


def assert_said(step: Step, sidecar: str = "") -> None:
    """It says what stands below it, where ``...`` stands for anything."""
    actual = said(step.command, sidecar)
    assert doctest.OutputChecker().check_output(step.expected, actual, doctest.ELLIPSIS), actual
