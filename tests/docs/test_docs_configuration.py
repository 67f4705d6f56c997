"""docs/configuration.md is what the code says: every key, its values, its default, and whether it needs a restart."""

from __future__ import annotations

import inspect
import json

import msgspec
import pytest
import yaml

from collector.config.load import load
from collector.config.reload import RELOADABLE
from collector.config.schema import Config
from tests.support.docs_tables import assert_table, make_table
from tests.support.paths import DOCS

DOCUMENT = "configuration.md"
TOP_LEVEL = "configuration"


def sections(struct, above=""):
    """Dotted name and type of every level, the top first."""
    yield above, struct
    for field in msgspec.structs.fields(struct):
        if is_section(field.type):
            yield from sections(field.type, f"{above}{field.name}.")


def is_section(kind):
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def values_of(schema):
    """What a value may be, out of its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(values_of(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("description"):
        return schema["description"]
    kind = schema.get("type", "mapping")
    if kind == "array":
        return f"list, {schema.get('minItems', 0)} to {schema['maxItems']}" if "maxItems" in schema else "list"
    bounds = [
        f"{sign} {schema[key]:,}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in schema
    ]
    names = {"object": "mapping", "null": "nothing", "boolean": "`true`, `false`", "string": "text"}
    return " ".join([names.get(kind, kind), ", ".join(bounds)]).strip()


def rows(struct, above):
    schema = msgspec.json.schema(struct)
    keys = schema["$defs"][struct.__name__]["properties"]
    for field in msgspec.structs.fields(struct):
        if not is_section(field.type):
            name = f"{above}{field.name}"
            default = json.dumps(msgspec.to_builtins(field.default if field.default is not msgspec.NODEFAULT else {}))
            when = "at once" if name.startswith(RELOADABLE) else "restart"
            yield f"`{name}`", values_of(keys[field.name]), f"`{default}`", when


@pytest.mark.parametrize(("above", "struct"), list(sections(Config)), ids=lambda each: each if each != "" else "top")
def test_every_key_stands_in_its_table(above, struct):
    name = above.rstrip(".") or TOP_LEVEL
    listed = list(rows(struct, above))
    if listed:
        table = make_table(["key", "values", "default", "a change needs"], listed)
        assert_table(DOCUMENT, name, f"{inspect.getdoc(struct)}\n\n{table}")


def test_the_example_is_a_configuration(tmp_path):
    text = (DOCS / DOCUMENT).read_text(encoding="utf-8")
    example = text.split("```yaml\n", 1)[1].split("```", 1)[0]
    (tmp_path / "tracefit.yaml").write_text(example)
    load(tmp_path / "tracefit.yaml", {})
    assert yaml.safe_load(example)
