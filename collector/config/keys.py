"""Every key with what it means, what it takes and what holds without it: for documents and suggestions."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from .load import ConfigError, suggestion
from .schema import Config, Section, entry_of

_WIDTH = 100
_KINDS = {"object": "mapping", "null": "nothing", "boolean": "`true`, `false`", "string": "text"}
_BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


class Key(NamedTuple):
    """A key of the configuration.

    Attributes:
        name: dotted; ``[]`` stands for an entry of a list.
        meaning: a sentence or two.
        values: what it takes.
        default: as JSON; None if it has to be given.
    """

    name: str
    meaning: str
    values: str
    default: str | None


class SectionKeys(NamedTuple):
    """A level of the configuration: its dotted name, empty at the top, what it is for, and its own keys."""

    name: str
    meaning: str
    keys: list[Key]


def sections(section: type[Section] = Config, name: str = "") -> Iterator[SectionKeys]:
    """Every level in the order of the schema, those of list entries behind the list's."""
    schema = msgspec.json.schema(section)["$defs"][section.__name__]["properties"]
    below: list[tuple[type[Section], str]] = []
    keys = []
    for field in msgspec.structs.fields(section):
        path = f"{name}.{field.name}" if name else field.name
        entry = entry_of(field.type)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            below.append((field.type, path))
            continue
        if entry is not None:
            below.append((entry, f"{path}[]"))
        keys.append(_key(path, field, schema[field.name]))
    yield SectionKeys(name, inspect.getdoc(section) or "", keys)
    for each, path in below:
        yield from sections(each, path)


def explain_key(name: str) -> str:
    """What a key or a section means, as text.

    Raises:
        ConfigError: nothing has this name.
    """
    known = list(sections())
    for section in known:
        if name == section.name:
            lines = [f"{key.name}  {_without_ticks(key.meaning)}" for key in section.keys]
            return "\n".join([_without_ticks(section.meaning), "", *lines]).strip()
        for key in section.keys:
            if name == key.name:
                return _describe_key(key)
    names = [section.name for section in known] + [key.name for section in known for key in section.keys]
    raise ConfigError("--key", f"there is no key {name!r}{suggestion(name, names)}")


def _describe_key(key: Key) -> str:
    facts = [
        ("takes", _without_ticks(key.values)),
        ("default", key.default if key.default is not None else "none: it has to be given"),
        ("variable", f"TRACEFIT_{key.name.replace('.', '__').upper()}"),
    ]
    if "[]" in key.name:
        facts.pop(2)
    meaning = textwrap.fill(_without_ticks(key.meaning), _WIDTH)
    return "\n".join([key.name, meaning, *(f"  {name:<9} {value}" for name, value in facts)])


def _without_ticks(text: str) -> str:
    return text.replace("`", "")


def _key(path: str, field: msgspec.structs.FieldInfo, schema: dict[str, Any]) -> Key:
    default = None
    if field.default is not msgspec.NODEFAULT:
        default = json.dumps(msgspec.to_builtins(field.default))
    elif field.default_factory is not msgspec.NODEFAULT:
        default = json.dumps(field.default_factory())
    return Key(path, schema["description"], values_of(schema), default)


def values_of(schema: dict[str, Any]) -> str:
    """What a value may be, out of its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(values_of(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "title" in schema:
        return str(schema["title"])
    kind = schema.get("type", "mapping")
    if kind == "array":
        return f"list, {schema.get('minItems', 0)} to {schema['maxItems']}" if "maxItems" in schema else "list"
    bounds = ", ".join(f"{sign} {schema[bound]:,}" for bound, sign in _BOUNDS if bound in schema)
    return f"{_KINDS.get(kind, kind)} {bounds}".strip()
