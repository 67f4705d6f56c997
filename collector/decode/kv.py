"""KV-cache events, as msgpack messages and as span events, to small records of counts.

What vLLM publishes (wire contract §7; stock 0.32 encodes events as maps instead of arrays, the same fields by name):

    [ts seconds, [event, ...], data_parallel_rank, scheduler_step]        event = ["BlockStored", hashes, parent, ...]

Token ids are prompt and response content: they stay undecoded (``msgspec.Raw``) and are gone when the record is made;
so are block hashes, which derive from them. Longer arrays and unknown keys are ignored, unknown events counted.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from collector.telemetry import Counts, Skip, table

from . import vocabulary as words
from .records import MISSING, fingerprint

GPU: Final = "GPU"
_SEQ_BYTES: Final = 8
_FRAMES: Final = range(2, 5)
_BLOCK_SIZE_MAX: Final = 1 << 20
_RANK_MAX: Final = 1 << 16
_FIXARRAY, _ARRAY_16, _ARRAY_32 = 0x90, 0xDC, 0xDD


class Move(enum.StrEnum):
    """What happened to blocks, seen from the GPU."""

    OFFLOADED = "offloaded"
    RESTORED = "restored"
    EVICTED = "evicted"
    """From a tier below the GPU."""


class BlockMove(msgspec.Struct, frozen=True, gc=False):
    """Blocks moved or evicted; ``blocks`` counts the source's own blocks, ``step`` is MISSING where unnamed."""

    move: Move
    blocks: int
    step: int = MISSING
    request: str = ""


class KvBatch(msgspec.Struct, frozen=True, gc=False):
    """What one batch said, counted: at most one batch a step, stamped at the end of the step.

    ``source`` names the publisher (endpoint or file); ``instance`` its engine, where the endpoint's address tells it.
    Block counts are GPU blocks of the first cache group, ``removed_below`` those of the tiers below the GPU.
    """

    source: str
    rank: int
    seq: int
    ts_unix_ns: int
    instance: str = ""
    stored_blocks: int = 0
    removed_blocks: int = 0
    removed_below: int = 0
    block_size: int = 0
    offload_block_size: int = 0
    moves: tuple[BlockMove, ...] = ()
    events: int = 0
    foreign: int = 0

    def of(self, instance: str) -> KvBatch:
        """The same, from an emitter whose name is known."""
        return msgspec.structs.replace(self, instance=instance)


def count_batch(counts: Counts, batch: KvBatch, skip: Skip | None) -> None:
    """Count a decoded batch and, unless it is skipped as a whole, what it holds.

    Each is counted once, by what became of it.
    """
    counts[table.KV_BATCHES, skip or table.ACCEPTED] += 1
    counts[table.KV_EVENTS, skip or table.ACCEPTED] += batch.events - (0 if skip else batch.foreign)
    if batch.foreign and skip is None:
        counts[table.KV_EVENTS, Skip.FOREIGN] += batch.foreign


# --- what an event means, by its fields -------------------------------------------------------------------------------

Fields = Mapping[str, Any]
"""Scalars of an event by vLLM's names, and ``block_count`` for its hashes; None and absent are the same."""


class _Foreign(Exception):
    """An event nobody knows, or one whose fields make no sense; never leaves this module."""


class _Counted:
    """Adds up the events of one batch."""

    def __init__(self) -> None:
        self.stored = self.removed = self.removed_below = self.events = self.foreign = 0
        self.block_size = self.offload_block_size = 0
        self.moves: list[BlockMove] = []

    def add(self, name: str, fields: Fields) -> None:
        """Count an event."""
        self.events += 1
        try:
            EVENTS.get(name, _unknown)(self, fields)
        except _Foreign:
            self.foreign += 1

    def batch(self, source: str, seq: int, ts_unix_ns: int, rank: int) -> KvBatch | Skip:
        """The record; a bad time, sequence or rank makes the whole batch useless."""
        is_timely = words.UNIX_MIN <= ts_unix_ns <= words.UNIX_MAX
        if not is_timely or not 0 <= seq < words.TIME_MAX or not 0 <= rank < _RANK_MAX:
            return Skip.INVALID
        return KvBatch(
            source=source,
            rank=rank,
            seq=seq,
            ts_unix_ns=ts_unix_ns,
            stored_blocks=self.stored,
            removed_blocks=self.removed,
            removed_below=self.removed_below,
            block_size=self.block_size,
            offload_block_size=self.offload_block_size,
            moves=tuple(self.moves),
            events=self.events,
            foreign=self.foreign,
        )


