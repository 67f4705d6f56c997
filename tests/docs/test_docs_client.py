"""docs/client.md: every example gives what it says, on the hand-made snapshot, over HTTP."""

from __future__ import annotations

import doctest

import pytest

from tests.support.paths import DOCS
from tests.tracefit.example_snapshot import encoded
from tests.tracefit.test_load import serving

TEXT = (DOCS / "client.md").read_text(encoding="utf-8")


@pytest.fixture
def sidecar():
    with serving(lambda page: page.send(body=encoded(), ETag='"a"')) as (_, url):
        yield url


def test_the_examples_run(sidecar):
    text = TEXT.replace("http://localhost:9464", sidecar)
    test = doctest.DocTestParser().get_doctest(text, {}, "client.md", "docs/client.md", 0)
    assert len(test.examples) > 10
    said = []
    found = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not found.failed, "".join(said)
