"""Who is this: facts, rules and sheets make the identity of a configuration."""

from __future__ import annotations

from .experts import Fact, unknown_experts
from .resolver import (
    ConfigResolver,
    EngineFacts,
    FactSource,
    config_id,
    read_json,
    shipped_sheets,
)

__all__ = [
    "ConfigResolver",
    "EngineFacts",
    "Fact",
    "FactSource",
    "config_id",
    "read_json",
    "shipped_sheets",
    "unknown_experts",
]
