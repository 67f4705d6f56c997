"""docs/configuration.md is what the code says: every key, its meaning, values and default."""

from __future__ import annotations

import pytest
import yaml

from collector.config.keys import sections
from collector.config.load import load
from tests.support.docs_tables import assert_table, make_table
from tests.support.paths import DOCS

DOCUMENT = "configuration.md"
TOP_LEVEL = "configuration"


def rows(keys):
    for key in keys:
        default = "to be given" if key.default is None else f"`{key.default}`"
        yield f"`{key.name}`", key.meaning, key.values, default


@pytest.mark.parametrize("section", list(sections()), ids=lambda section: section.name or "top")
def test_every_key_stands_in_its_table(section):
    if section.keys:
        table = make_table(["key", "what it does", "values", "default"], list(rows(section.keys)))
        assert_table(DOCUMENT, section.name or TOP_LEVEL, f"{section.meaning}\n\n{table}")


def test_the_example_is_a_configuration(tmp_path):
    text = (DOCS / DOCUMENT).read_text(encoding="utf-8")
    example = text.split("```yaml\n", 1)[1].split("```", 1)[0]
    (tmp_path / "tracefit.yaml").write_text(example)
    load(tmp_path / "tracefit.yaml", {})
    assert yaml.safe_load(example)
