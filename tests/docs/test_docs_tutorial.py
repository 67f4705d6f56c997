"""docs/quickstart.md: every command and every line of Python in it runs, on the demo's recording, and says the same."""

from __future__ import annotations

import doctest
import json
import re
import shlex

import pytest

from collector.commands.ask import shown_lines
from collector.commands.demo import find_recording
from collector.recordings import Recording
from tests.bench.figures import recorded
from tests.support.command_lines import parsed
from tests.support.paths import DOCS, ROOT
from tests.support.tutorials import LEFT, assert_said, page_of, served, steps_of
from tracefit import load

TEXT = (DOCS / "quickstart.md").read_text(encoding="utf-8")
STEPS = [pytest.param(step, id=f"{number}-{step.command.split()[1]}") for number, step in enumerate(steps_of(TEXT))]


@pytest.fixture(scope="module")
def sidecar():
    """The pages of a sidecar to which the demo has sent its whole recording."""
    with served(Recording(find_recording(None), print).exports()) as address:
        yield address


@pytest.mark.parametrize("step", STEPS)
def test_every_command_says_what_stands_below_it(step, sidecar):
    if step.command.startswith("tracefit demo"):  # the fixture: what it sends, without the waiting
        assert parsed(shlex.split(step.command)[1:]).recording is None
        return
    assert_said(step, sidecar)


def test_the_recorded_end_of_the_demo_is_what_is_learned_today(sidecar):
    shown = shown_lines(load(sidecar).config(), 0, "step_time")
    learned = [line for line in shown if line.startswith("    ")]
    said = recorded()["demo"]["said"]
    verdict, plan = [n for n, line in enumerate(said) if not line][:2]
    assert [line for line in said[verdict:plan] if line.startswith("    ")] == learned, (
        "make bench WHAT=demo ARGS=--record"
    )


def test_the_examples_of_the_readme_are_of_the_demo(sidecar):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (name, labels, shown) = re.search(r"^(tracefit_coefficient)\{(.*)\} ([\d.]+)\.\.\.$", readme, re.MULTILINE).groups()
    wanted = set(labels.split(","))
    values = [
        line.rpartition(" ")[2]
        for line in page_of(f"{sidecar}/metrics").splitlines()
        if line.startswith(f"{name}{{") and wanted == set(line.partition("{")[2].rpartition("}")[0].split(","))
    ]
    assert [value.startswith(shown) for value in values] == [True]
    (shown,) = re.findall(r'^ +(\{"name": "intercept".*?\}), \.\.\.$', readme, re.MULTILINE)
    configs = json.loads(page_of(f"{sidecar}/snapshot"))["configs"]
    learned = configs[0]["targets"]["step_time"]["models"]["portable"]["features"][0]
    for key, value in json.loads(shown).items():
        assert learned[key] == (pytest.approx(value, rel=5e-3) if isinstance(value, float | int) else value), key


def test_every_line_of_python_says_what_stands_below_it(sidecar):
    example = doctest.DocTestParser().get_doctest(TEXT.replace(LEFT, sidecar), {}, "quickstart.md", "tutorial", 0)
    assert len(example.examples) > 4
    out = []
    result = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example, out=out.append)
    assert not result.failed, "".join(out)


def test_the_status_page_has_what_the_tutorial_says_of_it(sidecar):
    page = page_of(sidecar)
    for title in re.findall(r"^\* \*(.+?)\*:", TEXT, re.MULTILINE):
        assert title in page
