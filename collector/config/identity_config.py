"""Keys about who the engines are: rules, model files, data sheets, servers to ask."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from msgspec import Meta

from .section import Section

Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""YAML knows .nan and .inf; of no knob are they a value."""


Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""YAML's integers have no end; those of a state file have."""


class RuleConfig(Section, frozen=True, kw_only=True):
    """What is true of engines that match; later rules win."""

    match: Annotated[
        dict[str, str],
        Meta(description="Facts of an engine and the pattern (`*`, `?`) that each has to match; empty: all."),
    ] = msgspec.field(default_factory=dict)
    facts: Annotated[
        dict[str, str | Whole | Finite | bool],
        Meta(description="What is then known of the engine: `model`, `gpu`, `tensor_parallel_size`, …"),
    ] = msgspec.field(default_factory=dict)
    model_config: Annotated[str | None, Meta(description="Path of its model's `config.json`, for `physics`.")] = None


class DiscoveryEndpoint(Section, frozen=True, kw_only=True):
    """A vLLM server to ask about itself."""

    url: Annotated[
        str,
        Meta(pattern=r"^https?://[^\s/?#]+/?$", max_length=256, description="Where its API is, without a path."),
    ]
    instance: Annotated[str, Meta(description="Engines it answers for, by a pattern of their instance.")] = "*"


class DiscoveryConfig(Section, frozen=True, kw_only=True):
    """Which servers to ask what they are, and how patiently."""

    endpoints: Annotated[
        tuple[DiscoveryEndpoint, ...], Meta(max_length=16, description="Servers to ask for model, version and limits.")
    ] = ()
    interval_s: Annotated[
        float, Meta(ge=1, le=86_400, description="Pause before a server that did not answer is asked again.")
    ] = 30.0
    refresh_s: Annotated[
        float, Meta(ge=1, le=86_400, description="Pause before a server that did answer is asked again.")
    ] = 600.0
    timeout_s: Annotated[float, Meta(gt=0, le=60, description="How long an answer may take.")] = 2.0


class ConfigurationsConfig(Section, frozen=True, kw_only=True):
    """Who the engines are, where they do not say it themselves."""

    rules: Annotated[
        tuple[RuleConfig, ...], Meta(max_length=1000, description="Facts about engines by pattern, see below.")
    ] = ()
    model_config: Annotated[
        str | None, Meta(description="Path of a model's `config.json`, for engines of which no rule names one.")
    ] = None
    hardware_file: Annotated[
        str | None, Meta(description="Path of your own data sheets of GPUs, beside those that come along.")
    ] = None
    discovery: DiscoveryConfig = DiscoveryConfig()
