"""Rules of our configuration: which engines they speak of, and what they say; ConfigError names the key at fault."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path

from collector.config import ConfigError, RuleConfig
from online.features.sheets import HardwareSheet, SheetError, hardware_sheets

from .facts import BESIDE, HARDWARE, IDENTITY, Fact
from .sheet_files import FileRefused, read_architecture, read_json

MATCHABLE = ("instance", "recording", *IDENTITY)


class Rule:
    """A rule with its file read."""

    def __init__(self, config: RuleConfig, where: str) -> None:
        for name in config.match:
            if name not in MATCHABLE:
                raise ConfigError(f"{where}.match.{name}", f"is not one of {', '.join(MATCHABLE)}")
        for name in config.facts:
            if name not in (*IDENTITY, *BESIDE, *HARDWARE):
                raise ConfigError(f"{where}.facts.{name}", "is no fact of a configuration")
        self.patterns = config.match
        self.facts = config.facts
        self.architecture = configured_architecture(where, config.model_config)

    def matches(self, known: Mapping[str, Fact]) -> bool:
        """Whether every pattern holds; an unknown fact matches nothing."""
        return all(
            name in known and fnmatch.fnmatchcase(str(known[name]), pattern) for name, pattern in self.patterns.items()
        )


def configured_sheets(path: str) -> dict[str, HardwareSheet]:
    """The hardware sheets of ``configurations.hardware_file``."""
    key = "configurations.hardware_file"
    try:
        return hardware_sheets(read_json(Path(path)))
    except (SheetError, FileRefused) as error:
        raise ConfigError(key, f"{path}: {error}") from None


def configured_architecture(where: str, path: str | None) -> Mapping[str, Fact] | None:
    """The architecture in the file that a ``model_config`` key names, if there is one."""
    if path is None:
        return None
    try:
        return read_architecture(Path(path))
    except (SheetError, FileRefused) as error:
        raise ConfigError(f"{where}.model_config", f"{path}: {error}") from None
