"""Objects to plain data and back: a graph of known classes, nothing else.

Every class is listed with the attributes that are its state and the type of each; what is not listed cannot be written
and cannot be made by reading. Objects that are shared stay shared: each is written once and referred to by number.

    {"kinds": {name: [attribute, ...]}, "objects": [[name, [value, ...]], ...], "root": number}

Reading checks every value against its type (msgspec where the type is plain), every array against its dtype and bound,
and refuses a layout other than its own. No code is run that the bytes name (no pickle): a state file may come from
somewhere else.
"""

from __future__ import annotations

import enum
import types
import typing
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from online import StateError


class LayoutError(StateError):
    """Written by a version whose classes hold other things."""


ARRAY_ROWS_MAX = 1 << 24
ARRAY_BYTES_MAX = 1 << 29
_NAMED: tuple[Any, ...] = (enum.Enum, msgspec.Struct)
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class Bounded:
    """A deque of at most ``maxlen`` plain values."""

    item: Any
    maxlen: int


@dataclass(frozen=True, slots=True)
class Shape:
    """An array of this dtype; ``columns`` None: one dimension, else the second one (-1: any)."""

    dtype: np.dtype[Any]
    columns: int | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """What of a class is state, by attribute; ``rest`` makes the other attributes, ``check`` says what is wrong."""

    cls: type
    fields: Mapping[str, Any]
    rest: Callable[[Any, Any], Mapping[str, object]] = lambda _made, _context: {}
    check: Callable[[Any], str | None] = lambda _made: None
    name: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.cls.__name__.lstrip("_"))


def attributes(value: object) -> set[str]:
    """Names of the attributes that an object has now."""
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return {name for name in slots if hasattr(value, name)} | set(getattr(value, "__dict__", ()))


