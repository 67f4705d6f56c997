"""docs/tutorial.md: every command and every line of Python in it runs, on the demo's recording, and says the same."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import re
import shlex
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from collector.cli import _parser, main
from collector.commands.demo_feed import find_recording
from collector.recordings import Recording
from exporters.pages import AskPages, SnapshotDocuments
from exporters.prometheus import MetricsPage
from exporters.routes import make_routes
from exporters.status_page import StatusPage
from tests.support.pages import page_server
from tests.support.paths import DOCS
from tests.support.pipelines import replayed

TEXT = (DOCS / "tutorial.md").read_text(encoding="utf-8")
ADDRESS = "http://localhost:9464"
COMMANDS = [
    pytest.param(command, expected, id=f"{number}-{command.split()[1]}")
    for number, block in enumerate(re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL))
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


@pytest.fixture(scope="module")
def sidecar():
    """The pages of a sidecar to which the demo has sent its whole recording."""
    pipeline = replayed(
        timed.export._replace(recording="") for timed in Recording(find_recording(None), print).exports()
    )
    snapshot = pipeline.snapshot(1, 1)
    own, healthy = CollectorRegistry(), lambda: (True, {})
    page = StatusPage(lambda: snapshot, own, ready=healthy, unix_nano=lambda: 0, history_of=pipeline.history_of)
    routes = make_routes(
        MetricsPage(own, lambda: snapshot),
        SnapshotDocuments(lambda: snapshot),
        alive=healthy,
        ready=healthy,
        status_page=page,
        questions=AskPages(page.view),
    )
    server = page_server(routes)
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.stop()


def said(command, sidecar):
    words = shlex.split(command.replace(ADDRESS, sidecar))
    if words[0] == "curl":
        with urllib.request.urlopen(words[-1], timeout=10) as answer:
            return json.dumps(json.loads(answer.read()), indent=2) + "\n"
    assert words[0] == "tracefit"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words[1:]) == 0
    return out.getvalue()


@pytest.mark.parametrize(("command", "expected"), COMMANDS)
def test_every_command_says_what_stands_below_it(command, expected, sidecar):
    if command.startswith("tracefit demo"):  # the fixture: what it sends, without the waiting
        assert _parser().parse_args(shlex.split(command)[1:]).recording is None
        return
    actual = said(command, sidecar)
    assert doctest.OutputChecker().check_output(expected, actual, doctest.ELLIPSIS), actual


def test_every_line_of_python_says_what_stands_below_it(sidecar):
    example = doctest.DocTestParser().get_doctest(TEXT.replace(ADDRESS, sidecar), {}, "tutorial.md", "tutorial", 0)
    assert len(example.examples) > 4
    out = []
    result = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example, out=out.append)
    assert not result.failed, "".join(out)


def test_the_status_page_has_what_the_tutorial_says_of_it(sidecar):
    with urllib.request.urlopen(sidecar, timeout=10) as answer:
        page = answer.read().decode()
    for title in re.findall(r"^\* \*(.+?)\*:", TEXT, re.MULTILINE):
        assert title in page
