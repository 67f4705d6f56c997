"""KV-cache events as they stand on the wire: by position (vLLM up to 0.15, the fork) and by name (0.32).

Only what is used has a type; token ids and hashes are ``msgspec.Raw`` by position and absent by name: never decoded.
msgspec ignores trailing elements and unknown keys. ``scheduler_step`` is nil or missing where the sender knows none.
A batch becomes a record of counts, without token ids and block hashes.
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from collector.decode.records import fingerprint
from collector.telemetry import GPU, Counts, Direction, KvSkip, Phase, table

NOT_NUMBERED: Final = -1
"""Sequence of a batch whose carrier does not count, step of an event that names none; as ``records.MISSING``."""


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


# ruff: noqa: D101 -- the classes are named after the events, which the wire contract describes


class ArrayEvent(msgspec.Struct, array_like=True, tag=True, gc=False):
    """An event as an array: element 0 names its type."""


class MapEvent(msgspec.Struct, tag_field="type", tag=lambda name: name.removesuffix("Map"), gc=False):
    """An event as a map: ``type`` names its type; fields that are None may be missing."""


class BlockStored(ArrayEvent):
    block_hashes: msgspec.Raw
    parent_block_hash: msgspec.Raw
    token_ids: msgspec.Raw
    block_size: int
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: str | None = None
    group_idx: ClassVar[None] = None


class BlockStoredMap(MapEvent):
    block_hashes: msgspec.Raw
    block_size: int
    medium: str | None = None
    group_idx: int | None = None


class BlockRemoved(ArrayEvent):
    block_hashes: msgspec.Raw
    medium: str | None = None
    group_idx: ClassVar[None] = None


class BlockRemovedMap(MapEvent):
    block_hashes: msgspec.Raw
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(ArrayEvent):
    pass


class AllBlocksClearedMap(MapEvent):
    pass


def _transfer(event: TransferInitiated | TransferCompleted | TransferInitiatedMap, phase: Phase) -> BlockMove:
    direction = Direction.between(event.source_medium, event.dest_medium)
    return _move(direction, phase, event.block_count, event.scheduler_step, event.request_id)


def _move(direction: Direction, phase: Phase, blocks: int, step: int | None = None, request_id: str = "") -> BlockMove:
    return BlockMove(direction, phase, blocks, NOT_NUMBERED if step is None else step, fingerprint(request_id))


def _outcome(*, success: bool) -> Phase:
    return Phase.COMPLETED if success else Phase.FAILED


class TransferInitiated(ArrayEvent):
    transfer_id: msgspec.Raw
    request_id: str
    source_medium: str
    dest_medium: str
    block_count: int
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What moves, in blocks of the source."""
        return _transfer(self, Phase.INITIATED)


class TransferInitiatedMap(MapEvent):
    request_id: str
    source_medium: str
    dest_medium: str
    block_count: int
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What moves, in blocks of the source."""
        return _transfer(self, Phase.INITIATED)


class TransferCompleted(ArrayEvent):
    transfer_id: msgspec.Raw
    request_id: str
    source_medium: str
    dest_medium: str
    block_count: int
    success: bool
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What moved; ``step`` is the one that began it."""
        return _transfer(self, _outcome(success=self.success))


class TransferCompletedMap(TransferInitiatedMap):
    success: bool = True

    def move(self) -> BlockMove:
        """What moved; ``step`` is the one that began it."""
        return _transfer(self, _outcome(success=self.success))


class CacheLoadCommitted(ArrayEvent):
    request_id: str
    medium: str
    block_count: int
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What was decided; stamped one step before the transfer it leads to (wire contract §7.4)."""
        return _move(Direction.RESTORE, Phase.COMMITTED, self.block_count, self.scheduler_step, self.request_id)


class CacheLoadCommittedMap(MapEvent):
    request_id: str
    block_count: int
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What was decided; stamped one step before the transfer it leads to (wire contract §7.4)."""
        return _move(Direction.RESTORE, Phase.COMMITTED, self.block_count, self.scheduler_step, self.request_id)


