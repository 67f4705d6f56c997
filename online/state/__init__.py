"""What survives a restart: declared in each class, written as one graph, sealed as one file."""

from __future__ import annotations

from .declared import Array, Count, Finite, Kept, LikeFresh, MadeBy, Named, Saved, StateError, layout, saved
from .file import LEARNERS, VERSION, Image, Migrations, Seal, decode, sealed
from .graph import Graph, Lease
from .lineage import Lineage, LineageLedger
from .taken import Taken, encode

__all__ = [
    "LEARNERS",
    "VERSION",
    "Array",
    "Count",
    "Finite",
    "Graph",
    "Image",
    "Kept",
    "Lease",
    "LikeFresh",
    "Lineage",
    "LineageLedger",
    "MadeBy",
    "Migrations",
    "Named",
    "Saved",
    "Seal",
    "StateError",
    "Taken",
    "decode",
    "encode",
    "layout",
    "saved",
    "sealed",
]
