r"""A state is a tree of plain data and arrays; a state file is one tree, compressed and sealed.

    b"tracefit.state/1\n"  |  BLAKE2b of the rest (64 bytes)  |  zlib of MessagePack {"version": VERSION, "parts": tree}

A tree holds None, bool, int, float, str, lists, dicts with keys of text, and arrays. An array is MessagePack's
extension 1, [dtype, shape, bytes]. The part ``learners`` is a bank's (``Bank.to_state``); a sidecar's file has others
beside it. Floats and arrays come back bitwise.

Who is saved is :class:`Stateful`: ``to_state()`` gives its tree, and ``from_state(tree)`` fills a fresh object. The
fresh object says what fits: the same types, dtypes and shapes, integers >= 0, numbers finite. No code is run that the
bytes name, and a file that expands beyond a bound is refused: a state may come from somewhere else.

Who adds something that is saved names it in ``SAVED`` of the class that holds it, gives it its fresh value in
``__init__``, and increments ``VERSION``. If states are merged, the ``add`` of the class says what becomes of two.

Guarantees: a file cut at any byte or with any bit flipped raises :class:`StateError`, and so does one of another
version, and a value that does not fit (tests/property/test_state.py).

Lineage: which engines a configuration has learned from, and of which times, so that no row is ever counted twice.

    engine -> spans (first, last, rows)      event time in ns of its earliest and latest row, and how many rows

Spans of one engine are more than ten minutes apart: an engine that moved from one gateway to another and back left a
gap, in which the other one learned. Two states have learned the same rows where spans of one engine overlap. A sender
that gave no name goes by its address, which others may have elsewhere: there, only spans that begin with the same row
are the same. Of an engine at most 4 spans are told apart (the nearest two become one), of a configuration the 4096
engines heard of last; spans of several states stand side by side. Adding is commutative and, below those bounds,
associative.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from online.constants import ENGINES_MAX, IDLE_GAP_NS

MAGIC = b"tracefit.state/1\n"
# Format: of the state file; another one with every name or shape of what is saved.
VERSION = 11
LEARNERS = "learners"
# Guard: memory.
STATE_BYTES_MAX = 1 << 29
# Format: number of MessagePack's extension.
_ARRAY = 1
_HEAD_BYTES = len(MAGIC) + hashlib.blake2b().digest_size

Tree = dict[str, Any]


class StateError(ValueError):
    """A state that this version cannot use; the message is a sentence."""


class StateTooLargeError(StateError):
    """A state that unpacks to more than its reader has room for."""


class _File(msgspec.Struct):
    """What is compressed."""

    version: int
    parts: Tree


# ------------------------------------------------------------------- the file


def encode(tree: Tree) -> bytes:
    """The file of this tree; nobody may change its arrays meanwhile."""
    body = zlib.compress(_ENCODER.encode(_File(VERSION, tree)), zlib.Z_BEST_SPEED)
    return MAGIC + _digest(body) + body


def decode(data: bytes, bytes_max: int = STATE_BYTES_MAX) -> Tree:
    """The tree in a file that unpacks to ``bytes_max`` at most.

    Raises:
        StateError: it is truncated, corrupt, no state file, of a version that is not read, or too large.
    """
    if not data.startswith(MAGIC):
        raise StateError(f"not a state file: it does not begin with {MAGIC.decode().strip()!r}")
    body = memoryview(data)[_HEAD_BYTES:]
    if _digest(body) != data[len(MAGIC) : _HEAD_BYTES]:
        raise StateError(f"corrupt state file: the checksum of {len(body)} bytes does not match")
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(body, bytes_max)
        if len(content) == bytes_max and not unpacker.eof:
            raise StateTooLargeError(f"it unpacks to more than {bytes_max >> 20} MiB")
        _refuse_too_many(content, bytes_max >> 7)
        file = msgspec.msgpack.decode(content, type=_File, ext_hook=_array_of)
    except StateError:
        raise
    except (zlib.error, ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise StateError(f"corrupt state file: {error}") from error
    if file.version != VERSION:
        theirs = "another version of tracefit made it, and only that one can read it"
        raise StateError(f"state version {file.version} is not {VERSION}: {theirs}")
    return file.parts


# Format: by the first byte of a MessagePack value, how many bytes tell its length, and how many come besides. What an
# extension holds is walked, too.
_LENGTHS = dict(zip(b"\xc4\xc5\xc6\xd9\xda\xdb", b"\1\2\4\1\2\4", strict=True))
_OTHERS = {0xA0 + length: length for length in range(32)}
_OTHERS |= dict(zip(range(0xC7, 0xD9), b"\2\3\5\4\x08\1\2\4\x08\1\2\4\x08\1\1\1\1\1", strict=True))
_OTHERS |= dict(zip(range(0xDC, 0xE0), b"\2\4\2\4", strict=True))


def _refuse_too_many(content: bytes, most: int) -> None:
    """ValueError for more values: an empty list is one byte here, and 64 in memory. An array counts for a few."""
    at = count = 0
    while at < len(content):
        width, others = _LENGTHS.get(content[at], 0), _OTHERS.get(content[at], 0)
        at += 1 + width + others + int.from_bytes(content[at + 1 : at + 1 + width], "big")
        count += 1
        if count > most:
            raise ValueError(f"more than {most} values")


def part_of_tree(tree: Tree, name: str) -> Tree:
    """One part of a file; StateError if there is none."""
    part = tree.get(name)
    if not isinstance(part, dict):
        raise StateError(f"no {name} in this state file")
    return part


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body).digest()


def _packed(value: object) -> object:
    """What msgspec writes for a value that it does not know."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype.descr if value.dtype.names else value.dtype.str
        return msgspec.msgpack.Ext(_ARRAY, _ENCODER.encode([dtype, value.shape, value.tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a state")  # what msgspec asks of an enc_hook


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_packed)


def _array_of(code: int, data: memoryview) -> NDArray[Any]:
    """The array of an extension, writable."""
    if code != _ARRAY:
        raise ValueError(f"extension {code}")
    dtype, shape, raw = msgspec.msgpack.decode(data, type=tuple[Any, Any, memoryview])  # no copy of a foreign size
    kind = np.dtype(dtype if isinstance(dtype, str) else [tuple(field) for field in dtype])
    if kind.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} and {shape}")
    return np.frombuffer(bytearray(raw), kind).reshape(shape)


# ------------------------------------------------------------------- who is saved


class Stateful:
    """An object whose state is a tree.

    A class names what is saved of it in ``SAVED``: attributes that are numbers, text, arrays, lists of numbers, or
    other stateful objects. What is neither of these it writes and reads itself, beside what ``super()`` does.

    An array of no rows in a fresh object stands for any number of rows. ``OPTIONAL`` names what may be None, here or
    there: then it stays as it is here.
    """

    __slots__ = ()
    SAVED: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()

    def to_state(self) -> Tree:
        """State tree of the saved attributes, which later learning does not change."""
        return {name: _copied(getattr(self, name)) for name in self.SAVED}

    def from_state(self, state: Tree) -> None:
        """Fill this fresh object, which must be thrown away if that fails.

        Raises:
            StateError: a value does not fit; the message names it. What is missing raises KeyError: see `refusing`.
        """
        for name in self.SAVED:
            fresh = getattr(self, name)
            if name in self.OPTIONAL and (fresh is None or state[name] is None):
                continue
            try:
                setattr(self, name, _fitted(state[name], fresh))
            except StateError as error:
                raise StateError(f"{type(self).__name__}.{name}: {error}") from error


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn every error that a tree of another form causes into a StateError: the tree comes from a file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"state does not fit: {error!r}") from error


