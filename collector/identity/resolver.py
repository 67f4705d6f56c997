"""Who an engine is: facts and their sources, the rules and files that add some, and the identity they make.

Engines of equal identity share coefficients. ``config_id`` is the first 12 hex digits of the SHA-256 of the identity's
canonical JSON. Unknown facts stay unknown; without a model the emitting instance is part of the identity, so that two
unknown servers are never mixed. When two sources contradict each other the stronger wins.

Rules, data sheets and config.json files are read at start and checked: a file that lies is a ConfigError that names the
key. ``ConfigResolver.apply`` then only looks up, and does nothing when nothing has changed since the
engine's last export.
"""

from __future__ import annotations

import enum
import fnmatch
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from collector.config import Config, ConfigError, read_file, suggestion
from collector.config import Rule as RuleConfig
from online.features import sheets
from online.features.sheets import (
    HardwareSheet,
    architecture,
    bytes_by_name,
    find,
    hardware_sheets,
    quantized,
)

from .experts import Fact, experts_by_name

IDENTITY: tuple[str, ...] = (
    "model",
    "model_root",
    "role",
    "gpu",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel",
    "data_parallel_size",
    "dtype",
    "quantization",
    "vllm_version",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "cpu_offload",
    "async_scheduling",
    "speculative_decoding",
    "enable_lora",
)
"""Facts that make two engines different configurations.

``model_root`` is what the server loaded where ``model`` is an alias. A server that only prefills, or only decodes, has
a ``role``.
"""

BESIDE: tuple[str, ...] = ("num_gpu_blocks", "num_experts", "num_experts_per_tok", "trace_sampling")
"""Facts worth knowing that do not make a configuration."""

HARDWARE: tuple[str, ...] = (
    "peak_tflops",
    "memory_bandwidth_gb_s",
    "memory_gb",
    "sm_count",
    "link_gb_s",
    "host_link_gb_s",
)
"""Facts of a hardware sheet; they follow from ``gpu`` and ``dtype`` unless a rule says otherwise."""

_TEXT_CHARS_MAX = 256

_NUMBER_END = 1 << 63
"""Numeric facts are below this: a state file holds 64 bits, and no knob or data sheet needs more."""

_RESOURCE_NAMES = {"hw.gpu.name": "gpu", "vllm.version": "vllm_version"}


class FactSource(enum.IntEnum):
    """Where a fact comes from; the smaller number wins."""

    RESOURCE = 0
    RULES = 1
    DISCOVERY = 2
    TELEMETRY = 3
    MODEL_FILE = 4
    SHEET = 5
    MODEL_NAME = 6

    @property
    def label(self) -> str:
        """As shown in the snapshot."""
        return self.name.lower()


_FROM_THE_SERVER = (FactSource.RESOURCE, FactSource.DISCOVERY)
"""Sources that are the server itself. Their facts change with the server, others are only corrected."""
_SPELLED_ONCE = ("vllm_version", "tensor_parallel_size")
"""Facts that a resource and discovery spell alike; a model and a GPU may have several names."""

SourcedFacts = dict[str, tuple[FactSource, Fact]]


class EngineFacts:
    """Facts about one engine with their sources."""

    def __init__(self) -> None:
        self._facts: SourcedFacts = {}
        self.version = 0
        """Grows with every change."""
        self.applied: tuple[object, ...] = ()
        """Input of the last :meth:`ConfigResolver.apply`, which an equal one need not repeat."""

    def learn(self, facts: Mapping[str, Fact], source: FactSource) -> bool:
        """Take what is new, newer or from a stronger source; returns whether anything changed."""
        changed = False
        for name, value in facts.items():
            if isinstance(value, int | float) and not abs(value) < _NUMBER_END:  # NaN, too; of a model's file, say
                continue
            # a request may ask for an adapter by another name: the first model seen is the server's
            newer = (name, source) != ("model", FactSource.TELEMETRY)
            known_source, known = self._facts.get(name, (None, None))
            if known_source is None or source < known_source or (newer and source == known_source):
                self._facts[name] = (source, value)
                changed = changed or known != value
        self.version += changed
        return changed

    def sourced_facts(self) -> SourcedFacts:
        """A copy of the facts with their sources."""
        return dict(self._facts)

    def is_another_server(self, other: SourcedFacts) -> bool:
        """Whether the server's own facts contradict the other's, rather than add to them."""
        return any(
            name in IDENTITY and known[1] != value and (known[0] is source or name in _SPELLED_ONCE)
            for name, (source, value) in other.items()
            if source in _FROM_THE_SERVER
            and (known := self._facts.get(name)) is not None
            and known[0] in _FROM_THE_SERVER
        )

    def get(self, name: str) -> Fact | None:
        """The fact's value; None while it is unknown."""
        return self._facts[name][1] if name in self._facts else None

    def number(self, name: str) -> float | None:
        """A numeric fact; None while it is unknown or not a positive number."""
        value = self.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None

    def sources(self) -> dict[str, str]:
        """Where each fact comes from, by name."""
        return {name: source.label for name, (source, _) in sorted(self._facts.items())}

    def as_dict(self) -> dict[str, Fact]:
        """All facts by name."""
        return {name: value for name, (_, value) in sorted(self._facts.items())}

    def identity(self, instance: str, recording: str) -> dict[str, Fact]:
        """What makes this engine's configuration.

        ``recording`` names the file of a replayed engine: a source of its own unless its resource names a model.
        """
        out = {name: value for name in IDENTITY if (value := self.get(name)) is not None}
        if "model" not in out:
            out["instance"] = instance
        if recording and self._facts.get("model", (None, None))[0] is not FactSource.RESOURCE:
            out["recording"] = recording
        return out


