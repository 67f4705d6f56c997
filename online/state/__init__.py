"""What survives a restart: declared in each class, written as one graph, sealed as one file."""

from __future__ import annotations

from .declared import Array, Count, Finite, Kept, LikeFresh, MadeBy, Named, Saved, StateError, layout, saved
from .file import LEARNERS, VERSION, Image, Migrations, body_of, decode, encode, sealed
from .graph import Graph
from .lineage import Lineage, LineageLedger

__all__ = [
    "LEARNERS",
    "VERSION",
    "Array",
    "Count",
    "Finite",
    "Graph",
    "Image",
    "Kept",
    "LikeFresh",
    "Lineage",
    "LineageLedger",
    "MadeBy",
    "Migrations",
    "Named",
    "Saved",
    "StateError",
    "body_of",
    "decode",
    "encode",
    "layout",
    "saved",
    "sealed",
]