def _copied(value: Any) -> Any:
    if isinstance(value, Stateful):
        return value.to_state()
    if isinstance(value, np.ndarray | list):
        return value.copy()
    return value


def _fitted(value: Any, fresh: Any) -> Any:
    """A value in the place of a fresh one."""
    if isinstance(fresh, Stateful):
        fresh.from_state(value)
        return fresh
    if isinstance(fresh, np.ndarray):
        return fitted_array(value, fresh)
    if isinstance(fresh, list):
        fits = type(value) is list and all(map(_is_number, value))
    elif isinstance(fresh, float):
        fits = _is_number(value)
    elif type(fresh) is int:
        fits = type(value) is int and 0 <= value < 1 << 63
    else:
        fits = type(value) is type(fresh)
    if not fits:
        raise StateError(f"{value!r:.40} does not fit")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def fitted_array(value: Any, fresh: NDArray[Any], *, nan: bool = False) -> NDArray[Any]:
    """An array of the dtype and shape of a fresh one, with any number of rows where that has none."""
    same = slice(1, None) if fresh.shape[0] == 0 else slice(None)
    if (value.dtype, value.ndim, value.shape[same]) != (fresh.dtype, fresh.ndim, fresh.shape[same]):
        raise StateError(f"an array of {value.dtype}, {value.shape}, expected {fresh.dtype}, {fresh.shape}")
    if value.dtype.kind == "f" and not (~np.isinf(value) if nan else np.isfinite(value)).all():
        raise StateError("not finite")
    return np.asarray(value)