def _integer(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Foreign
    return value


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _Foreign
    return value or ""


def _unknown(_counted: _Counted, _fields: Fields) -> None:
    raise _Foreign


def _nothing(_counted: _Counted, _fields: Fields) -> None:
    """Known, and of no use: the cache was reset, or a transfer that is counted when it begins is said again."""


def _stored(counted: _Counted, fields: Fields) -> None:
    """Blocks entered a tier; of a hybrid cache's groups the first stands for all. Old vLLM names no medium."""
    blocks, size = _integer(fields, "block_count"), _integer(fields, "block_size")
    medium, group = _text(fields, "medium") or GPU, _integer(fields, "group_idx", 0)
    if blocks < 0 or not 0 < size <= _BLOCK_SIZE_MAX:
        raise _Foreign
    if medium != GPU:
        counted.offload_block_size = size
    elif not group:
        counted.stored += blocks
        counted.block_size = size


def _removed(counted: _Counted, fields: Fields) -> None:
    """Blocks left a tier."""
    blocks = _integer(fields, "block_count")
    medium, group = _text(fields, "medium") or GPU, _integer(fields, "group_idx", 0)
    if blocks < 0:
        raise _Foreign
    if medium != GPU:
        counted.removed_below += blocks
    elif not group:
        counted.removed += blocks


def _move(counted: _Counted, fields: Fields, move: Move, count: str) -> None:
    blocks, step = _integer(fields, count), _integer(fields, "scheduler_step", MISSING)
    request = fingerprint(_text(fields, "request_id"))
    if not 0 <= blocks <= words.COUNT_MAX or not -1 <= step <= words.ID_MAX:
        raise _Foreign
    counted.moves.append(BlockMove(move, blocks, step, request))


def _transferred(counted: _Counted, fields: Fields) -> None:
    """Blocks begin to move between tiers; between two of them below the GPU no step waits for that."""
    from_gpu, to_gpu = (_text(fields, medium) == GPU for medium in ("source_medium", "dest_medium"))
    if from_gpu != to_gpu:
        _move(counted, fields, Move.OFFLOADED if from_gpu else Move.RESTORED, "block_count")


def _evicted(counted: _Counted, fields: Fields) -> None:
    if _text(fields, "medium") != GPU:
        _move(counted, fields, Move.EVICTED, "blocks_evicted")


EVENTS: Final[dict[str, Callable[[_Counted, Fields], None]]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _nothing,
    "TransferInitiated": _transferred,
    "TransferCompleted": _nothing,
    "CacheLoadCommitted": _nothing,
    "CacheStoreCommitted": _nothing,
    "CacheEviction": _evicted,
    "RemoteTransferInitiated": _nothing,
    "RemoteTransferCompleted": _nothing,
}
"""What is done with the fields of an event, by its name. A commitment is stamped a step before its transfer (§7.4)."""


# --- msgpack ----------------------------------------------------------------------------------------------------------

_BLOCKS: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_LAYOUTS: Final[dict[object, tuple[str, ...]]] = {
    "BlockStored": _BLOCKS,
    "BlockRemoved": ("block_hashes", "medium"),
    "TransferInitiated": ("transfer_id", "request_id", "source_medium", "dest_medium", "block_count", "scheduler_step"),
    "CacheEviction": ("medium", "blocks_evicted", "eviction_reason", "scheduler_step"),
}
"""Fields of each event in their order on the wire, where events are arrays; as maps they bear the same names."""
_COUNTS: Final = {"block_size", "block_count", "blocks_evicted", "group_idx", "scheduler_step"}
_SCALARS: Final = _COUNTS | {"medium", "source_medium", "dest_medium", "request_id"}
"""Fields that are decoded; msgspec steps over the others."""
_BATCH: Final = ("ts", "events", "data_parallel_rank")

_NAMED: Final[msgspec.msgpack.Decoder[list[msgspec.Raw] | dict[str, msgspec.Raw]]] = msgspec.msgpack.Decoder(
    list[msgspec.Raw] | dict[str, msgspec.Raw]
)
_SCALAR: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(bool | int | float | str | None)
_LIST: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_SECONDS: Final = msgspec.msgpack.Decoder(float)
_RANK: Final[msgspec.msgpack.Decoder[int | None]] = msgspec.msgpack.Decoder(int | None)
_BAD: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError)
"""Everything msgspec raises on bytes of any kind, and what is missing."""


