"""docs/configuration.md is what the code says: every key, its meaning, values and default."""

from __future__ import annotations

import re

from collector.config import every_key, load
from tests.support.docs_tables import assert_table, make_table
from tests.support.paths import DOCS

DOCUMENT = "configuration.md"


def test_every_key_stands_in_the_table():
    rows = [(f"`{key.name}`", key.meaning, key.values, f"`{key.default}`") for key in every_key()]
    assert_table(DOCUMENT, "configuration", make_table(["key", "what it does", "values", "default"], rows))


def test_the_examples_are_configurations(tmp_path):
    for example in re.findall(r"```yaml\n(.*?)```", (DOCS / DOCUMENT).read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / "tracefit.yaml").write_text(example)
        assert load(tmp_path / "tracefit.yaml", {}) != load(None, {})
