"""The few words of Helm's templates that our chart is written in, so that it is rendered where there is no helm.

Words: ``if``, ``else``, ``end``; ``.Values``, ``.Release``, ``.Chart``; strings, parentheses and pipes; the functions
below. Any other word is an error. Where helm is installed, a test holds this against it.
"""

from __future__ import annotations

import hashlib
import json
import re
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
            shown.append(bool(_value(words[1:], context)) if all(shown) else False)
        elif words == ["else"]:
            shown[-1] = not shown[-1]
        elif words == ["end"]:
            shown.pop()
        elif all(shown):
            out += str(_value(words, context))
    return out + template[position:]


def _value(words: list[str], context: dict[str, Any]) -> Any:
    """A pipeline: each function takes what the one before gave as its last argument."""
    value: list[Any] = []
    while words:
        stage, words = _until_pipe(words)
        if stage[0] in _FUNCTIONS:
            value = [_FUNCTIONS[stage[0]](*_operands(stage[1:], context), *value)]
        else:
            value = _operands(stage, context)
    (result,) = value
    return result


def _until_pipe(words: list[str]) -> tuple[list[str], list[str]]:
    depth = 0
    for index, word in enumerate(words):
        depth += {"(": 1, ")": -1}.get(word, 0)
        if word == "|" and not depth:
            return words[:index], words[index + 1 :]
    return words, []


def _operands(words: list[str], context: dict[str, Any]) -> list[Any]:
    values = []
    while words:
        end = 1
        if words[0] == "(":
            while words[:end].count("(") > words[:end].count(")"):
                end += 1
            values.append(_value(words[1 : end - 1], context))
        else:
            values.append(_operand(words[0], context))
        words = words[end:]
    return values


def _operand(word: str, context: dict[str, Any]) -> Any:
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
