"""docs/configuration.md is what the code says: every key, its meaning, values and default."""

from __future__ import annotations

import pytest
import yaml

from collector.config import every_key, load
from tests.support.docs_tables import assert_table, make_table
from tests.support.paths import DOCS

DOCUMENT = "configuration.md"


def test_every_key_stands_in_the_table():
    rows = [(f"`{key.name}`", key.meaning, key.values, f"`{key.default}`") for key in every_key()]
    assert_table(DOCUMENT, "configuration", make_table(["key", "what it does", "values", "default"], rows))


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_are_configurations(tmp_path, number):
    text = (DOCS / DOCUMENT).read_text(encoding="utf-8")
    example = text.split("```yaml\n")[number + 1].split("```", 1)[0]
    (tmp_path / "tracefit.yaml").write_text(example)
    load(tmp_path / "tracefit.yaml", {})
    assert yaml.safe_load(example)