class Codec:
    """Writes and reads graphs of the listed kinds."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._by_class = {kind.cls: kind for kind in kinds}
        self._by_name = {kind.name: kind for kind in kinds}
        if len(self._by_name) != len(kinds):
            raise ValueError("two kinds of one name")

    def dump(self, root: object) -> dict[str, Any]:
        """Plain data of everything that can be reached from ``root``; shares no mutable part with it."""
        return _Dump(self._by_class).all(root)

    def load(self, data: Any, cls: type, context: object) -> Any:
        """The object that was dumped.

        Raises:
            StateError: the data are not of this layout, or a value does not fit its type.
        """
        try:
            return _Load(self._by_name, self._by_class, data, context).all(cls)
        except StateError:
            raise
        except (msgspec.ValidationError, TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            raise StateError(f"state does not fit: {error}") from error


class _Dump:
    def __init__(self, by_class: Mapping[type, Kind]) -> None:
        self._by_class = by_class
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []
        self._objects: list[Any] = []

    def all(self, root: object) -> dict[str, Any]:
        number = self._number(root)
        used = {kind.name: list(kind.fields) for kind in self._by_class.values()}
        return {"kinds": used, "objects": self._objects, "root": number}

    def _number(self, value: object) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            kind = self._by_class.get(type(value))
            if kind is None:
                raise TypeError(f"{type(value).__name__} is no kind of state")
            number = self._numbers[id(value)] = len(self._objects)
            self._kept.append(value)  # an id is unique while the object lives
            self._objects.append(None)
            values = [self._value(getattr(value, name), hint) for name, hint in kind.fields.items()]
            self._objects[number] = [kind.name, values]
        return number

    def _value(self, value: Any, hint: Any) -> Any:  # noqa: PLR0911 -- one return per type
        if value is None:
            return None
        if isinstance(hint, Shape):
            return _pack_array(value)
        if isinstance(hint, Bounded) or _origin(hint) is deque:
            item = hint.item if isinstance(hint, Bounded) else typing.get_args(hint)[0]
            return [self._value(one, item) for one in value]
        if is_plain(hint):
            return _pairs(value, hint)
        origin, args = _origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self._value(value, next(arg for arg in args if arg is not type(None)))
        if origin is list:
            return [self._value(one, args[0]) for one in value]
        if origin is tuple:
            return [self._value(one, arg) for one, arg in zip(value, args, strict=True)]
        if origin in (dict, OrderedDict):
            return [[self._value(k, args[0]), self._value(v, args[1])] for k, v in value.items()]
        return self._number(value)


class _Load:
    def __init__(
        self, by_name: Mapping[str, Kind], by_class: Mapping[type, Kind], data: Mapping[str, Any], context: object
    ) -> None:
        self._by_class = by_class
        self._context = context
        self._data = data
        kinds = data["kinds"]
        expected = {name: list(kind.fields) for name, kind in by_name.items()}
        if kinds != expected:
            raise LayoutError(f"another layout of {', '.join(sorted(_differing(kinds, expected)))}")
        self._kinds = [by_name[name] for name, _ in data["objects"]]
        self._made: list[Any] = [object.__new__(kind.cls) for kind in self._kinds]

    def all(self, cls: type) -> Any:
        for kind, made, (_, values) in zip(self._kinds, self._made, self._data["objects"], strict=True):
            for (name, hint), value in zip(kind.fields.items(), values, strict=True):
                where = f"{kind.name}.{name}"
                try:
                    object.__setattr__(made, name, self._value(value, hint))
                except (msgspec.ValidationError, TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
                    raise StateError(f"{where}: {error}") from error
        for kind, made in zip(self._kinds, self._made, strict=True):
            for name, value in kind.rest(made, self._context).items():
                object.__setattr__(made, name, value)
            problem = kind.check(made)
            if problem is not None:
                raise StateError(f"{kind.name}: {problem}")
        return self._object(self._data["root"], cls)

    def _object(self, number: Any, cls: type) -> Any:
        if type(number) is not int or number < 0:
            raise StateError(f"{number!r} is no number of an object")
        made = self._made[number]
        if type(made) is not cls:
            raise StateError(f"object {number} is a {type(made).__name__}, not a {cls.__name__}")
        return made

    def _value(self, value: Any, hint: Any) -> Any:  # noqa: PLR0911 -- one return per type
        if isinstance(hint, Shape):
            return _unpack_array(value, hint)
        if isinstance(hint, Bounded):
            return deque(msgspec.convert(value, list[hint.item]), maxlen=hint.maxlen)
        if is_plain(hint):
            return _convert(value, hint)
        origin, args = _origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            inner = next(arg for arg in args if arg is not type(None))
            return None if value is None else self._value(value, inner)
        if origin is list:
            return [self._value(one, args[0]) for one in value]
        if origin is deque:
            return deque(self._value(one, args[0]) for one in value)
        if origin is tuple:
            return tuple(self._value(one, arg) for one, arg in zip(value, args, strict=True))
        if origin in (dict, OrderedDict):
            return origin((self._value(k, args[0]), self._value(v, args[1])) for k, v in value)
        return self._object(value, hint)


def _differing(kinds: Any, expected: Mapping[str, list[str]]) -> set[str]:
    if not isinstance(kinds, dict):
        return {"everything"}
    return {str(name) for name in {*kinds, *expected} if kinds.get(name) != expected.get(name)}


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint)


_plain_hints: dict[Any, bool] = {}


def is_plain(hint: Any) -> bool:
    """Whether a type holds no object of ours and no array, so that msgspec reads and checks it."""
    known = _plain_hints.get(hint)
    if known is None:
        args = [arg for arg in typing.get_args(hint) if arg is not Ellipsis]
        if args:
            known = _origin(hint) is not deque and all(is_plain(arg) for arg in args)
        else:
            known = hint in _PLAIN or (isinstance(hint, type) and issubclass(hint, _NAMED))
        _plain_hints[hint] = known
    return known


def _is_mapping(hint: Any) -> bool:
    return _origin(hint) in (dict, OrderedDict, Counter)


def _pairs(value: Any, hint: Any) -> Any:
    """A copy of plain data; maps become pairs, because not every key may be a key in MessagePack."""
    if _is_mapping(hint):
        return list(value.items())
    if isinstance(value, list | set | frozenset):
        return list(value)
    return value


def _convert(value: Any, hint: Any) -> Any:
    if not _is_mapping(hint):
        return msgspec.convert(value, hint)
    key, item = (*typing.get_args(hint), int)[:2]
    made: Any = msgspec.convert(value, list[tuple[key, item]])  # type: ignore[valid-type]
    return _origin(hint)(made) if _origin(hint) is not Counter else Counter(dict(made))


def _pack_array(value: NDArray[Any]) -> list[Any]:
    """[dtype, shape, bytes without the zeros at their end]."""
    return [_name(value.dtype), list(value.shape), value.tobytes().rstrip(b"\0")]


def _unpack_array(value: Any, hint: Shape) -> NDArray[Any]:
    name, shape, raw = msgspec.convert(value, tuple[str, list[int], bytes])
    if name != _name(hint.dtype):
        raise StateError(f"array of {name[:80]}, expected {_name(hint.dtype)[:80]}")
    if len(shape) != (1 if hint.columns is None else 2) or min(shape) < 0 or shape[0] > ARRAY_ROWS_MAX:
        raise StateError(f"array of shape {shape}")
    if hint.columns not in (None, -1) and shape[1] != hint.columns:
        raise StateError(f"array of shape {shape}, expected {hint.columns} columns")
    size_bytes = hint.dtype.itemsize
    for n in shape:
        size_bytes *= n
    if size_bytes > ARRAY_BYTES_MAX or len(raw) > size_bytes:
        raise StateError(f"{len(raw)} bytes for an array of {size_bytes}")
    buffer = bytearray(size_bytes)
    buffer[: len(raw)] = raw
    return np.frombuffer(buffer, hint.dtype).reshape(shape)


def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype.descr) if dtype.names else dtype.str
