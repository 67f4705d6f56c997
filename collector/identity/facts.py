"""Who is this: facts about an engine, strongest source first, and the identity they make.

Engines of equal identity share coefficients. ``config_id`` is the first 12 hex digits of the SHA-256 of the identity's
canonical JSON. Unknown facts stay unknown; without a model the emitting instance is part of the identity, so that two
unknown servers are never mixed.

A fact keeps the source it came from. When two sources contradict each other the stronger wins, and the other's claim is
kept beside it and counted once, however often it is repeated.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping

import msgspec

from online.state import saved

Fact = str | int | float | bool

IDENTITY: tuple[str, ...] = (
    "model",
    "gpu",
    "tensor_parallel_size",
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
)
"""Facts that make two engines different configurations."""

BESIDE: tuple[str, ...] = ("num_gpu_blocks", "num_experts")
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

TEXT_CHARS_MAX = 256
CLAIMS_MAX = 64
"""Contradicting claims kept per engine; one more is counted and not kept."""

_NUMBER_END = 1 << 63
"""A state file holds 64 bits; no knob and no data sheet has a number like that."""

_RESOURCE_NAMES = {"hw.gpu.name": "gpu", "vllm.version": "vllm_version"}


class FactSource(enum.IntEnum):
    """Where a fact comes from; the smaller number wins."""

    RESOURCE = 0
    RULES = 1
    DISCOVERY = 2
    TELEMETRY = 3
    MODEL_FILE = 4
    SHEET = 5

    @property
    def label(self) -> str:
        """As shown in the snapshot."""
        return self.name.lower()


_FROM_THE_SERVER = (FactSource.RESOURCE, FactSource.DISCOVERY)
"""What a server says of itself changes with the server; what others say of it is corrected."""

Held = dict[str, tuple[FactSource, Fact]]


class EngineFacts:
    """Facts about one engine with their sources."""

    STATE = saved(
        "facts",
        _facts=dict[str, tuple[FactSource, Fact]],
        _claims=dict[tuple[str, FactSource], Fact],
        conflicts=int,
        version=int,
    )

    def __init__(self) -> None:
        self._facts: Held = {}
        self._claims: dict[tuple[str, FactSource], Fact] = {}
        self.conflicts = 0
        self.version = 0
        """Grows with every change."""

    def learn(self, facts: Mapping[str, Fact], source: FactSource) -> bool:
        """Take what is new, newer or from a stronger source; returns whether anything changed."""
        changed = False
        # a request may ask for an adapter by another name: the first model seen is the server's
        newer = source is not FactSource.TELEMETRY
        for name, value in facts.items():
            if isinstance(value, int | float) and not abs(value) < _NUMBER_END:  # NaN, too; of a model's file, say
                continue
            known = self._facts.get(name)
            if known is not None and known[0] != source and known[1] != value:
                self._contradict(name, known, (source, value))
            if known is None or source < known[0] or (newer and source == known[0] and known[1] != value):
                self._facts[name] = (source, value)
                changed = changed or known is None or known[1] != value
        self.version += changed
        return changed

    def take_over(self, other: EngineFacts) -> None:
        """Another emitter of the same engine knew these, from the sources it had."""
        for source in FactSource:
            self.learn({name: value for name, (s, value) in other._facts.items() if s is source}, source)

    def held(self) -> Held:
        """A copy of the facts and their sources, for :meth:`is_another_server`."""
        return dict(self._facts)

    def is_another_server(self, before: Held) -> bool:
        """Whether the server now says otherwise of itself, rather than being known better."""
        return any(
            source in _FROM_THE_SERVER and self._facts[name][0] is source and self._facts[name][1] != value
            for name, (source, value) in before.items()
            if name in IDENTITY
        )

    def _contradict(self, name: str, known: tuple[FactSource, Fact], claim: tuple[FactSource, Fact]) -> None:
        weaker = max(known, claim, key=lambda fact: fact[0])
        key = (name, weaker[0])
        if self._claims.get(key) == weaker[1]:
            return
        self.conflicts += 1
        if key in self._claims or len(self._claims) < CLAIMS_MAX:
            self._claims[key] = weaker[1]

    def get(self, name: str) -> Fact | None:
        """The fact's value; None while it is unknown."""
        known = self._facts.get(name)
        return None if known is None else known[1]

    def number(self, name: str) -> float | None:
        """A numeric fact; None while it is unknown or not a positive number."""
        value = self.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None

    def source(self, name: str) -> FactSource | None:
        """Where the fact comes from."""
        known = self._facts.get(name)
        return None if known is None else known[0]

    def sources(self) -> dict[str, str]:
        """Where each fact comes from, by name."""
        return {name: source.label for name, (source, _) in sorted(self._facts.items())}

    def contradictions(self) -> dict[str, str]:
        """Claims that lost against a stronger source: by name, who claimed what."""
        claims_by_name: dict[str, list[str]] = {}
        for (name, source), value in sorted(self._claims.items()):
            if self._facts[name][1] != value:
                claims_by_name.setdefault(name, []).append(f"{source.label}: {value}")
        return {name: "; ".join(claims) for name, claims in claims_by_name.items()}

    def known(self) -> dict[str, Fact]:
        """All facts by name."""
        return {name: value for name, (_, value) in sorted(self._facts.items())}

    def identity(self, instance: str, recording: str) -> dict[str, Fact]:
        """What makes this engine's configuration.

        ``recording`` names the file of a replayed engine: a source of its own unless its resource names a model.
        """
        out = {name: value for name in IDENTITY if (value := self.get(name)) is not None}
        if "model" not in out:
            out["instance"] = instance
        if recording and self.source("model") is not FactSource.RESOURCE:
            out["recording"] = recording
        return out


def config_id(identity: Mapping[str, Fact]) -> str:
    """Stable name of a configuration: 12 hex digits."""
    return hashlib.sha256(msgspec.json.encode(dict(identity), order="sorted")).hexdigest()[:12]


def resource_facts(attributes: Mapping[str, str]) -> dict[str, Fact]:
    """Facts in resource attributes: ``vllm.<knob>`` and ``hw.gpu.name``; what is not a known knob is left out."""
    out: dict[str, Fact] = {}
    for key, text in attributes.items():
        name = _RESOURCE_NAMES.get(key, key.removeprefix("vllm."))
        if (name in IDENTITY or name in BESIDE) and text:
            out[name] = parse_fact(text)
    return out


def parse_fact(text: str) -> Fact:
    """Resource attributes are strings: read integers of 64 bits and booleans back, keep the rest."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = int(text)
    except ValueError:
        return text
    return number if abs(number) < _NUMBER_END else text