class CacheStoreCommitted(ArrayEvent):
    request_id: str
    medium: str
    block_count: int
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What was decided; the transfer begins a step later."""
        return _move(Direction.OFFLOAD, Phase.COMMITTED, self.block_count, self.scheduler_step, self.request_id)


class CacheStoreCommittedMap(MapEvent):
    request_id: str
    block_count: int
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What was decided; the transfer begins a step later."""
        return _move(Direction.OFFLOAD, Phase.COMMITTED, self.block_count, self.scheduler_step, self.request_id)


class CacheEviction(ArrayEvent):
    medium: str
    blocks_evicted: int
    eviction_reason: msgspec.Raw = msgspec.Raw()
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What left a tier, in its own blocks."""
        return _move(_tier(self.medium), Phase.EVICTED, self.blocks_evicted, self.scheduler_step)


class CacheEvictionMap(MapEvent):
    medium: str
    blocks_evicted: int
    scheduler_step: int | None = None

    def move(self) -> BlockMove:
        """What left a tier, in its own blocks."""
        return _move(_tier(self.medium), Phase.EVICTED, self.blocks_evicted, self.scheduler_step)


def _tier(medium: str) -> Direction:
    return Direction.OTHER if medium == GPU else Direction.OFFLOAD


class RemoteTransferInitiated(ArrayEvent):
    transfer_id: msgspec.Raw
    request_id: str
    connector_type: str
    source_rank: msgspec.Raw
    dest_rank: msgspec.Raw
    block_count: int

    def move(self) -> BlockMove:
        """Blocks on their way to or from another server; no event says which."""
        return _move(Direction.REMOTE, Phase.INITIATED, self.block_count, None, self.request_id)


class RemoteTransferInitiatedMap(MapEvent):
    request_id: str
    block_count: int

    def move(self) -> BlockMove:
        """Blocks on their way to or from another server; no event says which."""
        return _move(Direction.REMOTE, Phase.INITIATED, self.block_count, None, self.request_id)


class RemoteTransferCompleted(ArrayEvent):
    transfer_id: msgspec.Raw
    request_id: str
    connector_type: str
    source_rank: msgspec.Raw
    dest_rank: msgspec.Raw
    block_count: int
    success: bool

    def move(self) -> BlockMove:
        """Blocks that came from or went to another server."""
        return _move(Direction.REMOTE, _outcome(success=self.success), self.block_count, None, self.request_id)


class RemoteTransferCompletedMap(RemoteTransferInitiatedMap):
    success: bool = True

    def move(self) -> BlockMove:
        """Blocks that came from or went to another server."""
        return _move(Direction.REMOTE, _outcome(success=self.success), self.block_count, None, self.request_id)


AnyArray = (
    BlockStored
    | BlockRemoved
    | AllBlocksCleared
    | TransferInitiated
    | TransferCompleted
    | CacheLoadCommitted
    | CacheStoreCommitted
    | CacheEviction
    | RemoteTransferInitiated
    | RemoteTransferCompleted
)
AnyMap = (
    BlockStoredMap
    | BlockRemovedMap
    | AllBlocksClearedMap
    | TransferInitiatedMap
    | TransferCompletedMap
    | CacheLoadCommittedMap
    | CacheStoreCommittedMap
    | CacheEvictionMap
    | RemoteTransferInitiatedMap
    | RemoteTransferCompletedMap
)
AnyEvent = AnyArray | AnyMap


class BatchOfArrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[AnyArray]
    data_parallel_rank: int | None = 0


class BatchOfMaps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[AnyMap]
    data_parallel_rank: int | None = 0


class LooseBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = 0


class LooseMapBatch(msgspec.Struct, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = 0


AnyBatch = BatchOfArrays | BatchOfMaps | LooseBatch | LooseMapBatch

BATCH = msgspec.msgpack.Decoder(BatchOfArrays)
BATCH_OF_MAPS = msgspec.msgpack.Decoder(BatchOfMaps)
LOOSE = msgspec.msgpack.Decoder(LooseBatch)
LOOSE_MAP = msgspec.msgpack.Decoder(LooseMapBatch)
ARRAY_EVENT = msgspec.msgpack.Decoder(AnyArray)
MAP_EVENT = msgspec.msgpack.Decoder(AnyMap)
BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Everything msgspec raises on bytes of any kind."""
