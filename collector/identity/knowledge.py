"""Knowledge beside the telemetry: rules of our configuration, data sheets, config.json files, discovered facts.

Everything that has to be read is read at start, bounded and checked; a file that lies is a ConfigError that names the
key. ``apply`` then only looks up, and does nothing when nothing has changed since the engine's last export.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from collector.config import ConfigurationsConfig
from online.features.sheets import SheetError, architecture, bytes_by_name, find, model_sheet, quantized

from .facts import EngineFacts, Fact, FactSource, resource_facts
from .rules import Rule, configured_architecture, configured_sheets
from .sheet_files import shipped_sheets

_DISCOVERED_MAX = 1024
"""Answers that are kept; the oldest server's goes first."""
_APPLIED_MAX = 4096
"""Emitters of which is remembered what they have been told; beyond, they are told again."""

_FP8 = frozenset({"fp8", "fbgemm_fp8", "fp8_e4m3"})
_NOT_QUANTIZED = frozenset({"", "none", "auto"})


class Knowledge:
    """Tells engines what they did not say; one instance for all of them."""

    def __init__(self, config: ConfigurationsConfig | None = None) -> None:
        config = config or ConfigurationsConfig()
        self._sheets = shipped_sheets()
        if config.hardware_file is not None:
            self._sheets |= configured_sheets(config.hardware_file)
        self._rules = [Rule(rule, f"configurations.rules[{i}]") for i, rule in enumerate(config.rules)]
        self._model = configured_architecture("configurations", config.model_config)
        self._discovered: tuple[tuple[str, Mapping[str, Fact]], ...] = ()
        self._applied: dict[tuple[str, str], tuple[object, ...]] = {}

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
        self._discovered = (*others, (pattern, dict(facts)))[-_DISCOVERED_MAX:]

    def apply(self, facts: EngineFacts, attributes: Mapping[str, str], instance: str, recording: str) -> bool:
        """Teach an engine's facts all that is known of it; returns whether anything changed."""
        rules = self._rules
        applied = (attributes, self._discovered, rules, facts.version)
        if self._applied.get((recording, instance)) == applied:
            return False
        before = facts.version
        facts.learn(resource_facts(attributes), FactSource.RESOURCE)
        if not recording:
            for pattern, answers in self._discovered:
                if fnmatch.fnmatchcase(instance, pattern):
                    facts.learn(answers, FactSource.DISCOVERY)
        self._apply_rules(facts, instance, recording)
        self._apply_sheets(facts)
        if len(self._applied) > _APPLIED_MAX:
            self._applied.clear()
        self._applied[recording, instance] = (dict(attributes), self._discovered, rules, facts.version)
        return facts.version != before

    def _apply_rules(self, facts: EngineFacts, instance: str, recording: str) -> None:
        arch = self._model
        for rule in self._rules:  # a later rule of the file wins over an earlier one
            if rule.matches({**facts.known(), "instance": instance, "recording": recording}):
                facts.learn(rule.facts, FactSource.RULES)
                arch = rule.architecture or arch
        if arch is not None:
            facts.learn(_with_dtype(arch, facts), FactSource.MODEL_FILE)

    def _apply_sheets(self, facts: EngineFacts) -> None:
        gpu = facts.get("gpu")
        sheet = find(self._sheets, gpu) if isinstance(gpu, str) else None
        if sheet is not None:
            facts.learn(sheet.facts(compute_dtype(facts)), FactSource.SHEET)


def compute_dtype(facts: EngineFacts) -> str:
    """The dtype that matrices are multiplied in, by the names of a sheet's peaks."""
    if str(facts.get("quantization")) in _FP8:
        return "fp8"
    dtype = facts.get("dtype")
    if isinstance(dtype, str) and dtype != "auto":
        return dtype
    return "float32" if facts.get("element_bytes") == 4.0 else "auto"  # noqa: PLR2004  bytes of a float32


def _with_dtype(arch: Mapping[str, Fact], facts: EngineFacts) -> dict[str, Fact]:
    """The server's ``--dtype`` says more than the file, and so does its quantization where the file says none."""
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


def is_mixture_of_experts(facts: Mapping[str, Fact]) -> bool:
    """Whether the model is one: a file or the engine counts its experts, or the engine spreads them over GPUs."""
    experts, layers = facts.get("num_experts"), facts.get("num_moe_layers", 1)
    counted = isinstance(experts, int) and not isinstance(experts, bool) and experts > 1
    return (counted and layers != 0) or facts.get("expert_parallel") is True


def cannot_derive(facts: Mapping[str, Fact]) -> tuple[str, ...]:
    """What is missing for the systems that need a sheet; nothing when they can be used."""
    try:
        _, missing = model_sheet(architecture(facts))
    except SheetError as error:
        return (str(error),)
    return missing + tuple(name for name in ("peak_tflops", "memory_bandwidth_gb_s") if name not in facts)
