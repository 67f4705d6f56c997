"""Links between the documents lead somewhere; the README and the site lead to every document."""

from __future__ import annotations

import importlib.util
import re

import pytest
import yaml

from tests.support.paths import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def links_of(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    return [link for link in found if not link.startswith(("http://", "https://", "mailto:"))]


def navigated(entries):
    for entry in entries:
        for value in entry.values():
            yield from navigated(value) if isinstance(value, list) else [value]


def anchors_of(document):
    heads = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for link in links_of(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), link


def test_the_readme_leads_to_every_document():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links_of(ROOT / "README.md")}
    assert set(DOCUMENTS[1:]) <= linked


def test_every_document_is_in_the_navigation_of_the_site_once():
    text = re.sub(r"!!python/name:\S+", "null", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(navigated(yaml.safe_load(text)["nav"])) == [path.name for path in DOCUMENTS[1:]]


def test_a_link_out_of_the_site_names_the_file():
    spec = importlib.util.spec_from_file_location("links", ROOT / "deploy" / "site" / "links.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "see [`deploy/x`](../deploy/x) and [the plugin](../deploy/p/README.md#a), [here](index.md)"
    assert hook.on_page_markdown(text) == "see `deploy/x` and the plugin (`deploy/p/README.md`), [here](index.md)"
