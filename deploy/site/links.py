# ruff: noqa: INP001 - a script that mkdocs loads
"""A hook of mkdocs: links that leave docs/ name the file instead, since a site has no checkout around it."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\((?:\.\./)+(?P<path>[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """A page's text with such links replaced."""

    def named(link: re.Match[str]) -> str:
        text, path = link["text"], link["path"]
        return text if path in text.strip("`") else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)