def config_id(identity: Mapping[str, Fact]) -> str:
    """Stable name of a configuration: 12 hex digits."""
    return hashlib.sha256(msgspec.json.encode(dict(identity), order="sorted")).hexdigest()[:12]


def resource_facts(attributes: Mapping[str, str]) -> dict[str, Fact]:
    """Facts in resource attributes: ``vllm.<knob>`` and ``hw.gpu.name``; what is not a known knob is left out."""
    named = {_RESOURCE_NAMES.get(key, key.removeprefix("vllm.")): text for key, text in attributes.items() if text}
    return {name: parse_fact(text) for name, text in named.items() if name in IDENTITY or name in BESIDE}


def parse_fact(text: str) -> Fact:
    """Attributes are strings, and facts of a rule may be: read integers of 64 bits and booleans, keep the rest."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = int(text)
    except ValueError:
        return text
    return number if abs(number) < _NUMBER_END else text


_MODEL_CONFIG = "model_config"
"""Among the facts of a rule: the path of the model's ``config.json``, which tells the others."""
MATCHABLE = ("instance", "recording", *IDENTITY)


class Rule:
    """A rule with its file read; ``where`` are the keys of its patterns and facts."""

    def __init__(self, config: RuleConfig, where: str, of_facts: str) -> None:
        for name in config.match:
            if name not in MATCHABLE:
                raise ConfigError(f"{where}.match.{name}", f"is not one of {', '.join(MATCHABLE)}")
        facts = (*IDENTITY, *BESIDE, *HARDWARE, _MODEL_CONFIG)
        for name in config.facts:
            if name not in facts:
                raise ConfigError(f"{of_facts}{name}", "is no fact of a configuration" + suggestion(name, facts))
        self.patterns = config.match
        told = dict(config.facts)
        path = str(told.pop(_MODEL_CONFIG, ""))
        self.facts = {name: parse_fact(fact) if isinstance(fact, str) else fact for name, fact in told.items()}
        try:
            self.architecture = read_architecture(Path(path)) if path else {}
        except ValueError as error:
            raise ConfigError(f"{of_facts}{_MODEL_CONFIG}", f"{path}: {error}") from None

    def matches(self, facts: Mapping[str, Fact]) -> bool:
        """Whether every pattern holds; an unknown fact matches nothing."""
        return all(
            name in facts and fnmatch.fnmatchcase(str(facts[name]), pattern) for name, pattern in self.patterns.items()
        )


_QUANTIZATION_FILE = "hf_quant_config.json"


def shipped_sheets() -> dict[str, HardwareSheet]:
    """The table that comes with the program."""
    text = Path(sheets.__file__).with_name("hardware.json").read_bytes()
    return hardware_sheets(msgspec.json.decode(text))


def read_architecture(path: Path) -> dict[str, Fact]:
    """The architecture in a config.json, or in a directory that has one.

    A file hf_quant_config.json beside it says how the weights are quantized where config.json does not.

    Raises:
        ValueError: a file cannot be read, is not JSON, or has a number that cannot be.
    """
    config = read_json(path / "config.json" if path.is_dir() else path)
    beside = (path if path.is_dir() else path.parent) / _QUANTIZATION_FILE
    if isinstance(config, dict) and beside.is_file():
        config = {**config, "hf_quant_config": read_json(beside)}
    arch = architecture(config)
    return {name: value[:_TEXT_CHARS_MAX] if isinstance(value, str) else value for name, value in arch.items()}


