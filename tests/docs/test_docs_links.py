"""Links between the documents lead somewhere, and the README leads to every document."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def links_of(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    return [link for link in found if not link.startswith(("http://", "https://", "mailto:"))]


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
