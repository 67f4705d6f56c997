"""Objects of declared classes to plain data and back: a graph, nothing else.

    {"kinds": {kind: [name, ...]}, "objects": [[kind, [value, ...]], ...], "root": number}

Each object is written once and referred to by number. Maps are pairs, because not every key may be a key in
MessagePack; arrays: online/state/arrays.py.

Guarantee: what is read back is bitwise what was written. Reading checks every value against its type and every array
against dtype, shape and bound; no code is run that the bytes name: a state file may come from somewhere else.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from .arrays import Lease, array_like, array_of
from .codec import StateError
from .declared import KINDS, Array, Kept, LikeFresh, MadeBy, Named, Saved, is_frozen
from .plain_data import MAPS, copier, is_plain, pairs_of, reader, without_alias

_MISFITS = (msgspec.ValidationError, TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError)

Graph = dict[str, Any]

# Guess: from so many values of one type on, checking them at once is faster.
_MANY = 16


class _AttributeMisfit(StateError):
    """Says already which attribute it is."""


class Dumped(NamedTuple):
    """Plain data of a graph, apart from what goes on changing; arrays are packed when they are encoded."""

    graph: Graph
    leases: dict[int, Lease]
    """By number of the object that lends."""


def dump(root: object) -> Dumped:
    """Everything that can be reached from ``root``, as it is now."""
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
        self._leases: dict[int, Lease] = {}

    def all(self, root: object) -> Dumped:
        number = self.number(root)
        return Dumped({"kinds": self._kinds, "objects": self._objects, "root": number}, self._leases)

    def number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        return self._add(value) if number is None else number

    def numbers(self, values: Sequence[Any]) -> list[int]:
        """As ``number``, of each; at once if they are many, new here, of one class and lead nowhere."""
        if len(values) >= _MANY and len({*map(type, values)}) == 1:
            way = self._way(values[0])
            ids = [*map(id, values)]
            contents = [*map(way.values, values)]
            leads_nowhere = all(content[place] is None for place, _ in way.packs for content in contents)
            if leads_nowhere and not way.lends and len({*ids}) == len(ids) and self._numbers.keys().isdisjoint(ids):
                numbers = [*range(len(self._held), len(self._held) + len(ids))]
                self._numbers.update(zip(ids, numbers, strict=True))
                self._held += values
                self._objects += zip(itertools.repeat(way.kind), contents)
                return numbers
        return [*map(self.number, values)]

    def _way(self, value: Any) -> _Way:
        way = _WAYS.get(type(value)) or _way_of(type(value))
        if way.kind not in self._kinds:
            self._kinds[way.kind] = way.names
        return way

    def _add(self, value: Any) -> int:
        way = self._way(value)
        number = self._numbers[id(value)] = len(self._held)
        self._held.append(value)  # an id is unique while the object lives
        values = list(way.values(value))
        self._objects.append((way.kind, values))
        for place, pack in way.packs:
            if values[place] is not None:
                values[place] = pack(self, values[place])
        if way.lends:
            self._leases[number] = value.lend()
        return number


class _Way(NamedTuple):
    """How objects of one class are written: thousands of them, while nothing else may happen."""

    kind: str
    names: list[str]
    values: Callable[[Any], tuple[Any, ...]]
    packs: list[tuple[int, Callable[[_Writer, Any], Any]]]
    """Of the values that are not written as they are, by their places."""
    lends: bool


_WAYS: dict[type, _Way] = {}


def _way_of(cls: type) -> _Way:
    declared: Saved | None = getattr(cls, "STATE", None)
    if declared is None:
        raise TypeError(f"{cls.__name__} declares no state")
    attributes = [name for name, _, _ in _forms(declared)]
    getter = operator.attrgetter(*attributes) if attributes else lambda _: ()
    values = getter if len(attributes) != 1 else lambda value: (getter(value),)
    immutable = is_frozen(cls)
    packs = [
        (place, form.pack)
        for place, ((_, form, _), hint) in enumerate(zip(_forms(declared), declared.hints.values(), strict=True))
        if form.pack is not as_it_is and not (immutable and form.pack is _copied)
    ]
    lends = any(isinstance(hint, Array) and hint.lent for hint in declared.hints.values())
    way = _WAYS[cls] = _Way(declared.kind, declared.names, values, packs, lends)
    return way


def as_it_is(_: _Writer, value: Any) -> Any:
    """Nothing can change it."""
    return value


def _copied(_: _Writer, value: Any) -> Any:
    return value.copy()


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
        fits = getattr(existing, "STATE", None) is declared and not is_frozen(type(existing))
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
    hint = without_alias(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, Array):
        return _Form(as_it_is if hint.lent else _copied, lambda _, value, __: array_of(value, hint))
    if origin is np.ndarray:
        return _Form(_copied, lambda _, value, existing: array_like(value, existing))
    if hint == Kept:
        return _Form(_Writer.number, lambda reader, value, _: reader.handle(value))
    if hint is LikeFresh:
        return _Form(_Writer.number, _like_fresh)
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
        return None if value is None else writer.number(value)

    def unpack(reader: _Reader, value: Any, existing: Any) -> Any:
        if value is None and optional:
            return None
        of_fresh = isinstance(hint, MadeBy) or (isinstance(hint, type) and isinstance(existing, hint))
        allowed = (existing.STATE,) if of_fresh else _declarations(hint)
        return reader.object(value, allowed, existing)

    return _Form(pack if optional else _Writer.number, unpack)


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

        if first.pack is _Writer.number:
            return _Form(_Writer.numbers, unpack)
        return _Form(lambda writer, value: [first.pack(writer, item) for item in value], unpack)
    if origin is tuple:
        return _Form(
            lambda writer, value: [form.pack(writer, item) for form, item in zip(forms, value, strict=True)],
            lambda reader, value, _: tuple(
                form.unpack(reader, item, None) for form, item in zip(forms, value, strict=True)
            ),
        )
    if origin in MAPS:
        second = forms[1]
        return _Form(
            lambda writer, value: [[first.pack(writer, k), second.pack(writer, v)] for k, v in value.items()],
            lambda reader, value, _: origin(
                (first.unpack(reader, k, None), second.unpack(reader, v, None)) for k, v in value
            ),
        )
    raise TypeError(f"{origin} cannot be saved")


def _plain_form(hint: Any) -> _Form:
    read, copied = reader(hint), copier(hint)
    if typing.get_origin(hint) in MAPS:
        write = pairs_of(copied)
    elif copied is None:
        return _Form(as_it_is, lambda _, value, __: read(value))
    else:
        write = copied
    return _Form(lambda _, value: write(value), lambda _, value, __: read(value))
