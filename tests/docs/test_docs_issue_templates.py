"""Issue templates are forms that a forge takes, and name only commands and files that exist."""

from __future__ import annotations

import re

import pytest
import yaml

from collector.cli import _parser
from tests.support.paths import ROOT

TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FORMS = [path for path in TEMPLATES if path.name != "config.yml"]


def test_there_is_one_for_a_defect_a_question_and_a_source():
    assert {path.stem for path in FORMS} == {"bug", "question", "telemetry-source"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_a_forge_asks_for(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input"}
        assert field["attributes"].get("value") if field["type"] == "markdown" else field["attributes"]["label"]
    assert any(field.get("validations", {}).get("required") is True for field in fields)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_what_a_form_names_exists(path):
    text = path.read_text(encoding="utf-8")
    known = set(_parser()._subparsers._group_actions[0].choices)
    assert set(re.findall(r"`tracefit ([a-z-]+)", text)) - {"--version"} <= known
    files = set(re.findall(r"\b(?:docs/[\w-]+\.md|[A-Z]+\.md)", text))
    assert all((ROOT / name).is_file() for name in files)
