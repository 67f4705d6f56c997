"""KV-cache events, as msgpack messages and as span events, to small records of counts.

What vLLM publishes (wire contract §7; stock 0.32 encodes events as maps instead of arrays, the same fields by name):

    [ts seconds, [event, ...], data_parallel_rank, scheduler_step]        event = ["BlockStored", hashes, parent, ...]

Token ids are prompt and response content: they stay undecoded (``msgspec.Raw``) and are gone when the record is made;
so are block hashes, which derive from them. Longer arrays and unknown keys are ignored, unknown events counted.

As OTLP span events they come by the same port as all else, in scope ``vllm.kv_events``. A span event's name is the
event's type, its attributes are the fields by their names in vLLM, its time is the batch's. ``block_hashes`` becomes
``block_count``; token ids are never sent. Of the batch there are ``data_parallel_rank`` (0 if left out) and, where the
sender numbers its batches, ``batch_seq``. Events of one time, rank and number are one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Union

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.telemetry import GPU, Counts, Direction, KvSkip, Phase, Skip, table

from . import vocabulary as words
from .records import fingerprint

NOT_NUMBERED: Final = -1
"""Sequence of a batch whose carrier does not count, step of an event that names none; as ``records.MISSING``."""
OTLP_SOURCE: Final = "otlp"
_SEQ_BYTES: Final = 8
_FRAMES: Final = range(2, 5)
_BLOCK_SIZE_MAX: Final = 1 << 20
_RANK_MAX: Final = 1 << 16
_FIXARRAY, _ARRAY_16, _ARRAY_32 = 0x90, 0xDC, 0xDD


class BlockMove(msgspec.Struct, frozen=True, gc=False):
    """Blocks moved or evicted; ``blocks`` counts the source's own blocks, ``step`` is NOT_NUMBERED where unnamed."""

    direction: Direction
    phase: Phase
    blocks: int
    step: int = NOT_NUMBERED
    request: str = ""


