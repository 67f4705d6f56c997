"""Knowledge beside the telemetry: rules of our configuration, data sheets, config.json files, discovered facts.

Everything that has to be read is read at start, bounded and checked; a file that lies is a ConfigError that names the
key. ``apply`` then only looks up, and does nothing when nothing has changed since the engine's last export.
"""

from __future__ import annotations

import fnmatch
import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from collector.config import ConfigError, ConfigurationsConfig, RuleConfig
from online.features.sheets import HardwareSheet, SheetError, architecture, find, hardware_sheets, model_sheet

from .facts import BESIDE, HARDWARE, IDENTITY, TEXT_CHARS_MAX, Fact, Facts, FactSource, resource_facts

MODEL_FILE_BYTES_MAX = 4 * 2**20
"""The largest config.json in the wild is some hundred kB; more is something else."""

MATCHABLE = ("instance", "recording", *IDENTITY)

_FP8 = frozenset({"fp8", "fbgemm_fp8", "fp8_e4m3"})


class _Rule:
    """A rule with its file read."""

    def __init__(self, config: RuleConfig, where: str, arch: Mapping[str, Fact] | None) -> None:
        for name in config.match:
            if name not in MATCHABLE:
                raise ConfigError(f"{where}.match.{name}", f"is not one of {', '.join(MATCHABLE)}")
        for name in config.facts:
            if name not in (*IDENTITY, *BESIDE, *HARDWARE):
                raise ConfigError(f"{where}.facts.{name}", "is no fact of a configuration")
        self.patterns = config.match
        self.facts = config.facts
        self.architecture = arch

    def matches(self, known: Mapping[str, Fact]) -> bool:
        """Whether every pattern holds; an unknown fact matches nothing."""
        return all(
            name in known and fnmatch.fnmatchcase(str(known[name]), pattern) for name, pattern in self.patterns.items()
        )


class Knowledge:
    """Tells engines what they did not say; one instance for all of them."""

    def __init__(self, config: ConfigurationsConfig | None = None) -> None:
        config = config or ConfigurationsConfig()
        self._sheets = shipped_sheets()
        if config.hardware_file is not None:
            self._sheets |= _own_sheets(config.hardware_file)
        self._rules = [
            _Rule(rule, f"configurations.rules[{i}]", _architecture(f"configurations.rules[{i}]", rule.model_config))
            for i, rule in enumerate(config.rules)
        ]
        self._model = _architecture("configurations", config.model_config)
        self._discovered: tuple[tuple[str, Mapping[str, Fact]], ...] = ()
        self._seen: dict[tuple[str, str], tuple[object, ...]] = {}

    def replace_rules(self, config: ConfigurationsConfig) -> None:
        """Rules and files of another configuration from now on; ConfigError leaves everything as it is.

        What engines have been told stays known: a fact that is taken out of the rules is forgotten with a restart.
        """
        other = Knowledge(config)
        self._sheets, self._model = other._sheets, other._model
        self._rules = other._rules  # last: a new list is what makes `apply` look again

    def __deepcopy__(self, memo: dict[int, Any]) -> Knowledge:
        """Copies of a pipeline share it: it holds no telemetry."""
        return self

    def discovered(self, pattern: str, facts: Mapping[str, Fact]) -> None:
        """What a server said about the engines whose instance matches; from the discovery's thread."""
        others = tuple(item for item in self._discovered if item[0] != pattern)
        self._discovered = (*others, (pattern, dict(facts)))

    def apply(self, facts: Facts, attributes: Mapping[str, str], instance: str, recording: str) -> bool:
        """Teach an engine's facts all that is known of it; returns whether anything changed."""
        rules = self._rules
        seen = (attributes, self._discovered, rules, facts.version)
        if self._seen.get((recording, instance)) == seen:
            return False
        before = facts.version
        facts.learn(resource_facts(attributes), FactSource.RESOURCE)
        if not recording:
            for pattern, found in self._discovered:
                if fnmatch.fnmatchcase(instance, pattern):
                    facts.learn(found, FactSource.DISCOVERY)
        self._apply_rules(facts, instance, recording)
        self._apply_sheets(facts)
        if len(self._seen) > _SEEN_MAX:
            self._seen.clear()
        self._seen[recording, instance] = (dict(attributes), self._discovered, rules, facts.version)
        return facts.version != before

    def _apply_rules(self, facts: Facts, instance: str, recording: str) -> None:
        arch = self._model
        for rule in self._rules:  # a later rule of the file wins over an earlier one
            if rule.matches({**facts.known(), "instance": instance, "recording": recording}):
                facts.learn(rule.facts, FactSource.RULES)
                arch = rule.architecture or arch
        if arch is not None:
            facts.learn(_with_dtype(arch, facts), FactSource.MODEL_FILE)

    def _apply_sheets(self, facts: Facts) -> None:
        gpu = facts.get("gpu")
        sheet = find(self._sheets, gpu) if isinstance(gpu, str) else None
        if sheet is not None:
            facts.learn(sheet.facts(compute_dtype(facts)), FactSource.SHEET)


