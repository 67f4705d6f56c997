"""What survives a restart: declared in each class, written as one graph, sealed as one file."""

from __future__ import annotations

from .arrays import Lease
from .codec import (
    LEARNERS,
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
from .declared import Array, Count, Finite, Kept, LikeFresh, MadeBy, Named, saved
from .file import Image, sealed
from .file import decode as decode_image
from .lineage import Lineage, LineageLedger
from .taken import Taken
from .taken import encode as encode_parts

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
    "Refusal",
    "StateError",
    "Stateful",
    "Taken",
    "Tree",
    "decode",
    "decode_image",
    "encode",
    "encode_parts",
    "fitted_array",
    "part_of_tree",
    "refusing",
    "saved",
    "sealed",
]