class KvBatch(msgspec.Struct, frozen=True, gc=False):
    """What one batch said, counted: at most one batch a step, stamped at the end of the step.

    ``source`` names the publisher (endpoint or file); ``instance`` the emitting engine where the carrier tells it.
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


def count_batch(counts: Counts, batch: KvBatch, skip: KvSkip | None) -> None:
    """Count a decoded batch and, unless it is skipped as a whole, what it holds.

    received = accepted + Σ skipped, for messages and for events, always.
    """
    counts[table.KV_MESSAGES] += 1
    counts[table.KV_EVENTS] += batch.events
    if skip is not None:
        counts[table.KV_MESSAGES_SKIPPED, skip] += 1
        counts[table.KV_EVENTS_SKIPPED, skip] += batch.events
        return
    counts[table.KV_MESSAGES_OK] += 1
    counts[table.KV_EVENTS_OK] += batch.events - batch.foreign
    if batch.foreign:
        counts[table.KV_EVENTS_SKIPPED, KvSkip.FOREIGN_EVENT] += batch.foreign
    for move in batch.moves:
        counts[table.KV_TRANSFERS, move.direction, move.phase] += 1
        counts[table.KV_BLOCKS, move.direction, move.phase] += move.blocks


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

    def batch(self, source: str, seq: int, ts_unix_ns: int, rank: int, instance: str = "") -> KvBatch | KvSkip:
        """The record; a bad time, sequence or rank makes the whole batch useless."""
        is_timely = words.UNIX_MIN <= ts_unix_ns <= words.UNIX_MAX
        if not is_timely or not -1 <= seq < words.TIME_MAX or not 0 <= rank < _RANK_MAX:
            return KvSkip.OUT_OF_RANGE
        return KvBatch(
            source=source,
            rank=rank,
            seq=seq,
            ts_unix_ns=ts_unix_ns,
            instance=instance,
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


def _cleared(_counted: _Counted, _fields: Fields) -> None:
    """The prefix cache was reset: nothing to count."""


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


def _moved(direction: Direction | None, phase: Phase, count: str = "block_count") -> Callable[[_Counted, Fields], None]:
    """A reader of moves between tiers: of a fixed direction, or of the one its media tell."""

    def read(counted: _Counted, fields: Fields) -> None:
        towards = direction
        if towards is None:
            towards = Direction.between(_text(fields, "source_medium"), _text(fields, "dest_medium"))
        outcome = Phase.FAILED if phase is Phase.COMPLETED and fields.get("success", True) is False else phase
        blocks, step = _integer(fields, count), _integer(fields, "scheduler_step", NOT_NUMBERED)
        request = fingerprint(_text(fields, "request_id"))
        if not 0 <= blocks <= words.COUNT_MAX or not -1 <= step <= words.ID_MAX:
            raise _Foreign
        counted.moves.append(BlockMove(towards, outcome, blocks, step, request))

    return read


def _evicted(counted: _Counted, fields: Fields) -> None:
    direction = Direction.OTHER if _text(fields, "medium") == GPU else Direction.OFFLOAD
    _moved(direction, Phase.EVICTED, "blocks_evicted")(counted, fields)


EVENTS: Final[dict[str, Callable[[_Counted, Fields], None]]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
    "TransferInitiated": _moved(None, Phase.INITIATED),
    "TransferCompleted": _moved(None, Phase.COMPLETED),
    "CacheLoadCommitted": _moved(Direction.RESTORE, Phase.COMMITTED),
    "CacheStoreCommitted": _moved(Direction.OFFLOAD, Phase.COMMITTED),
    "CacheEviction": _evicted,
    "RemoteTransferInitiated": _moved(Direction.REMOTE, Phase.INITIATED),
    "RemoteTransferCompleted": _moved(Direction.REMOTE, Phase.COMPLETED),
}
"""What is done with the fields of an event, by its name. A commitment is stamped a step before its transfer (§7.4)."""


# --- msgpack ----------------------------------------------------------------------------------------------------------

_RAW = msgspec.Raw
_LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "BlockStored": {
        "block_hashes": _RAW,
        "parent_block_hash": _RAW,
        "token_ids": _RAW,
        "block_size": int,
        "lora_id": _RAW,
        "medium": str | None,
    },
    "BlockRemoved": {"block_hashes": _RAW, "medium": str | None},
    "AllBlocksCleared": {},
    "TransferInitiated": {
        "transfer_id": _RAW,
        "request_id": str,
        "source_medium": str,
        "dest_medium": str,
        "block_count": int,
        "scheduler_step": int | None,
    },
    "TransferCompleted": {
        "transfer_id": _RAW,
        "request_id": str,
        "source_medium": str,
        "dest_medium": str,
        "block_count": int,
        "success": bool,
        "scheduler_step": int | None,
    },
    "CacheLoadCommitted": {"request_id": str, "medium": _RAW, "block_count": int, "scheduler_step": int | None},
    "CacheStoreCommitted": {"request_id": str, "medium": _RAW, "block_count": int, "scheduler_step": int | None},
    "CacheEviction": {"medium": str, "blocks_evicted": int, "eviction_reason": _RAW, "scheduler_step": int | None},
    "RemoteTransferInitiated": {
        "transfer_id": _RAW,
        "request_id": str,
        "connector_type": _RAW,
        "source_rank": _RAW,
        "dest_rank": _RAW,
        "block_count": int,
    },
    "RemoteTransferCompleted": {
        "transfer_id": _RAW,
        "request_id": str,
        "connector_type": _RAW,
        "source_rank": _RAW,
        "dest_rank": _RAW,
        "block_count": int,
        "success": bool,
    },
}
"""Fields of each event in their order on the wire; what is not used is ``Raw``, which msgspec steps over."""
_LATER: Final = frozenset({"lora_id", "eviction_reason"})
"""Fields beside those that may be None without which an array may end."""


def _array_of(name: str) -> Any:
    """An event as an array: element 0 names its type."""
    fields = [
        (field, kind, _RAW()) if field in _LATER else (field, kind, None) if _may_be_none(kind) else (field, kind)
        for field, kind in _LAYOUTS[name].items()
    ]
    return msgspec.defstruct(name, fields, array_like=True, tag=name, gc=False)


def _map_of(name: str) -> Any:
    """An event as a map: ``type`` names its type; fields that are None may be missing, and Raw ones are not read."""
    used = {field: kind for field, kind in _LAYOUTS[name].items() if kind is not _RAW or field == "block_hashes"}
    used |= {"group_idx": int | None} if "block_hashes" in used else {}
    fields = [
        (field, kind, True) if field == "success" else (field, kind, None) if _may_be_none(kind) else (field, kind)
        for field, kind in used.items()
    ]
    return msgspec.defstruct(name, fields, tag_field="type", tag=name, gc=False, kw_only=True)


def _may_be_none(kind: Any) -> bool:
    return kind in (str | None, int | None)


_AnyArray: Any = Union[tuple(_array_of(name) for name in _LAYOUTS)]  # noqa: UP007 -- made of a table
_AnyMap: Any = Union[tuple(_map_of(name) for name in _LAYOUTS)]  # noqa: UP007


def _batch_decoder(events: Any, *, array_like: bool = True) -> msgspec.msgpack.Decoder[Any]:
    fields: list[Any] = [("ts", float), ("events", list[events]), ("data_parallel_rank", int | None, 0)]
    return msgspec.msgpack.Decoder(msgspec.defstruct("Batch", fields, array_like=array_like, gc=False))


_WHOLE: Final = (_batch_decoder(_AnyArray), _batch_decoder(_AnyMap))
_LOOSE: Final = (_batch_decoder(msgspec.Raw), _batch_decoder(msgspec.Raw, array_like=False))
"""Of a batch with events nobody knows, or with both encodings: event by event."""
_ONE_EVENT: Final = (msgspec.msgpack.Decoder(_AnyArray), msgspec.msgpack.Decoder(_AnyMap))
_BAD: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Everything msgspec raises on bytes of any kind."""


