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
from typing import Final

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.decode import vocabulary as words
from collector.decode.attributes import Value
from collector.decode.records import fingerprint
from collector.telemetry import GPU, Counts, Direction, KvSkip, Phase, Skip, table

from . import layouts as wire
from .layouts import NOT_NUMBERED, BlockMove, KvBatch

_SEQ_BYTES: Final = 8
_FRAMES: Final = range(2, 5)
_BLOCK_SIZE_MAX: Final = 1 << 20
_FIXARRAY, _ARRAY_16, _ARRAY_32 = 0x90, 0xDC, 0xDD
_RANK_MAX: Final = 1 << 16
_ON_GPU: Final = frozenset({GPU, None})
"""Old vLLM names no medium."""


class _Line(msgspec.Struct, gc=False):
    """One message recorded as a JSON line; base64 is msgspec's own form of bytes in JSON."""

    payload_b64: bytes
    seq: int
    recv_unix_ns: int = 0


_LINE = msgspec.json.Decoder(_Line)
LINE_MARK: Final = b'"payload_b64"'
"""A recorded KV line holds this key; an OTLP/JSON line never does."""


def read_line(line: bytes, source: str) -> KvBatch | KvSkip:
    """One recorded message; what else the line holds (a decoded copy, say) is skipped over unread."""
    try:
        line_record = _LINE.decode(line)
    except wire.BAD:
        return KvSkip.UNDECODABLE
    return read_payload(line_record.payload_b64, source, line_record.seq)


def read_frames(frames: Sequence[bytes], source: str) -> KvBatch | KvSkip:
    """One ZMQ message: its last two frames are sequence and payload, whatever precedes them."""
    if len(frames) not in _FRAMES or len(frames[-2]) != _SEQ_BYTES:
        return KvSkip.FRAMES
    return read_payload(frames[-1], source, int.from_bytes(frames[-2], "big"))


def read_payload(payload: bytes, source: str, seq: int) -> KvBatch | KvSkip:
    """Decode one msgpack batch; ``seq`` is its publisher's count of batches."""
    try:
        batch: wire.BatchOfArrays | wire.BatchOfMaps = wire.BATCH.decode(payload)
    except wire.BAD:
        try:
            batch = wire.BATCH_OF_MAPS.decode(payload)
        except wire.BAD:
            return _read_loose(payload, source, seq)
    return _counted(batch, batch.events, source, seq)


def _read_loose(payload: bytes, source: str, seq: int) -> KvBatch | KvSkip:
    """A batch with events nobody knows, or with both encodings: event by event."""
    try:
        batch: wire.LooseBatch | wire.LooseMapBatch = wire.LOOSE.decode(payload)
    except wire.BAD:
        try:
            batch = wire.LOOSE_MAP.decode(payload)
        except wire.BAD:
            return KvSkip.UNDECODABLE
    events: list[wire.AnyEvent] = []
    for raw in batch.events:
        for decoder in (wire.ARRAY_EVENT, wire.MAP_EVENT):
            try:
                events.append(decoder.decode(raw))
            except wire.BAD:
                continue
            break
    return _counted(batch, events, source, seq)


class Counted:
    """Adds up the events of one batch."""

    __slots__ = ("block_size", "foreign", "moves", "offload_block_size", "removed", "removed_below", "stored")

    def __init__(self) -> None:
        self.stored = self.removed = self.removed_below = self.foreign = 0
        self.block_size = self.offload_block_size = 0
        self.moves: list[BlockMove] = []

    def stored_in(self, medium: str | None, blocks: int, block_size: int, group: int | None) -> None:
        """Blocks entered a tier; of a hybrid cache's groups the first stands for all."""
        if blocks < 0 or not 0 < block_size <= _BLOCK_SIZE_MAX:
            self.foreign += 1
        elif medium not in _ON_GPU:
            self.offload_block_size = block_size
        elif not group:
            self.stored += blocks
            self.block_size = block_size

    def removed_from(self, medium: str | None, blocks: int, group: int | None) -> None:
        """Blocks left a tier."""
        if blocks < 0:
            self.foreign += 1
        elif medium not in _ON_GPU:
            self.removed_below += blocks
        elif not group:
            self.removed += blocks

    def moved(self, move: BlockMove) -> None:
        """Blocks moved between tiers, if the numbers make sense."""
        if 0 <= move.blocks <= words.COUNT_MAX and -1 <= move.step <= words.ID_MAX:
            self.moves.append(move)
        else:
            self.foreign += 1

    def batch(self, source: str, seq: int, ts_unix_ns: int, rank: int, events: int) -> KvBatch | KvSkip:
        """The record; a bad time, sequence or rank makes the whole batch useless."""
        if not words.UNIX_MIN <= ts_unix_ns <= words.UNIX_MAX or not -1 <= seq < words.TIME_MAX:
            return KvSkip.OUT_OF_RANGE
        if not 0 <= rank < _RANK_MAX:
            return KvSkip.OUT_OF_RANGE
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
            events=events,
            foreign=self.foreign,
        )


