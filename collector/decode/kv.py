"""KV-cache events, as msgpack messages, to small records of counts.

What vLLM publishes (wire contract §7; stock 0.32 encodes events as maps instead of arrays, the same fields by name):

    [ts seconds, [event, ...], data_parallel_rank, scheduler_step]        event = ["BlockStored", hashes, parent, ...]

Token ids are prompt and response content: they stay undecoded (``msgspec.Raw``) and are gone when the record is made;
so are block hashes, which derive from them. Longer arrays and unknown keys are ignored, unknown events counted.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from collector.telemetry import Counts, Skip, table

from . import vocabulary as words
from .vocabulary import MISSING

GPU: Final = "GPU"
_RANKS_MAX: Final = 1 << 16
EVENTS_MAX: Final = 16_384
"""Most events of a batch, and most blocks of an event. A step of 65,536 tokens in blocks of 16 stores 4,096 blocks."""


class Move(enum.IntEnum):
    """What happened to blocks, seen from the GPU."""

    OFFLOADED = 0
    RESTORED = 1
    EVICTED = 2


class BlockMove(NamedTuple):
    """One kind of move: its step, MISSING where unnamed, and whether it counts blocks of the tiers below the GPU."""

    move: Move
    step: int = MISSING
    is_below: bool = False


class KvBatch(msgspec.Struct, gc=False):
    """Counts of one batch of events; an engine sends at most one a step, stamped at the step's end.

    ``source`` names the publisher (endpoint or file); ``instance`` its engine, where the endpoint's address tells it.
    ``moves`` has how many blocks moved; of the GPU's blocks, those of the first cache group are evicted.
    """

    source: str
    rank: int
    seq: int
    ts_unix_ns: int
    instance: str = ""
    block_size: int = 0
    offload_block_size: int = 0
    moves: dict[BlockMove, int] = {}
    events: int = 0
    unknown: int = 0

    def add(self, blocks: int, move: BlockMove) -> None:
        """Count blocks that moved."""
        self.moves[move] = self.moves.get(move, 0) + blocks


def count_batch(counts: Counts, batch: KvBatch, skip: Skip | None) -> None:
    """Count a decoded batch and, unless it is skipped as a whole, what it holds.

    Each is counted once, by what became of it.
    """
    counts[table.KV_BATCHES, skip or table.ACCEPTED] += 1
    counts[table.KV_EVENTS, skip or table.ACCEPTED] += batch.events - (0 if skip else batch.unknown)
    if batch.unknown and skip is None:
        counts[table.KV_EVENTS, Skip.UNKNOWN_SCOPE] += batch.unknown


# --- what an event means, by its fields -------------------------------------------------------------------------------

Fields = Mapping[str, Any]
"""Scalars of an event by vLLM's names, and ``block_count`` for its hashes; one that is None is absent."""


OF_NO_USE: Final = frozenset(
    {
        *("AllBlocksCleared", "TransferCompleted", "CacheLoadCommitted", "CacheStoreCommitted"),
        *("RemoteTransferInitiated", "RemoteTransferCompleted", "CacheEviction"),
    }
)
"""Events that need no counting: a reset of the cache, and events that repeat what another one counts.

A commitment is stamped a step before its transfer (§7.4).
"""


def _count_event(batch: KvBatch, name: str, fields: Fields) -> None:
    """Add what an event says; LookupError of one that is unknown, or lacks a field."""
    if name in ("BlockStored", "BlockRemoved"):
        _count_blocks(batch, fields, is_stored=name == "BlockStored")
    elif name == "TransferInitiated":
        # between two tiers below the GPU: no step waits for that
        from_gpu, to_gpu = (fields.get(medium) == GPU for medium in ("source_medium", "dest_medium"))
        if from_gpu != to_gpu:
            move, step = Move.OFFLOADED if from_gpu else Move.RESTORED, fields.get("scheduler_step", MISSING)
            batch.add(fields["block_count"], BlockMove(move, step, is_below=to_gpu))
    elif name not in OF_NO_USE:
        raise LookupError(name)


def _count_blocks(batch: KvBatch, fields: Fields, *, is_stored: bool) -> None:
    """Blocks entered or left a tier; of a hybrid cache's groups the first stands for all. Old vLLM names no medium."""
    blocks, size = fields["block_count"], fields["block_size"] if is_stored else 0
    is_below, is_first = (fields.get("medium") or GPU) != GPU, not fields.get("group_idx")
    if is_below and is_stored:
        batch.offload_block_size = size
    elif is_first and is_stored:
        batch.block_size = size
    elif is_below or is_first:
        batch.add(blocks, BlockMove(Move.EVICTED, is_below=is_below))