def read_json(path: Path) -> Any:
    """A JSON file, also with the infinite numbers that models have in theirs.

    Raises:
        ValueError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_file(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


_DISCOVERED_MAX = 1024
"""Servers whose answers are kept; beyond it the oldest is dropped."""

_FP8 = frozenset({"fp8", "fbgemm_fp8", "fp8_e4m3"})
_NOT_QUANTIZED = frozenset({"", "none", "auto"})


class ConfigResolver:
    """Adds facts of rules, files and discovery to those that engines sent; one instance serves all engines."""

    def __init__(self, config: Config | None = None) -> None:
        config = config or Config()
        self._sheets = shipped_sheets()
        named = {name: getattr(config, name) for name in ("model", "gpu", _MODEL_CONFIG)}
        top = {name: fact for name, fact in named.items() if fact}
        self._rules = [Rule(RuleConfig(facts=top), "", "")]
        self._rules += [Rule(rule, f"rules[{i}]", f"rules[{i}].facts.") for i, rule in enumerate(config.rules)]
        self._discovered: tuple[tuple[str, Mapping[str, Fact]], ...] = ()

    def discovered(self, pattern: str, facts: Mapping[str, Fact]) -> None:
        """Keep what a server said about the engines whose instance matches; called in the loop."""
        others = tuple(item for item in self._discovered if item[0] != pattern)
        self._discovered = (*others, (pattern, dict(facts)))[-_DISCOVERED_MAX:]

    def apply(self, facts: EngineFacts, attributes: Mapping[str, str], instance: str, recording: str) -> bool:
        """Apply all known facts to those of an engine; returns whether anything changed."""
        if facts.applied == (attributes, self._discovered, facts.version):
            return False
        before = facts.version
        facts.learn(resource_facts(attributes), FactSource.RESOURCE)
        if not recording:
            for pattern, answers in self._discovered:
                if fnmatch.fnmatchcase(instance, pattern):
                    facts.learn(answers, FactSource.DISCOVERY)
        arch: Mapping[str, Fact] = {}
        for rule in self._rules:  # a later rule of the file wins over an earlier one
            if rule.matches({**facts.as_dict(), "instance": instance, "recording": recording}):
                facts.learn(rule.facts, FactSource.RULES)
                arch = rule.architecture or arch
        if arch:
            facts.learn(_with_dtype(arch, facts), FactSource.MODEL_FILE)
        if isinstance(gpu := facts.get("gpu"), str) and (sheet := find(self._sheets, gpu)):
            facts.learn(sheet.facts(compute_dtype(facts)), FactSource.SHEET)
        _apply_name(facts)
        facts.applied = dict(attributes), self._discovered, facts.version
        return facts.version != before


def _apply_name(facts: EngineFacts) -> None:
    """Learn a mixture's experts by its public name, unless a file or another known count says otherwise."""
    model = facts.get("model_root") or facts.get("model")
    told = experts_by_name(model) if isinstance(model, str) and facts.get("hidden_size") is None else {}
    if told and facts.get("num_experts") in (None, told["num_experts"]):
        facts.learn(told, FactSource.MODEL_NAME)


def compute_dtype(facts: EngineFacts) -> str:
    """The dtype that matrices are multiplied in, by the names of a sheet's peaks."""
    if str(facts.get("quantization")) in _FP8:
        return "fp8"
    dtype = facts.get("dtype")
    if isinstance(dtype, str) and dtype != "auto":
        return dtype
    return "float32" if facts.get("element_bytes") == 4.0 else "auto"  # noqa: PLR2004  bytes of a float32


def _with_dtype(arch: Mapping[str, Fact], facts: EngineFacts) -> dict[str, Fact]:
    """The file's architecture with the server's ``--dtype``, and with its quantization where the file has none."""
    out = dict(arch)
    width = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}.get(str(facts.get("dtype")))
    if width is not None:
        if out.get("weight_element_bytes") == out.get("element_bytes"):
            out["weight_element_bytes"] = width
        out["element_bytes"] = width
    method = facts.get("quantization")
    if isinstance(method, str) and method not in _NOT_QUANTIZED and "weight_quantization" not in out:
        out |= quantized(method, bytes_by_name(method))
    return out
