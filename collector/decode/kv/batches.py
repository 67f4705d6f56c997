"""What a batch of KV-cache events yields: a record of counts, without token ids, without block hashes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import msgspec

from collector.telemetry import Direction, KvSkip, Phase

NOT_NUMBERED: Final = -1
"""Sequence of a batch whose carrier does not count, step of an event that names none; as ``records.MISSING``."""


class Move(msgspec.Struct, frozen=True, gc=False):
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
    moves: tuple[Move, ...] = ()
    events: int = 0
    foreign: int = 0

    def of(self, instance: str) -> KvBatch:
        """The same, from an emitter whose name is known."""
        return msgspec.structs.replace(self, instance=instance)


@dataclass(slots=True)
class KvTally:
    """received = accepted + Σ skipped, for messages and for events, always."""

    messages_received: int = 0
    messages_accepted: int = 0
    messages_skipped: Counter[KvSkip] = field(default_factory=Counter)
    events_received: int = 0
    events_accepted: int = 0
    events_skipped: Counter[KvSkip] = field(default_factory=Counter)
    transfers: Counter[tuple[Direction, Phase]] = field(default_factory=Counter)
    blocks: Counter[tuple[Direction, Phase]] = field(default_factory=Counter)
    hit_tokens: float = 0.0
    held: int = 0
    missing: int = 0
    unbound: int = 0
    """Gauges: batches held by the join, numbers missing between them, publishers of no known engine."""

    def add(self, batch: KvBatch, skip: KvSkip | None) -> None:
        """Count a decoded batch and, unless it is skipped as a whole, what it holds."""
        self.messages_received += 1
        self.events_received += batch.events
        if skip is not None:
            self.messages_skipped[skip] += 1
            self.events_skipped[skip] += batch.events
            return
        self.messages_accepted += 1
        self.events_accepted += batch.events - batch.foreign
        if batch.foreign:
            self.events_skipped[KvSkip.FOREIGN_EVENT] += batch.foreign
        for move in batch.moves:
            key = move.direction, move.phase
            self.transfers[key] += 1
            self.blocks[key] += move.blocks

    def refuse(self, skip: KvSkip) -> None:
        """Count a message that gave no batch."""
        self.messages_received += 1
        self.messages_skipped[skip] += 1
