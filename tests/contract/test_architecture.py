"""The plan of the house: rooms, faces, names, sizes. Arrows between rooms are held by import-linter."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("collector", "exporters", "online", "tracefit")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FACES = [path for path in MODULES if path.name == "__init__.py"]
MODULE_LINES, FUNCTION_LINES = 600, 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SIDE_DOORS = {
    # Each command is imported when it runs: a face would import them all.
    "collector/cli.py": {
        "collector.commands.ask",
        "collector.commands.demo",
        "collector.commands.doctor",
        "collector.commands.export",
        "collector.commands.arguments",
        "collector.commands.replay",
        "collector.evaluate.command",
        "collector.evaluate.donors",
        "collector.fleet.replay",
        "collector.fleet.service",
        "collector.fleet.pull",
    },
}
"""Modules that are entered beside their room's face, by who does."""
FACELESS = ("exporters",)
"""A face would make every command load all exporters: each of their modules is entered by its own name."""


ROOMS_OF_ONE_MODULE = {
    "collector.decode.fpm",
    "collector.decode.kv",
    "collector.decode.pages",
    "collector.ingest.zmq",
    "collector.ingest.otlp_grpc",
    "collector.ingest.otlp_http",
    "collector.ingest.scrape",
    "collector.runtime.http",
    "online.state",
}
"""A room that is one module is its own face, and so is a transport, whose library only a server pays for."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a module's, at any depth."""
    return tuple(ast.walk(parse(path)))


def room_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts[:-1]


def is_module(parts: tuple[str, ...]) -> bool:
    return ROOT.joinpath(*parts).with_suffix(".py").is_file()


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Modules and rooms of ours that a module imports, as parts of their dotted names."""
    room = room_of(path)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = room[: len(room) - node.level + 1] if node.level else ()
            target = (*above, *(node.module or "").split(".")) if node.module else above
            modules = [(*target, alias.name) for alias in node.names if is_module((*target, alias.name))]
            yield from modules or [target]


@cache
def face_of(room: tuple[str, ...]) -> list[str]:
    """Names in a face's ``__all__``."""
    for node in parse(ROOT.joinpath(*room, "__init__.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def beside_the_face(path: Path, target: tuple[str, ...]) -> bool:
    """Whether an import enters another room than its own and those above it, and not by the face."""
    room = target[:-1]
    if (
        ".".join(target) in ROOMS_OF_ONE_MODULE
        or target[0] not in PACKAGES
        or not is_module(target)
        or room_of(path)[: len(room)] == room
        or room == FACELESS
    ):
        return False
    return target[-1] not in face_of(room)


def test_another_room_is_entered_by_its_face():
    entered = {
        named(path): {".".join(target) for target in imported(path) if beside_the_face(path, target)}
        for path in MODULES
    }
    beside = {module: doors for module, doors in entered.items() if doors}
    assert beside == SIDE_DOORS, "what is no longer entered leaves SIDE_DOORS"


@pytest.mark.parametrize("face", FACES, ids=named)
def test_a_face_lists_what_it_gives_and_gives_what_it_lists(face):
    tree, listed = parse(face), face_of(room_of(face))
    taken = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    module = importlib.import_module(".".join(room_of(face)))
    assert [name for name in listed if not hasattr(module, name)] == []
    assert listed == sorted(listed, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert taken - used <= set(listed)


def test_a_module_says_what_it_is_and_stays_small():
    assert [named(path) for path in MODULES if not ast.get_docstring(parse(path))] == []
    assert [named(path) for path in MODULES if len(path.read_text().splitlines()) > MODULE_LINES] == []
    functions = [(named(path), node) for path in MODULES for node in nodes(path) if isinstance(node, FUNCTIONS)]
    lines = {f"{module}: {node.name}": node.end_lineno - node.lineno + 1 for module, node in functions}
    assert {name for name, length in lines.items() if length > FUNCTION_LINES} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "bench").glob("*.py")), ids=named)
def test_every_bench_can_be_imported(path):
    """Nothing else notices, before a bench is run, that what it measures bears another name."""
    importlib.import_module(f"tests.bench.{path.stem}")


def test_nothing_in_the_checkout_reaches_outside_of_it():
    leading_up = []
    for pattern in ("Makefile", ".ci/run", "*.md", "docs/*.md", "**/*.py"):
        for path in ROOT.glob(pattern):
            if ".venv" not in path.parts:
                marks = ("ROOT." + "parent", "../" + "shared", "/" + "work/")
                leading_up += [f"{named(path)}: {mark}" for mark in marks if mark in path.read_text()]
    assert leading_up == []


HACKS = re.compile(r"sys\.modules|SCHED_|sched_yield|GRPC_EXPERIMENTS|/proc/self/fd|gc\.(disable|freeze)")
"""Reaching into the interpreter, the scheduler of the system or the insides of a library."""


def test_the_product_reaches_into_nothing():
    plugin = (ROOT / "deploy" / "vllm-plugin" / "tracefit_vllm").glob("*.py")
    assert [named(path) for path in (*MODULES, *plugin) if HACKS.search(path.read_text())] == []


CLOCKS = {
    "collector/runtime/tasks.py": 2,
    "tracefit/configured.py": 1,
    "tracefit/loading.py": 1,
}
"""Who reads one, and how often: the clock that all others are handed, a client's own."""


def test_the_product_reads_no_clock_but_where_it_is_handed_in():
    reads = re.compile(r"\b(?:time\.(?:time|monotonic|perf_counter)(?:_ns)?|datetime\.now)\(")
    found = {named(path): len(reads.findall(path.read_text())) for path in MODULES}
    assert {path: count for path, count in found.items() if count and "/evaluate/" not in path} == CLOCKS
