"""What stands in the product is used by the product: nothing is kept for tests alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tracefit
from tests.contract.test_architecture import MODULES, nodes, parse
from tests.support.paths import ROOT

TEMPLATES = sorted((ROOT / "exporters" / "templates").glob("*.j2"))
CALLED_BY_LIBRARIES = {"convert", "parse_args", "readable", "redirect_request"}
"""Methods of click, io and urllib that are overridden."""


def defined(path: Path) -> Iterator[tuple[str, str]]:
    """Name, and how it is told: functions and classes of the module, methods of its classes."""
    for node in nodes(path):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.name
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("__"):
                    yield inner.name, f"{node.name}.{inner.name}"
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef) and not is_command(node):
            yield node.name, node.name


def is_command(node: ast.FunctionDef) -> bool:
    """It is registered as a command by its decorator: users call it."""
    calls = (each.func for each in node.decorator_list if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr in {"command", "group"} for each in calls)


def used(path: Path) -> Iterator[str]:
    """Names that are read, imported but by a face, or stand in a text by which a library or getattr finds them."""
    is_face = path.name == "__init__.py"
    for node in nodes(path):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not is_face:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_face:
            yield node.value


def test_whatever_is_defined_in_the_product_is_used_by_the_product():
    names = {name for path in MODULES for name in used(path)}
    names |= {word for path in TEMPLATES for word in re.findall(r"\w+", path.read_text())}
    names |= {*tracefit.__all__, *CALLED_BY_LIBRARIES}
    alone = {told for path in MODULES for name, told in defined(path) if name not in names}
    assert alone == set()