# --- msgpack ----------------------------------------------------------------------------------------------------------

_LAYOUTS: Final[dict[str, tuple[str, ...]]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "TransferInitiated": ("transfer_id", "request_id", "source_medium", "dest_medium", "block_count", "scheduler_step"),
}
"""Fields of each event in their order on the wire, where events are arrays; as maps they bear the same names."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=words.COUNT_MAX)]
_READERS: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {
    "block_size": msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(gt=0, le=1 << 20)] | None),
    "scheduler_step": msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=MISSING, le=words.ID_MAX)] | None),
    **dict.fromkeys(("block_count", "group_idx"), msgspec.msgpack.Decoder(_Count | None)),
    **dict.fromkeys(("medium", "source_medium", "dest_medium"), msgspec.msgpack.Decoder(str | None)),
}
"""By field, what it may be; msgspec steps over the others."""
_BATCH: Final = ("ts", "events", "data_parallel_rank")

_NAMED: Final[msgspec.msgpack.Decoder[list[msgspec.Raw] | dict[str, msgspec.Raw]]] = msgspec.msgpack.Decoder(
    list[msgspec.Raw] | dict[str, msgspec.Raw]
)
_LIST: Final = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)])
_NAME: Final = msgspec.msgpack.Decoder(str)
_SECONDS: Final = msgspec.msgpack.Decoder(float)
_RANK: Final[msgspec.msgpack.Decoder[int | None]] = msgspec.msgpack.Decoder(int | None)
_BAD: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError)
"""Everything msgspec raises on bytes of any kind, and what is missing or unknown."""


class _Line(msgspec.Struct, gc=False):
    """One message recorded as a JSON line; base64 is msgspec's own form of bytes in JSON."""

    payload_b64: bytes
    seq: int


_LINE: Final = msgspec.json.Decoder(_Line)
LINE_SIGNATURE: Final = b'"payload_b64"'
"""A recorded KV line holds this key; an OTLP/JSON line never does."""


def read_line(line: bytes, source: str) -> KvBatch | Skip:
    """Read one recorded message; other keys of the line, such as a decoded copy, are skipped."""
    try:
        record = _LINE.decode(line)
    except _BAD:
        return Skip.UNDECODABLE
    return read_payload(record.payload_b64, source, record.seq)


def read_payload(payload: bytes, source: str, seq: int, instance: str = "") -> KvBatch | Skip:
    """Decode one msgpack batch; ``seq`` is its publisher's count of batches."""
    try:
        batch = _NAMED.decode(payload)
        named = dict(zip(_BATCH, batch, strict=False)) if isinstance(batch, list) else batch
        ts_s, events = _SECONDS.decode(named["ts"]), _LIST.decode(named["events"])
        rank = (_RANK.decode(named["data_parallel_rank"]) if "data_parallel_rank" in named else None) or 0
    except _BAD:
        return Skip.UNDECODABLE
    ts_unix_ns = round(ts_s * 1e9) if math.isfinite(ts_s * 1e9) else 0
    is_timely = words.UNIX_MIN <= ts_unix_ns <= words.UNIX_MAX
    if not is_timely or seq not in range(words.TIME_MAX) or rank not in range(_RANKS_MAX):
        return Skip.INVALID
    counted = KvBatch(source, rank, seq, ts_unix_ns, instance)
    for raw in events:
        counted.events += 1
        try:
            _count_event(counted, *_event(raw))
        except _BAD:
            counted.unknown += 1
    return counted


def _event(raw: msgspec.Raw) -> tuple[str, Fields]:
    """Name and fields of an event, an array whose first element is its name, or a map with ``type``."""
    event: Any = _NAMED.decode(raw)
    is_list = isinstance(event, list)
    name = _NAME.decode(event[0] if is_list else event["type"])
    fields: dict[str, Any] = {}
    for key, value in zip(_LAYOUTS.get(name, ()), event[1:], strict=False) if is_list else event.items():
        if key == "block_hashes":
            fields["block_count"] = len(_LIST.decode(value))
        elif key in _READERS and (known := _READERS[key].decode(value)) is not None:
            fields[key] = known
    return name, fields