def _counted(batch: wire.AnyBatch, events: Sequence[wire.AnyEvent], source: str, seq: int) -> KvBatch | KvSkip:
    counted = Counted()
    counted.foreign = len(batch.events) - len(events)
    for event in events:
        if isinstance(event, wire.BlockStored | wire.BlockStoredMap):
            counted.stored_in(event.medium, array_length(event.block_hashes), event.block_size, event.group_idx)
        elif isinstance(event, wire.BlockRemoved | wire.BlockRemovedMap):
            counted.removed_from(event.medium, array_length(event.block_hashes), event.group_idx)
        elif not isinstance(event, wire.AllBlocksCleared | wire.AllBlocksClearedMap):
            counted.moved(event.move())
    ts_unix_ns = round(batch.ts * 1e9) if math.isfinite(batch.ts * 1e9) else 0
    return counted.batch(source, seq, ts_unix_ns, batch.data_parallel_rank or 0, len(batch.events))


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


SOURCE = "otlp"


class Foreign(Exception):
    """An event nobody knows, or one whose fields make no sense; never leaves this module."""


def read_span_events(
    events: Iterable[Span.Event], instance: str, values: Callable[[Span.Event], Mapping[str, Value]], counts: Counts
) -> list[KvBatch]:
    """The batches in one span's events; ``values`` reads an event's scalar attributes."""
    out = []
    keyed = [(event, values(event)) for event in events]
    for (unix_ns, rank, seq), group in groupby(keyed, key=_batch_of):
        counted = Counted()
        size = 0
        for event, fields in group:
            size += 1
            before = counted.foreign
            try:
                _READ.get(event.name, _foreign)(counted, fields)
            except Foreign:
                counted.foreign += 1
            counts[table.SKIPPED_EVENTS, Skip.FOREIGN_EVENT] += counted.foreign - before
            counts[table.DECODED_EVENTS_OK] += 1 - (counted.foreign - before)
        batch = counted.batch(SOURCE, seq, unix_ns, rank, size)
        if isinstance(batch, KvSkip):
            accepted = size - counted.foreign
            counts[table.DECODED_EVENTS_OK] -= accepted
            counts[table.SKIPPED_EVENTS, Skip.OUT_OF_RANGE] += accepted
            continue
        out.append(batch.of(instance))
    return out


def _batch_of(pair: tuple[Span.Event, Mapping[str, Value]]) -> tuple[int, int, int]:
    event, fields = pair
    rank, seq = fields.get("data_parallel_rank", 0), fields.get("batch_seq", NOT_NUMBERED)
    return event.time_unix_nano, rank if isinstance(rank, int) else -1, seq if isinstance(seq, int) else NOT_NUMBERED


def _integer(fields: Mapping[str, Value], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Foreign
    return value


def _text(fields: Mapping[str, Value], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise Foreign
    return value


def _foreign(_counted: Counted, _fields: Mapping[str, Value]) -> None:
    raise Foreign


def _stored(counted: Counted, fields: Mapping[str, Value]) -> None:
    blocks, size = _integer(fields, "block_count"), _integer(fields, "block_size")
    counted.stored_in(_text(fields, "medium") or GPU, blocks, size, _integer(fields, "group_idx", 0))


def _removed(counted: Counted, fields: Mapping[str, Value]) -> None:
    blocks = _integer(fields, "block_count")
    counted.removed_from(_text(fields, "medium") or GPU, blocks, _integer(fields, "group_idx", 0))


def _cleared(_counted: Counted, _fields: Mapping[str, Value]) -> None:
    """The prefix cache was reset: nothing to count."""


def _moved(direction: Direction | None, phase: Phase, count: str = "block_count") -> Callable[..., None]:
    """A reader of moves: of a fixed direction, or of the one its media tell."""

    def read(counted: Counted, fields: Mapping[str, Value]) -> None:
        towards = direction if direction is not None else Direction.between(*_media(fields))
        outcome = Phase.FAILED if phase is Phase.COMPLETED and fields.get("success", True) is False else phase
        step = _integer(fields, "scheduler_step", NOT_NUMBERED)
        request = fingerprint(_text(fields, "request_id"))
        counted.moved(BlockMove(towards, outcome, _integer(fields, count), step, request))

    return read


def _media(fields: Mapping[str, Value]) -> tuple[str, str]:
    return _text(fields, "source_medium"), _text(fields, "dest_medium")


def _evicted(counted: Counted, fields: Mapping[str, Value]) -> None:
    direction = Direction.OTHER if _text(fields, "medium") == GPU else Direction.OFFLOAD
    _moved(direction, Phase.EVICTED, "blocks_evicted")(counted, fields)


_READ: dict[str, Callable[[Counted, Mapping[str, Value]], None]] = {
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
