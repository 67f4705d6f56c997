"""Start-up guard: packages with everyday names must be ours.

Two distributions that own the same top-level package overwrite each other silently, and pip check sees nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from collector.config import ConfigError

PACKAGES = ("collector", "online", "exporters", "tracefit")


def package_files() -> dict[str, str]:
    """Where Python would import each of our packages from."""
    specs = {name: find_spec(name) for name in PACKAGES}
    return {name: (spec.origin or "a namespace package") if spec else "nowhere" for name, spec in specs.items()}


def check_packages(files: Mapping[str, str]) -> None:
    """All packages lie beside this one, or ConfigError names the foreign path."""
    home = Path(__file__).resolve().parents[2]
    for name, file in files.items():
        if Path(file).resolve().parent.parent != home:
            problem = f"comes from {file}, not from {home}: another distribution owns the name; use an own environment"
            raise ConfigError(f"package {name}", problem)