_SEEN_MAX = 4096


def compute_dtype(facts: Facts) -> str:
    """The dtype that matrices are multiplied in, by the names of a sheet's peaks."""
    if str(facts.get("quantization")) in _FP8:
        return "fp8"
    dtype = facts.get("dtype")
    if isinstance(dtype, str) and dtype != "auto":
        return dtype
    return "float32" if facts.get("element_bytes") == 4.0 else "auto"  # noqa: PLR2004  bytes of a float32


def _with_dtype(arch: Mapping[str, Fact], facts: Facts) -> dict[str, Fact]:
    """The server's ``--dtype`` and ``--quantization`` say more than the file."""
    out = dict(arch)
    width = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}.get(str(facts.get("dtype")))
    if width is not None:
        if out.get("weight_element_bytes") == out.get("element_bytes"):
            out["weight_element_bytes"] = width
        out["element_bytes"] = width
    if str(facts.get("quantization")) in _FP8:
        out["weight_element_bytes"] = 1.0
    return out


def shipped_sheets() -> dict[str, HardwareSheet]:
    """The table that comes with the program."""
    text = importlib.resources.files("online.features.sheets").joinpath("hardware.json").read_bytes()
    return hardware_sheets(msgspec.json.decode(text))


def _own_sheets(path: str) -> dict[str, HardwareSheet]:
    key = "configurations.hardware_file"
    try:
        return hardware_sheets(read_json(Path(path)))
    except (SheetError, FileRefused) as error:
        raise ConfigError(key, f"{path}: {error}") from None


def _architecture(where: str, path: str | None) -> Mapping[str, Fact] | None:
    if path is None:
        return None
    try:
        return read_architecture(Path(path))
    except (SheetError, FileRefused) as error:
        raise ConfigError(f"{where}.model_config", f"{path}: {error}") from None


class FileRefused(ValueError):
    """A file that cannot be what it should be; the text says why."""


def read_architecture(path: Path) -> dict[str, Fact]:
    """The architecture in a config.json, or in a directory that has one.

    Raises:
        FileRefused: it cannot be read, is too large, or is not JSON.
        SheetError: it contradicts itself.
    """
    arch = architecture(read_json(path / "config.json" if path.is_dir() else path))
    return {name: value[:TEXT_CHARS_MAX] if isinstance(value, str) else value for name, value in arch.items()}


def read_json(path: Path) -> Any:
    """A small JSON file.

    Raises:
        FileRefused: it cannot be read, is too large, or is not JSON.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MODEL_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise FileRefused(f"cannot be read: {error.strerror}") from None
    if len(data) > MODEL_FILE_BYTES_MAX:
        raise FileRefused(f"larger than {MODEL_FILE_BYTES_MAX >> 20} MiB")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FileRefused(f"not JSON: {str(error) or type(error).__name__}") from None


def cannot_derive(facts: Mapping[str, Fact]) -> tuple[str, ...]:
    """What is missing for the systems that need a sheet; nothing when they can be used."""
    try:
        _, missing = model_sheet(architecture(facts))
    except SheetError as error:
        return (str(error),)
    return missing + tuple(name for name in ("peak_tflops", "memory_bandwidth_gb_s") if name not in facts)
