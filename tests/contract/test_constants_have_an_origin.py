"""Each number that the learner is tuned by says where it comes from, and there are no more of them than there were."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CONSTANTS_MAX = 120
"""What there is today; whoever takes one out lowers it."""
ORIGIN = re.compile(r"\b(Chosen|Derived|Format|Guard|Guess|Measured|Source)\b[:.]")
"""A guess is an origin as well, so that nobody takes it for more."""


def constants(path: Path) -> Iterator[tuple[str, int, str]]:
    """Of each assignment at the top of a module that has numbers: its place, how many, and the comment above it."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        count = sum(isinstance(value, ast.Constant) and type(value.value) in (int, float) for value in values)
        above = takewhile(lambda line: line.startswith("# "), reversed(lines[: node.lineno - 1]))
        if count:
            yield f"{path.relative_to(ROOT)}: {lines[node.lineno - 1]}", count, " ".join(above)


@pytest.fixture(scope="module")
def found():
    return [each for path in sorted((ROOT / "online").rglob("*.py")) for each in constants(path)]


def test_each_constant_of_the_learner_says_where_it_comes_from(found):
    assert [place for place, _, comment in found if not ORIGIN.search(comment)] == []


def test_the_learner_has_no_more_constants_than_it_had(found):
    assert sum(count for _, count, _ in found) <= CONSTANTS_MAX
