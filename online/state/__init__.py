"""What survives a restart: declared in each class, written as one graph, sealed as one file."""

from __future__ import annotations

from .arrays import Lease
from .declared import Array, Count, Finite, Kept, LikeFresh, MadeBy, Named, StateError, saved
from .file import LEARNERS, VERSION, Image, Seal, decode, sealed
from .lineage import Lineage, LineageLedger
from .taken import Taken, encode

__all__ = [
    "LEARNERS",
    "VERSION",
    "Array",
    "Count",
    "Finite",
    "Image",
    "Kept",
    "Lease",
    "LikeFresh",
    "Lineage",
    "LineageLedger",
    "MadeBy",
    "Named",
    "Seal",
    "StateError",
    "Taken",
    "decode",
    "encode",
    "saved",
    "sealed",
]