Span = tuple[int, int, int]

# Guard: memory.
SPANS_MAX = 4

_ADDRESS = re.compile(r"(ipv4|ipv6|unix|https?):|.*:\d+(#\d+)?$")


class Lineage:
    """Of one configuration: ``engines``, spans by engine, in order of their beginning."""

    def __init__(self) -> None:
        self.engines: dict[str, list[Span]] = {}

    def to_state(self) -> Tree:
        """Spans by engine."""
        return {engine: [[*span] for span in spans] for engine, spans in self.engines.items()}

    def from_state(self, state: Tree) -> None:
        """Restore the spans."""
        self.engines = msgspec.convert(state, dict[str, list[Span]])

    def record(self, engine: str, end_ns: NDArray[np.int64]) -> None:
        """Rows (n,) were learned."""
        times, spans = np.sort(end_ns), self.engines.get(engine, [])
        for part in np.split(times, np.flatnonzero(np.diff(times) > IDLE_GAP_NS) + 1):
            span, apart = (int(part[0]), int(part[-1]), len(part)), []
            for other in spans:
                if other[0] - span[1] > IDLE_GAP_NS or span[0] - other[1] > IDLE_GAP_NS:
                    apart.append(other)
                else:
                    span = _joined(other, span)
            spans = [*apart, span]
        self._keep(engine, spans)

    def _keep(self, engine: str, spans: list[Span]) -> None:
        spans = sorted(spans)
        while len(spans) > SPANS_MAX:
            gaps = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
            at = gaps.index(min(gaps))
            spans[at : at + 2] = [_joined(spans[at], spans[at + 1])]
        self.engines[engine] = spans
        while len(self.engines) > ENGINES_MAX:
            del self.engines[min(self.engines, key=lambda name: self.engines[name][-1][1])]

    def add(self, other: Lineage) -> None:
        """Spans of both."""
        for engine, spans in other.engines.items():
            self._keep(engine, [*self.engines.get(engine, ()), *spans])

    def common_span(self, other: Lineage, engine: str) -> tuple[int, int] | None:
        """First and last time of rows of an engine that both have learned; None without any."""
        for mine in self.engines.get(engine, ()):
            for theirs in other.engines.get(engine, ()):
                first, last = max(mine[0], theirs[0]), min(mine[1], theirs[1])
                if first <= last and (mine[0] == theirs[0] or not _ADDRESS.match(engine)):
                    return first, last
        return None

    def main_engine(self) -> str:
        """The engine of the most rows; empty when none is known."""
        rows = {engine: sum(span[2] for span in spans) for engine, spans in self.engines.items()}
        return max(sorted(rows), key=rows.__getitem__, default="")


class LineageLedger:
    """The lineages of states that are to be merged, by name of the state."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], list[tuple[str, Lineage]]] = {}

    def accept(self, state: str, lineages: Mapping[str, Lineage]) -> None:
        """Accept a state whole or not at all: StateError names the engine and the state that already has its rows."""
        every = [(config_id, engine) for config_id, lineage in lineages.items() for engine in lineage.engines]
        for config_id, engine in every:
            for holder, held in self._holders.get((config_id, engine), ()):
                span = held.common_span(lineages[config_id], engine)
                if span is not None:
                    raise StateError(
                        f"{state}: engine {engine!r} of configuration {config_id} is in {holder} too, both with"
                        f" its rows of {_text(span[0])} to {_text(span[1])}, which would count twice"
                    )
        for key in every:
            self._holders.setdefault(key, []).append((state, lineages[key[0]]))


def _joined(a: Span, b: Span) -> Span:
    return min(a[0], b[0]), max(a[1], b[1]), a[2] + b[2]


def _text(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
