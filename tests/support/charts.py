"""The few words of Helm's templates that our chart is written in, so that it is rendered where there is no helm.

Words: ``if``, ``else``, ``end``; ``.Values``, ``.Release``, ``.Chart``; strings, parentheses and pipes; the functions
below. Any other word is an error. Where helm is installed, a test holds this against it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"(?:\s*\{\{-|\{\{)(.*?)\}\}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[()|]|[^\s()|]+')


class ChartError(Exception):
    """What ``fail`` says."""


def merged(below: Any, above: Any) -> Any:
    """Values as helm merges them: maps key by key."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


def rendered(chart: Path, values: dict[str, Any], release: str = "gate") -> list[dict[str, Any]]:
    """The documents that the chart makes of these values."""
    defaults = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    context = {
        "Values": merged(defaults, values),
        "Release": {"Name": release, "Namespace": "llm"},
        "Chart": {"AppVersion": about["appVersion"]},
    }
    files = sorted(chart.glob("templates/*.yaml"))
    texts = [template_text(path.read_text(encoding="utf-8"), context) for path in files]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def template_text(template: str, context: dict[str, Any]) -> str:
    """One template, rendered."""
    out, shown, position = "", [True], 0
    for action in _ACTION.finditer(template):
        text, position = template[position : action.start()], action.end()
        if all(shown):
            out += text
        words = _WORD.findall(action[1])
        if words[0] == "if":
            shown.append(all(shown) and bool(_value(_stages(iter(words[1:])), context)))
        elif words == ["else"]:
            shown[-1] = not shown[-1]
        elif words == ["end"]:
            shown.pop()
        elif all(shown):
            out += str(_value(_stages(iter(words)), context))
    return out + template[position:]


def _stages(words: Iterator[str]) -> list[list[Any]]:
    """A pipeline: words of each stage, a pipeline in parentheses in the place of a word."""
    stages: list[list[Any]] = [[]]
    for word in words:
        if word == ")":
            break
        if word == "|":
            stages.append([])
        else:
            stages[-1].append(_stages(words) if word == "(" else word)
    return stages


def _value(stages: list[list[Any]], context: dict[str, Any]) -> Any:
    """What a pipeline gives: each function takes what the one before gave as its last argument."""
    given: list[Any] = []
    for stage in stages:
        function = _FUNCTIONS.get(str(stage[0]))
        operands = [_operand(word, context) for word in stage[bool(function) :]]
        given = [function(*operands, *given)] if function else operands
    (result,) = given
    return result


def _operand(word: Any, context: dict[str, Any]) -> Any:
    if isinstance(word, list):
        return _value(word, context)
    if word.startswith("."):
        found: Any = context
        for key in word[1:].split("."):
            found = found[key]
        return found
    return json.loads(word)


def _fail(text: str) -> str:
    raise ChartError(text)


def _to_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=False).strip()


_FUNCTIONS = {
    "default": lambda instead, value: value or instead,
    "fail": _fail,
    "nindent": lambda spaces, text: "\n" + "\n".join(" " * spaces + line for line in text.splitlines()),
    "not": lambda value: not value,
    "or": lambda first, second: first or second,
    "printf": lambda form, *values: form.replace("%v", "%s") % values,
    "quote": json.dumps,
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "toYaml": _to_yaml,
}
