"""Who is this: facts, rules, sheets and discovery make the identity of a configuration."""

from __future__ import annotations

from .experts import unknown_experts
from .knowledge import (
    IDENTITY,
    EngineFacts,
    Fact,
    FactSource,
    Knowledge,
    cannot_derive,
    config_id,
    shipped_sheets,
)

__all__ = [
    "IDENTITY",
    "EngineFacts",
    "Fact",
    "FactSource",
    "Knowledge",
    "cannot_derive",
    "config_id",
    "shipped_sheets",
    "unknown_experts",
]
