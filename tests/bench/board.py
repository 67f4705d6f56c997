"""What every bench is: sections that print numbers beside their targets, by a command line that all of them share.

    python -m tests.bench.bench_X [SECTION...] [--tools DIR] [--tables DIR] [--captures DIR]

--tools     independent judges: score/{split,score,gate,capture}.py with score/thresholds.json, replay.py,
            requests_to_otlp.py; they know recordings by the names that tests/data has
--tables    request tables of measured servers: configs.json and a table per experiment
--captures  more recordings than tests/data has, a directory each, with the client's own clock

A section that needs what was not named is skipped, loudly. The exit status is 1 if a number misses its target.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from tests.bench.figures import record
from tests.support.paths import DATA

DIRECTORIES = ("tools", "tables", "captures")


class Board:
    """Prints each number as it comes, and remembers those that missed their targets.

    Attributes:
        tools, tables: the directories that were named, None without.
        captures: the same, tests/data without.
        missed: names of numbers.
        figures: numbers for docs/figures.json; ``[number, target]`` where there is one.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.tools, self.tables, self.captures = options.tools, options.tables, options.captures or DATA
        self.missed: list[str] = []
        self.figures: dict[str, float | list[float]] = {}

    def line(self, name: str, value: object, target: str = "", good: bool | None = None, note: str = "") -> None:
        """One number; ``good`` is None where it has no target."""
        if good is False:
            self.missed.append(name)
        mark = {True: "ok", False: "MISSED", None: ""}[good]
        print(f"{mark:<7}{name:<78} {value!s:>12}  {target:<16} {note}".rstrip(), flush=True)

    def at_most(self, name: str, value: float, limit: float, unit: str = "", note: str = "") -> None:
        """A number that may not be above its target."""
        self.figures[name] = [value, limit]
        self.line(name, f"{value:.2f}{unit}", f"<= {limit:g}{unit}", bool(value <= limit), note)

    def keep(self, name: str, value: float, unit: str = "") -> None:
        """A number without a target."""
        self.figures[name] = value
        self.line(name, f"{value:.2f}{unit}")

    def score(self, name: str) -> ModuleType:
        """A module of the scorer, which imports its neighbours by name."""
        return module_at(self.tools / "score" / f"{name}.py")

    def experiments(self) -> dict[str, dict]:
        """Configurations of the request tables by experiment."""
        return json.loads((self.tables / "configs.json").read_text())

    def as_otlp(self, experiment: str, out: Path, *options: str) -> Path:
        """A request table as the exports of a stock vLLM."""
        command = [sys.executable, self.tools / "requests_to_otlp.py", experiment, out, "--data", self.tables, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return out


Sections = Mapping[str, Callable[[Board], None]]


def run(
    description: str | None,
    sections: Sections,
    needs: Mapping[str, Sequence[str]] = {},
    *,
    recorded_as: str | None = None,
) -> int:
    """The sections that the command line names, all without; figures are recorded by this prefix and their names."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("sections", nargs="*", choices=[[], *sections], help="default: all")
    for name in DIRECTORIES:
        parser.add_argument(f"--{name}", type=_directory)
    if recorded_as is not None:
        parser.add_argument("--record", action="store_true", help="write the figures to docs/figures.json")
    options, missed = parser.parse_args(), list[str]()
    for name in options.sections or sections:
        board = Board(options)
        lacking = [f"--{need}" for need in needs.get(name, ()) if getattr(options, need) is None]
        if lacking:
            board.line(name, "SKIPPED", note=f"needs {', '.join(lacking)}")
            continue
        print(f"\n{name}")
        sections[name](board)
        missed += board.missed
        if recorded_as is not None and options.record:
            record(f"{recorded_as}{name}", board.figures)
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return 1 if missed else 0


def _directory(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return path


def module_at(path: Path) -> ModuleType:
    """A module of a tool from outside."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
