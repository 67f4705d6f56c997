"""KV-cache events as OTLP span events: one port for all three streams.

Scope ``vllm.kv_events``; a span event's name is the event's type, its attributes are the fields by their names in vLLM,
its time is the batch's. ``block_hashes`` becomes ``block_count``; token ids are never sent. Of the batch there are
``data_parallel_rank`` (0 if left out) and, where the sender numbers its batches, ``batch_seq``. Events of one time,
rank and number are one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.decode.attributes import Value
from collector.decode.records import fingerprint
from collector.telemetry import GPU, Counts, Direction, KvSkip, Phase, Skip, table

from .batches import NOT_NUMBERED, BlockMove, KvBatch
from .messages import Counted

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
