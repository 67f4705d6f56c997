"""The site has every document once, and no link that leads out of it."""

from __future__ import annotations

import importlib.util
import re

import yaml

from tests.support.paths import DOCS, ROOT


def navigated(entries):
    for entry in entries:
        for value in entry.values():
            yield from navigated(value) if isinstance(value, list) else [value]


def test_every_document_is_in_the_navigation_once():
    text = re.sub(r"!!python/name:\S+", "null", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = list(navigated(yaml.safe_load(text)["nav"]))
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md"))


def test_a_link_out_of_the_documents_names_the_file():
    spec = importlib.util.spec_from_file_location("links", ROOT / "deploy" / "site" / "links.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "see [`deploy/x`](../deploy/x) and [the plugin](../deploy/p/README.md#a), [here](index.md)"
    assert hook.on_page_markdown(text) == "see `deploy/x` and the plugin (`deploy/p/README.md`), [here](index.md)"
