"""Plain data: what holds no object of ours and no array. msgspec writes, reads and checks it."""

from __future__ import annotations

import copy
import enum
import typing
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

MAPS = (dict, OrderedDict, Counter)
"""Written as pairs."""
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def without_alias(hint: Any) -> Any:
    """What a generic alias stands for: ``NDArray[float64]`` is one since numpy 2.5, and was its value before."""
    value = getattr(typing.get_origin(hint), "__value__", None)
    return hint if value is None else value[typing.get_args(hint)]


def is_plain(hint: Any) -> bool:
    """Whether a type holds no object of ours and no array."""
    args = _args(hint)
    if typing.get_origin(hint) is Annotated:
        return is_plain(args[0])
    if args:
        return typing.get_origin(hint) is not deque and all(is_plain(arg) for arg in args)
    return hint in _PLAIN or (isinstance(hint, type) and issubclass(hint, enum.Enum | msgspec.Struct))


def copier(hint: Any) -> Callable[[Any], Any] | None:
    """What takes a value apart from one that goes on changing; None: nothing can change it."""
    if _is_immutable(hint):
        return None
    origin, args = typing.get_origin(hint), _args(hint)
    if origin not in (list, set, *MAPS):
        return copy.deepcopy
    item = copier(args[-1])
    if item is None:
        return copy.copy
    if origin is list:
        return lambda value: [item(each) for each in value]
    return lambda value: {key: item(each) for key, each in value.items()}


def pairs_of(copy_of: Callable[[Any], Any] | None) -> Callable[[Any], list[Any]]:
    """What writes a map, its values apart from those that go on changing."""
    if copy_of is copy.copy or copy_of is None:
        return lambda value: list(value.items())
    return lambda value: list(copy_of(value).items())


def reader(hint: Any) -> Callable[[Any], Any]:
    """What reads a value and checks it; of a map, its pairs."""
    origin = typing.get_origin(hint)
    if origin not in MAPS:
        return lambda value: msgspec.convert(value, hint)
    key, item = (*typing.get_args(hint), int)[:2]
    pairs: Any = list[tuple[key, item]]  # type: ignore[valid-type]
    return lambda value: origin(dict(msgspec.convert(value, pairs)))


def _is_immutable(hint: Any) -> bool:
    args = _args(hint)
    if typing.get_origin(hint) is Annotated:
        return _is_immutable(args[0])
    if args:
        return typing.get_origin(hint) not in (list, set, *MAPS) and all(_is_immutable(arg) for arg in args)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return bool(hint.__struct_config__.frozen)
    return is_plain(hint)


def _args(hint: Any) -> list[Any]:
    return [arg for arg in typing.get_args(hint) if arg is not Ellipsis]
