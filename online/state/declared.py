"""What of a class is saved: declared in the class, under names that a rename in Python does not change.

    class Cusum:
        STATE = saved("cusum", up=Finite, down=Finite, noise=Finite)

Each keyword is an attribute (or a property with a setter) and its type; a dataclass that names none saves all its
fields. In the file it goes by its name without leading underscores. A type is

    int, list[str], tuple[int, bytes], ...  plain data, also enums and msgspec structs: read and checked by msgspec
    Finite, Count                           a float that is finite, an integer >= 0
    Floats, Ints, Mask                      an array of the shape that the fresh object has, every float finite
    Array(dtype, columns, nan=True)         an array of any length
    another declared class, or a union      an object; one that is shared stays shared
    list, deque, tuple, dict, OrderedDict   of all of these; a deque keeps the bound of the fresh one
    Kept, LikeFresh, MadeBy(method)         see there

Reading makes an object (``fresh(context)`` in the declaration, else empty) or is given one, and sets the attributes in
the declared order. Objects that a fresh one already has are filled, not replaced. A method ``restored()``, if there is
one, is called at the end: it derives what is not saved and raises :class:`StateError` for what cannot be. An attribute
that the file does not have stays as the fresh object has it.

Every change of what is declared is a new version of the file (online/state/file.py).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Array:
    """An array of this dtype; ``columns`` None: one dimension, else the second one (-1: any); ``nan``: may hold NaN.

    ``lent``: too large to be copied when a state is taken; its owner lends it (``lend()``, see online/state/graph.py).
    """

    dtype: np.dtype[Any]
    columns: int | None = None
    nan: bool = False
    lent: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """A class that is known by its kind only."""

    name: str


@dataclass(frozen=True, slots=True)
class MadeBy:
    """None, or an object that this method of its owner makes."""

    method: str


class LikeFresh:
    """As a type: an object of the kind the fresh object has; where the file has another kind, the fresh one stays."""


Kept = Annotated[Any, "kept"]
"""An object of any declared kind, which reading does not make but hands over: ``kind`` says what it is, ``fill(fresh)``
sets the attributes of a fresh object and returns it. StateError: it is of another kind, or a value does not fit."""


class Saved:
    """A declaration; becomes known with the class in which it stands."""

    def __init__(self, kind: str, declared: dict[str, Any], fresh: Callable[[Any], Any] | None) -> None:
        self.kind = kind
        self._declared = declared
        self.fresh = fresh or (lambda _: object.__new__(self.cls))
        self.cls: type = object

    def __set_name__(self, owner: type, name: str) -> None:
        known = KINDS.setdefault(self.kind, self)
        if known is not self:
            raise TypeError(f"{owner.__name__}: kind {self.kind!r} is declared twice")
        self.cls = owner  # of a dataclass with slots, the second time: that is the class that stays

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """The declared type of each saved attribute."""
        declared = self._declared
        if not declared and dataclasses.is_dataclass(self.cls):
            types = typing.get_type_hints(self.cls, include_extras=True)
            declared = {each.name: types[each.name] for each in dataclasses.fields(self.cls)}
        return dict(declared)

    @functools.cached_property
    def names(self) -> list[str]:
        """Names in the file, in the same order."""
        return [name.lstrip("_") for name in self.hints]


KINDS: dict[str, Saved] = {}


def saved(
    kind: str, base: Saved | None = None, /, *, fresh: Callable[[Any], Any] | None = None, **attributes: Any
) -> Saved:
    """What of a class is saved, to stand in the class as ``STATE``.

    Args:
        kind: name of the class in the file.
        base: declaration of the class above, whose attributes come first.
        fresh: makes an object from the context of the reading process, to be filled.
        attributes: type by attribute; see the module's docstring.
    """
    return Saved(kind, {**(base.hints if base else {}), **attributes}, fresh)


def is_frozen(cls: type) -> bool:
    """A frozen dataclass is a value, which others may share, arrays included."""
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen
