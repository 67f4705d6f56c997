"""A state as it was at one moment, and its file piece by piece.

Whoever changes the state takes it: what may change is copied, and large arrays are lent (``Array(..., lent=True)``), so
that this takes milliseconds and little memory. Encoding takes a hundred times as long and is done where nobody waits.

Guarantee: what is taken and then encoded piece by piece, while the state changes, is the file that would have been made
of it at once (tests/property/test_sidecar_state.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping

import msgspec

from .arrays import packed
from .codec import VERSION, _pack
from .file import sealed
from .graph import Dumped, dump

PIECE_BYTES = 1 << 20
_MAP, _ARRAY = (0x80, 0xDE), (0x90, 0xDC)
"""First bytes in MessagePack: of a few items, and of more of them."""
# Format: MessagePack counts up to 15 in the head itself, and up to 2^16 - 1 in two bytes.
_FEW, _U16_MAX = 15, (1 << 16) - 1


class Taken:
    """Taken by the thread that changes the objects; ``pieces`` are asked for once, by any thread."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = {name: root if isinstance(root, dict) else dump(root) for name, root in parts.items()}

    def pieces(self) -> Iterator[bytes]:
        """The body, compressed."""
        packer = zlib.compressobj(1)
        for piece in self._pieces():
            yield packer.compress(piece)
        yield packer.flush()

    def _pieces(self) -> Iterator[bytes]:
        """The body of a state file, about ``PIECE_BYTES`` at a time; deterministic for equal states."""
        encode = msgspec.msgpack.Encoder(enc_hook=packed).encode
        piece = bytearray(_head(_MAP, 2) + encode("version") + encode(VERSION) + encode("parts"))
        piece += _head(_MAP, len(self._parts))
        for name in list(self._parts):
            piece += encode(name)
            part = self._parts.pop(name)
            if isinstance(part, dict):
                piece += _pack(part)
                continue
            for data in _graph_pieces(part, encode):
                piece += data
                if len(piece) >= PIECE_BYTES:
                    yield bytes(piece)
                    piece.clear()
        yield bytes(piece)

    def body(self) -> bytes:
        """The body at once."""
        return b"".join(self.pieces())


def encode(parts: Mapping[str, object]) -> bytes:
    """The file of these parts."""
    return sealed(Taken(parts).body())


def _graph_pieces(dumped: Dumped, encode: Callable[[object], bytes]) -> Iterator[bytes]:
    """A graph, object by object; what was lent for it goes back with its object."""
    graph, leases = dumped
    objects = graph["objects"]
    yield _head(_MAP, 3) + encode("kinds") + encode(graph["kinds"]) + encode("objects") + _head(_ARRAY, len(objects))
    for number, entry in enumerate(objects):
        yield encode(entry)
        objects[number] = None  # may be large
        if number in leases:
            leases[number].over = True
    yield encode("root") + encode(graph["root"])


def _head(kind: tuple[int, int], count: int) -> bytes:
    """What stands before the items of a map or an array."""
    few, more = kind
    if count <= _FEW:
        return bytes([few | count])
    if count <= _U16_MAX:
        return bytes([more]) + count.to_bytes(2, "big")
    return bytes([more + 1]) + count.to_bytes(4, "big")
