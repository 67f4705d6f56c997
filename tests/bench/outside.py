"""What a bench may be given from outside the project, each by an argument; without it the sections that need it say so.

--tools DIR    independent judges: score/{split,score,gate,capture}.py with score/thresholds.json, replay.py,
               requests_to_otlp.py; they know recordings by the names that tests/data has
--tables DIR   request tables of measured servers: configs.json and a table per experiment
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.bench.board import Board


@dataclass(frozen=True)
class Outside:
    """The directories that were named."""

    tools: Path | None = None
    tables: Path | None = None

    def score(self, name: str) -> ModuleType:
        """A module of the scorer, which imports its neighbours by name."""
        assert self.tools is not None
        return _module(self.tools / "score" / f"{name}.py")

    def replay(self) -> ModuleType:
        """The replay of request tables with learned coefficients."""
        assert self.tools is not None
        os.environ["GROUND_TRUTH"] = str(self.tables)
        return _module(self.tools / "replay.py")

    def experiments(self) -> dict[str, dict]:
        """Configurations of the request tables by experiment."""
        assert self.tables is not None
        return json.loads((self.tables / "configs.json").read_text())

    def as_otlp(self, experiment: str, out: Path, *options: str) -> Path:
        """A request table as the exports of a stock vLLM."""
        assert self.tools is not None
        tool, data = str(self.tools / "requests_to_otlp.py"), ("--data", str(self.tables))
        command = [sys.executable, tool, experiment, str(out), *data, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--tools`` and ``--tables``."""
    parser.add_argument("--tools", type=_directory, help="independent scorer and replay")
    parser.add_argument("--tables", type=_directory, help="request tables of measured servers")


def outside_of(options: argparse.Namespace) -> Outside:
    """What the command line named."""
    return Outside(options.tools, options.tables)


def run_sections(
    description: str | None,
    sections: Mapping[str, Callable[[Board, Outside], None]],
    needs: Mapping[str, Sequence[str]],
) -> int:
    """The sections that the command line names, all without; what lacks an argument is skipped. The exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("sections", nargs="*", choices=[[], *sections], help="default: all")
    add_arguments(parser)
    options, board = parser.parse_args(), Board()
    for name in options.sections or sections:
        lacking = [f"--{need}" for need in needs.get(name, ()) if getattr(options, need) is None]
        if lacking:
            board.skip(name, ", ".join(lacking))
        else:
            sections[name](board, outside_of(options))
    return board.end()


def _directory(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return path


def _module(path: Path) -> ModuleType:
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
