# ruff: noqa: INP001 - a script that mkdocs loads
"""A hook of mkdocs: links that leave docs/ name the file, since a site has no checkout; tables of code are added."""

from __future__ import annotations

import json
import re
from pathlib import Path

_TABLES = Path(__file__).parents[2] / "build" / "system_tables.json"
_TABLE = re.compile(r"<!-- table: (\w+) -->\n(?!\|)")
_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\((?:\.\./)+(?P<path>[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """A page's text with such links replaced, and with the tables that it names."""
    tables: dict[str, str] = json.loads(_TABLES.read_text(encoding="utf-8")) if _TABLE.search(markdown) else {}

    def named(link: re.Match[str]) -> str:
        text, path = link["text"], link["path"]
        return text if path in text.strip("`") else f"{text} (`{path}`)"

    filled = _TABLE.sub(lambda place: f"{place[0]}\n{tables.get(place[1], '')}\n", markdown)
    return _OUTSIDE.sub(named, filled)
