"""What a batch of KV-cache events yields: a record of counts, without token ids, without block hashes."""

from __future__ import annotations

from typing import Final

import msgspec

from collector.telemetry import Counts, Direction, KvSkip, Phase, table

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