class _Line(msgspec.Struct, gc=False):
    """One message recorded as a JSON line; base64 is msgspec's own form of bytes in JSON."""

    payload_b64: bytes
    seq: int
    recv_unix_ns: int = 0


_LINE: Final = msgspec.json.Decoder(_Line)
LINE_MARK: Final = b'"payload_b64"'
"""A recorded KV line holds this key; an OTLP/JSON line never does."""


def read_line(line: bytes, source: str) -> KvBatch | Skip:
    """One recorded message; what else the line holds (a decoded copy, say) is skipped over unread."""
    try:
        record = _LINE.decode(line)
    except _BAD:
        return Skip.UNDECODABLE
    return read_payload(record.payload_b64, source, record.seq)


def read_frames(frames: Sequence[bytes], source: str) -> KvBatch | Skip:
    """One ZMQ message: its last two frames are sequence and payload, whatever precedes them."""
    if len(frames) not in _FRAMES or len(frames[-2]) != _SEQ_BYTES:
        return Skip.UNDECODABLE
    return read_payload(frames[-1], source, int.from_bytes(frames[-2], "big"))


def read_payload(payload: bytes, source: str, seq: int) -> KvBatch | Skip:
    """Decode one msgpack batch; ``seq`` is its publisher's count of batches."""
    try:
        batch = _NAMED.decode(payload)
        named = dict(zip(_BATCH, batch, strict=False)) if isinstance(batch, list) else batch
        ts_s, events = _SECONDS.decode(named["ts"]), _LIST.decode(named["events"])
        rank = _RANK.decode(named["data_parallel_rank"]) if "data_parallel_rank" in named else None
    except _BAD:
        return Skip.UNDECODABLE
    counted = _Counted()
    for raw in events:
        try:
            name, fields = _event(raw)
        except _BAD:
            name, fields = "", {}
        counted.add(name, fields)
    ts_unix_ns = round(ts_s * 1e9) if math.isfinite(ts_s * 1e9) else 0
    return counted.batch(source, seq, ts_unix_ns, rank or 0)


def _event(raw: msgspec.Raw) -> tuple[str, Fields]:
    """Name and fields of an event, an array whose first element is its name, or a map with ``type``."""
    event: Any = _NAMED.decode(raw)
    is_list = isinstance(event, list)
    name = _SCALAR.decode(event[0] if is_list else event["type"])
    fields: dict[str, Any] = {}
    for key, value in zip(_LAYOUTS.get(name, ()), event[1:], strict=False) if is_list else event.items():
        if key in _SCALARS:
            fields[key] = _SCALAR.decode(value)
        elif key == "block_hashes":
            fields["block_count"] = array_length(value)
    return str(name), fields


def array_length(raw: msgspec.Raw) -> int:
    """Elements of an undecoded msgpack array, from its head; -1 when it is no array.

    msgspec has walked the value when it cut it out of the message, so the head tells the truth.
    """
    view = memoryview(raw)
    if len(view) == 0:
        return -1
    head = view[0]
    if head & 0xF0 == _FIXARRAY:
        return head & 0x0F
    if head == _ARRAY_16:
        return int.from_bytes(view[1:3], "big")
    return int.from_bytes(view[1:5], "big") if head == _ARRAY_32 else -1
