"""What survives a restart: learners as trees, a tree as a file, and which rows a state has learned."""

from __future__ import annotations

from .codec import (
    LEARNERS,
    STATE_BYTES_MAX,
    VERSION,
    Refusal,
    StateError,
    Stateful,
    Tree,
    decode,
    encode,
    fitted_array,
    part_of_tree,
    refusing,
)
from .lineage import Lineage, LineageLedger

__all__ = [
    "LEARNERS",
    "STATE_BYTES_MAX",
    "VERSION",
    "Lineage",
    "LineageLedger",
    "Refusal",
    "StateError",
    "Stateful",
    "Tree",
    "decode",
    "encode",
    "fitted_array",
    "part_of_tree",
    "refusing",
]
