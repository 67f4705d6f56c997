"""Objects of declared classes to plain data and back: a graph, nothing else.

    {"kinds": {kind: [name, ...]}, "objects": [[kind, [value, ...]], ...], "root": number}

Each object is written once and referred to by number. Maps are pairs, because not every key may be a key in
MessagePack; arrays: online/state/arrays.py.

Guarantee: what is read back is bitwise what was written. Reading checks every value against its type and every array
against dtype, shape and bound; no code is run that the bytes name: a state file may come from somewhere else.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from .arrays import array_like, array_of, pack_array
from .declared import KINDS, Array, Kept, LikeFresh, MadeBy, Named, Saved, StateError

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_MAPS = (dict, OrderedDict, Counter)
_MISFITS = (msgspec.ValidationError, TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError)

Graph = dict[str, Any]


class _AttributeMisfit(StateError):
    """Says already which attribute it is."""


def dump(root: object) -> Graph:
    """Plain data of everything that can be reached from ``root``; not a copy: encode it before anything changes."""
    return _Writer().all(root)


def load(graph: Any, root: Any, context: object) -> Any:
    """Fill ``root`` with what was dumped, or make one if it is a class.

    Raises:
        StateError: the data are not of this layout, or a value does not fit its type.
    """
    try:
        reader = _Reader(graph, context)
        number = graph["root"]
        if isinstance(root, type):
            return reader.object(number, (root.STATE,), None)  # type: ignore[attr-defined]
        return reader.handle(number).fill(root)
    except StateError:
        raise
    except _MISFITS as error:
        raise StateError(f"state does not fit: {error}") from error


class _Writer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._held: list[object] = []
        self._objects: list[Any] = []
        self._kinds: dict[str, list[str]] = {}

    def all(self, root: object) -> Graph:
        number = self.number(root)
        return {"kinds": self._kinds, "objects": self._objects, "root": number}

    def number(self, value: object) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            declared: Saved | None = getattr(value, "STATE", None)
            if declared is None:
                raise TypeError(f"{type(value).__name__} declares no state")
            number = self._numbers[id(value)] = len(self._objects)
            self._held.append(value)  # an id is unique while the object lives
            self._kinds[declared.kind] = declared.names
            entry: list[Any] = [declared.kind, None]
            self._objects.append(entry)
            entry[1] = [form.pack(self, getattr(value, name)) for name, form, _ in _forms(declared)]
        return number


class _Reader:
    def __init__(self, graph: Any, context: object) -> None:
        self._kinds: Mapping[str, list[str]] = graph["kinds"]
        self._objects: list[Any] = graph["objects"]
        self._context = context
        self._places: dict[str, dict[str, int]] = {}
        self._made: dict[int, Any] = {}

    def handle(self, number: Any) -> _Handle:
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise StateError(f"{number!r} is no number of an object")
        return _Handle(self, number, self._objects[number][0])

    def object(self, number: Any, allowed: tuple[Saved, ...], existing: Any) -> Any:
        """The object of this number: made before, or ``existing`` filled, or a fresh one filled."""
        kind = self.handle(number).kind
        declared = next((one for one in allowed if one.kind == kind), None)
        if declared is None:
            raise StateError(f"object {number} is of kind {kind!r}, not {' or '.join(one.kind for one in allowed)}")
        if number in self._made:
            return self._made[number]
        fits = getattr(existing, "STATE", None) is declared and not _is_frozen(existing)
        return self.fill(number, existing if fits else declared.fresh(self._context), declared)

    def fill(self, number: int, instance: Any, declared: Saved) -> Any:
        kind, values = self._objects[number]
        if kind != declared.kind:
            raise StateError(f"object {number} is of kind {kind!r}, not {declared.kind}")
        self._made[number] = instance
        places = self._places_of(declared)
        for (name, form, made_by), name_in_file in zip(_forms(declared), declared.names, strict=True):
            place = places.get(name_in_file)
            if place is None:
                if not hasattr(instance, name):
                    raise StateError(f"{kind}: another layout, which differs in {name_in_file}")
                continue
            try:
                value = values[place]
                if made_by is None:
                    existing = getattr(instance, name, None)
                else:
                    existing = None if value is None else getattr(instance, made_by)()
                object.__setattr__(instance, name, form.unpack(self, value, existing))
            except _AttributeMisfit:
                raise
            except _MISFITS as error:
                raise _AttributeMisfit(f"{kind}.{name}: {error}") from error
        if hasattr(instance, "restored"):
            instance.restored()
        return instance

    def _places_of(self, declared: Saved) -> dict[str, int]:
        """Where the file has each attribute; what it does not have stays as the fresh object has it."""
        places = self._places.get(declared.kind)
        if places is None:
            names = self._kinds[declared.kind]
            if len({*names} & {*declared.names}) < len(names):
                differing = ", ".join(sorted({*names} ^ {*declared.names}))
                raise StateError(f"{declared.kind}: another layout, which differs in {differing}")
            places = self._places[declared.kind] = {name: place for place, name in enumerate(names)}
        return places


def _is_frozen(value: object) -> bool:
    """A frozen dataclass is a value, which others may share."""
    parameters = getattr(value, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


class _Handle(NamedTuple):
    """An object that is Kept."""

    reader: _Reader
    number: int
    kind: str

    def fill(self, instance: Any) -> Any:
        return self.reader.fill(self.number, instance, instance.STATE)


class _Form(NamedTuple):
    """How values of one type are written, and read beside what the fresh object has."""

    pack: Callable[[_Writer, Any], Any]
    unpack: Callable[[_Reader, Any, Any], Any]


@functools.cache
def _forms(declared: Saved) -> list[tuple[str, _Form, str | None]]:
    """Attribute, form and the method that makes a fresh object, in the declared order."""
    return [
        (name, _form(hint), hint.method if isinstance(hint, MadeBy) else None) for name, hint in declared.hints.items()
    ]


def _form(hint: Any) -> _Form:  # noqa: PLR0911 -- one return per type
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, Array):
        return _Form(lambda _, value: pack_array(value), lambda _, value, __: array_of(value, hint))
    if origin is np.ndarray:
        return _Form(lambda _, value: pack_array(value), lambda _, value, existing: array_like(value, existing))
    if hint == Kept:
        return _Form(lambda writer, value: writer.number(value), lambda reader, value, _: reader.handle(value))
    if hint is LikeFresh:
        return _Form(lambda writer, value: writer.number(value), _like_fresh)
    if is_plain(hint):
        return _plain_form(hint)
    if isinstance(hint, MadeBy) or (origin is Annotated and any(isinstance(arg, Named) for arg in args)):
        return _object_form(hint)
    if origin in (types.UnionType, typing.Union) or hasattr(hint, "STATE"):
        return _object_form(hint)
    return _container_form(origin, args)


def _object_form(hint: Any) -> _Form:
    """An object of one kind or of several, or None."""
    optional = isinstance(hint, MadeBy) or type(None) in typing.get_args(hint)

    def pack(writer: _Writer, value: Any) -> Any:
        return None if value is None and optional else writer.number(value)

    def unpack(reader: _Reader, value: Any, existing: Any) -> Any:
        if value is None and optional:
            return None
        of_fresh = isinstance(hint, MadeBy) or (isinstance(hint, type) and isinstance(existing, hint))
        allowed = (existing.STATE,) if of_fresh else _declarations(hint)
        return reader.object(value, allowed, existing)

    return _Form(pack, unpack)


@functools.cache
def _declarations(hint: Any) -> tuple[Saved, ...]:
    """Of a class, of a class known by its kind, or of each in a union."""
    if typing.get_origin(hint) is Annotated:
        return tuple(KINDS[known.name] for known in hint.__metadata__)
    if hasattr(hint, "STATE"):
        return (hint.STATE,)
    return tuple(one for arg in typing.get_args(hint) if arg is not type(None) for one in _declarations(arg))


def _like_fresh(reader: _Reader, value: Any, existing: Any) -> Any:
    if reader.handle(value).kind != existing.STATE.kind:
        return existing
    return reader.object(value, (existing.STATE,), existing)


def _container_form(origin: Any, args: tuple[Any, ...]) -> _Form:
    forms = [_form(arg) for arg in args]
    first = forms[0]
    if origin in (list, deque):

        def unpack(reader: _Reader, value: Any, existing: Any) -> Any:
            items = [first.unpack(reader, item, None) for item in value]
            return items if origin is list else deque(items, getattr(existing, "maxlen", None))

        return _Form(lambda writer, value: [first.pack(writer, item) for item in value], unpack)
    if origin is tuple:
        return _Form(
            lambda writer, value: [form.pack(writer, item) for form, item in zip(forms, value, strict=True)],
            lambda reader, value, _: tuple(
                form.unpack(reader, item, None) for form, item in zip(forms, value, strict=True)
            ),
        )
    if origin in _MAPS:
        second = forms[1]
        return _Form(
            lambda writer, value: [[first.pack(writer, k), second.pack(writer, v)] for k, v in value.items()],
            lambda reader, value, _: origin(
                (first.unpack(reader, k, None), second.unpack(reader, v, None)) for k, v in value
            ),
        )
    raise TypeError(f"{origin} cannot be saved")


@functools.cache
def is_plain(hint: Any) -> bool:
    """Whether a type holds no object of ours and no array, so that msgspec reads and checks it."""
    args = [arg for arg in typing.get_args(hint) if arg is not Ellipsis]
    if typing.get_origin(hint) is Annotated:
        return is_plain(args[0])
    if args:
        return typing.get_origin(hint) is not deque and all(is_plain(arg) for arg in args)
    return hint in _PLAIN or (isinstance(hint, type) and issubclass(hint, enum.Enum | msgspec.Struct))


def _plain_form(hint: Any) -> _Form:
    origin = typing.get_origin(hint)
    if origin not in _MAPS:
        return _Form(lambda _, value: value, lambda _, value, __: msgspec.convert(value, hint))
    key, item = (*typing.get_args(hint), int)[:2]
    pairs: Any = list[tuple[key, item]]  # type: ignore[valid-type]
    return _Form(lambda _, value: list(value.items()), lambda _, value, __: origin(dict(msgspec.convert(value, pairs))))