class _Line(msgspec.Struct, gc=False):
    """One message recorded as a JSON line; base64 is msgspec's own form of bytes in JSON."""

    payload_b64: bytes
    seq: int
    recv_unix_ns: int = 0


_LINE: Final = msgspec.json.Decoder(_Line)
LINE_MARK: Final = b'"payload_b64"'
"""A recorded KV line holds this key; an OTLP/JSON line never does."""


def read_line(line: bytes, source: str) -> KvBatch | KvSkip:
    """One recorded message; what else the line holds (a decoded copy, say) is skipped over unread."""
    try:
        record = _LINE.decode(line)
    except _BAD:
        return KvSkip.UNDECODABLE
    return read_payload(record.payload_b64, source, record.seq)


def read_frames(frames: Sequence[bytes], source: str) -> KvBatch | KvSkip:
    """One ZMQ message: its last two frames are sequence and payload, whatever precedes them."""
    if len(frames) not in _FRAMES or len(frames[-2]) != _SEQ_BYTES:
        return KvSkip.FRAMES
    return read_payload(frames[-1], source, int.from_bytes(frames[-2], "big"))


def read_payload(payload: bytes, source: str, seq: int) -> KvBatch | KvSkip:
    """Decode one msgpack batch; ``seq`` is its publisher's count of batches."""
    if (batch := _first(_WHOLE, payload)) is not None:
        events = batch.events
    elif (batch := _first(_LOOSE, payload)) is not None:
        events = [_first(_ONE_EVENT, raw) for raw in batch.events]
    else:
        return KvSkip.UNDECODABLE
    counted = _Counted()
    for event in events:
        if event is None:
            counted.add("", {})
            continue
        fields = msgspec.structs.asdict(event)
        if "block_hashes" in fields:
            fields["block_count"] = array_length(fields["block_hashes"])
        counted.add(type(event).__name__, fields)
    ts_unix_ns = round(batch.ts * 1e9) if math.isfinite(batch.ts * 1e9) else 0
    return counted.batch(source, seq, ts_unix_ns, batch.data_parallel_rank or 0)


def _first(decoders: Iterable[msgspec.msgpack.Decoder[Any]], data: bytes | msgspec.Raw) -> Any:
    for decoder in decoders:
        try:
            return decoder.decode(data)
        except _BAD:
            continue
    return None


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


# --- span events ------------------------------------------------------------------------------------------------------


def read_span_events(
    events: Iterable[Span.Event], instance: str, values: Callable[[Span.Event], Fields], counts: Counts
) -> list[KvBatch]:
    """The batches in one span's events; ``values`` reads an event's scalar attributes."""
    out = []
    keyed = [(event, values(event)) for event in events]
    for (unix_ns, rank, seq), group in groupby(keyed, key=_batch_of):
        counted = _Counted()
        for event, fields in group:
            counted.add(event.name, fields)
        accepted = counted.events - counted.foreign
        counts[table.SKIPPED_EVENTS, Skip.FOREIGN_EVENT] += counted.foreign
        batch = counted.batch(OTLP_SOURCE, seq, unix_ns, rank, instance)
        if isinstance(batch, KvSkip):
            counts[table.SKIPPED_EVENTS, Skip.OUT_OF_RANGE] += accepted
        else:
            counts[table.DECODED_EVENTS_OK] += accepted
            out.append(batch)
    return out


def _batch_of(pair: tuple[Span.Event, Fields]) -> tuple[int, int, int]:
    event, fields = pair
    rank, seq = fields.get("data_parallel_rank", 0), fields.get("batch_seq", NOT_NUMBERED)
    return event.time_unix_nano, rank if isinstance(rank, int) else -1, seq if isinstance(seq, int) else NOT_NUMBERED
