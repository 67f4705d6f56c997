"""One KV publisher's life, from its first batch to its restart: what left and entered the cache, in event time.

Batches are stamped at the end of the step whose events they carry, 20-130 µs after that step's FIRST_TOKEN (captures
c1, c5, c10); a step without events has no batch. So "nothing was stored in between" is only known where the sequence
numbers on both sides are consecutive: what lies in a gap, or behind the last batch, is unknown and stays unknown.

Order of arrival does not matter: batches are kept by (time, sequence), and each is taken once. What a life says is used
for steps from ``grace_s`` after its first batch on (they wait ``LATENESS_NS`` for it); rebuilt prefills, which wait
longer than that anyway, use it from its first batch on, and where there are no summaries from before it.
"""

from __future__ import annotations

import numpy as np

from collector.decode import MISSING
from collector.decode.kv import KvBatch
from collector.join.window import Cells
from collector.telemetry import Direction, KvSkip, Phase
from online import Floats, Ints
from online.state import Array, saved

LATENESS_NS = 10_000_000_000
"""Events of one moment arrive within this time of each other; what is asked of a moment this old is final."""
OWN_BATCH_NS = 3_000_000
"""A step's batch follows its end stamp by less than this."""
BATCHES_MAX = 65_536
"""Batches held of one life: hours of steps, 1.6 MB."""
_SAME_PROCESS_NS = 60_000_000_000
"""Step ids start again with the process; an event's time tells which process it means."""

BATCH_DTYPE = np.dtype([("ts_ns", "i8"), ("seq", "i8"), ("stored", "i8")])
ENTRY_DTYPE = np.dtype(
    [("ts_ns", "i8"), ("step", "i8"), ("offload", "i8"), ("restore", "i8"), ("evicted", "i8"), ("evicted_below", "i8")]
)
"""Blocks by step (MISSING: the one that ``ts_ns`` ends). ``restore`` and ``evicted_below`` count offload blocks."""


class KvTimeline:
    """Batches of one publisher process, bounded by count and by age."""

    STATE = saved(
        "kv_timeline",
        source=str,
        rank=int,
        block_size=int,
        offload_block_size=int,
        numbered=bool,
        _batches=Array(BATCH_DTYPE),
        _entries=Array(ENTRY_DTYPE),
        _new_batches=list[tuple[int, int, int]],
        _new_entries=list[tuple[int, int, int, int, int, int]],
        _seqs=set[int],
        _loads=dict[str, tuple[int, int]],
        _horizon_ns=int,
        oldest=tuple[int, int],
        newest=tuple[int, int],
        fresh=lambda join: KvTimeline("", 0, int(join.grace_s * 1e9)),
    )

    def __init__(self, source: str, rank: int, grace_ns: int, batches_max: int = BATCHES_MAX) -> None:
        self.source = source
        self.rank = rank
        self.block_size = 0
        self.offload_block_size = 0
        self._grace_ns = grace_ns
        self.numbered = False
        self._batches_max = batches_max
        self._batches = np.empty(0, BATCH_DTYPE)
        self._entries = np.empty(0, ENTRY_DTYPE)
        self._new_batches: list[tuple[int, int, int]] = []
        self._new_entries: list[tuple[int, int, int, int, int, int]] = []
        self._seqs: set[int] = set()
        self._loads: dict[str, tuple[int, int]] = {}
        self._horizon_ns = 0
        self.oldest = (0, 0)
        self.newest = (0, 0)

    def __len__(self) -> int:
        """How many batches are held."""
        return len(self._batches) + len(self._new_batches)

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, batch: KvBatch) -> KvSkip | None:
        """Take a batch, whatever its place; None, or why it is left out."""
        if batch.ts_unix_ns <= self._horizon_ns:
            return KvSkip.LATE
        if batch.seq != MISSING:
            if batch.seq in self._seqs:
                return KvSkip.DUPLICATE
            self._seqs.add(batch.seq)
            self.numbered = True
        place = batch.ts_unix_ns, batch.seq
        self.oldest = min(self.oldest, place) if len(self) else place
        self.newest = max(self.newest, place)
        self.block_size = self.block_size or batch.block_size
        self.offload_block_size = self.offload_block_size or batch.offload_block_size
        self._new_batches.append((batch.ts_unix_ns, batch.seq, batch.stored_blocks))
        self._add_entries(batch)
        if len(self._new_batches) > self._batches_max // 4:
            self._settle()
        return None

    def _add_entries(self, batch: KvBatch) -> None:
        below = batch.removed_below
        for move in batch.moves:
            blocks = [0, 0, 0, 0]
            if move.phase is Phase.EVICTED and move.direction is Direction.OFFLOAD:
                blocks[3] = move.blocks
                below -= move.blocks  # the same blocks come as BlockRemoved of their medium, in the same batch
            elif move.phase is Phase.INITIATED and move.direction is Direction.OFFLOAD:
                blocks[0] = move.blocks
            elif move.phase is Phase.INITIATED and move.direction is Direction.RESTORE:
                blocks[1] = move.blocks
                self._loads[move.request] = (batch.ts_unix_ns, move.blocks)
            else:
                continue
            self._new_entries.append((batch.ts_unix_ns, move.step, blocks[0], blocks[1], blocks[2], blocks[3]))
        if batch.removed_blocks or below > 0:
            self._new_entries.append((batch.ts_unix_ns, MISSING, 0, 0, batch.removed_blocks, max(0, below)))

    def _settle(self) -> None:
        """Sort in what came since; beyond the bound, the oldest go."""
        if self._new_batches:
            batches = np.concatenate((self._batches, np.array(self._new_batches, BATCH_DTYPE)))
            self._batches = batches[np.argsort(batches, order=("ts_ns", "seq"))]
            self._new_batches.clear()
        if self._new_entries:
            entries = np.concatenate((self._entries, np.array(self._new_entries, ENTRY_DTYPE)))
            self._entries = entries[np.argsort(entries, order=ENTRY_DTYPE.names)]
            self._new_entries.clear()
        self._drop(len(self._batches) - self._batches_max)

    def forget_before(self, unix_ns: int) -> None:
        """Drop what is older; it counts as late from now on."""
        self._settle()
        self._drop(int(np.searchsorted(self._batches["ts_ns"], unix_ns)))

    def _drop(self, batches: int) -> None:
        if batches <= 0:
            return
        self._horizon_ns = int(self._batches["ts_ns"][batches - 1])
        self._seqs.difference_update(self._batches["seq"][:batches].tolist())
        self._batches = self._batches[batches:].copy()
        self._entries = self._entries[np.searchsorted(self._entries["ts_ns"], self._horizon_ns, "right") :].copy()
        self._loads = {request: load for request, load in self._loads.items() if load[0] > self._horizon_ns}

    # --- what it says -----------------------------------------------------------------------------------------------

    @property
    def since_unix_ns(self) -> int:
        """Its first batch."""
        return self.oldest[0]

    @property
    def active_unix_ns(self) -> int:
        """From when on steps carry what it says."""
        return self.since_unix_ns + self._grace_ns

    @property
    def offload_ratio(self) -> float:
        """GPU blocks per offload block; 1 while either size is unknown."""
        if not self.block_size or not self.offload_block_size:
            return 1.0
        return self.offload_block_size / self.block_size

    @property
    def missing(self) -> int:
        """Sequence numbers never seen between the oldest and the newest held."""
        self._settle()
        seq = self._batches["seq"]
        return int(seq.max() - seq.min()) + 1 - len(seq) if self.numbered and len(seq) else 0

    def loaded_blocks(self, request_id: str) -> float:
        """GPU blocks that were loaded from a tier below for this request."""
        load = self._loads.get(request_id)
        return load[1] * self.offload_ratio if load is not None else 0.0

    def stored(self, after_ns: int, end_ns: int, *, own: bool) -> int | None:
        """GPU blocks stored by batches in (after_ns, end_ns]; ``own``: and by the batch of the step that ends there.

        None unless it is certain that every batch of that time is here.
        """
        self._settle()
        ts, seq = self._batches["ts_ns"], self._batches["seq"]
        first, stop = (int(i) for i in np.searchsorted(ts, (after_ns, end_ns), side="right"))
        closed = own and stop < len(ts) and ts[stop] <= end_ns + OWN_BATCH_NS
        stop += closed
        if not self._joined(first, stop, end_ns, closed=bool(closed)):
            return None
        if stop > first and int(seq[stop - 1] - seq[first]) not in (0, stop - 1 - first):
            return None
        return int(self._batches["stored"][first:stop].sum())

    def _joined(self, first: int, stop: int, end_ns: int, *, closed: bool) -> bool:
        """Whether nothing can be missing at either edge of batches first..stop-1."""
        ts, seq = self._batches["ts_ns"], self._batches["seq"]
        if first == 0:
            front = bool(len(seq)) and seq[0] == 0
        else:
            front = first == len(seq) or not self.numbered or seq[first] == seq[first - 1] + 1
        if closed:
            return bool(front)
        if stop == 0 or stop == len(ts) or ts[stop] > end_ns + LATENESS_NS:
            return False
        return bool(front) and bool(not self.numbered or seq[stop] == seq[stop - 1] + 1)

    def fill(self, cells: Cells, starts_unix_ns: Ints, first_step: int) -> None:
        """Write the block columns of steps first_step..; ``starts_unix_ns`` has one more: where the last one ends.

        NaN before ``active_unix_ns`` and where batches are missing. What has no step is put where its time falls.
        """
        self._settle()
        m = len(starts_unix_ns) - 1
        out = np.zeros((m, 3))
        entries = self._entries
        near = slice(
            *np.searchsorted(
                entries["ts_ns"], (starts_unix_ns[0] - _SAME_PROCESS_NS, starts_unix_ns[-1] + _SAME_PROCESS_NS)
            )
        )
        entries = entries[near]
        by_time = np.searchsorted(starts_unix_ns, entries["ts_ns"], side="left") - 1
        index = np.where(entries["step"] == MISSING, by_time, entries["step"] - first_step)
        inside = (index >= 0) & (index < m)
        entries, index = entries[inside], index[inside]
        blocks = np.stack(
            [
                entries["offload"],
                entries["restore"] * self.offload_ratio,
                entries["evicted"] + entries["evicted_below"] * self.offload_ratio,
            ],
            axis=1,
        )
        np.add.at(out, index, blocks)
        out[starts_unix_ns[:-1] < self.active_unix_ns] = np.nan
        self._blank_gaps(out, starts_unix_ns)
        for column, name in enumerate(("offload_blocks", "restore_blocks", "evicted_blocks")):
            cells[name][:m] = out[:, column]

    def _blank_gaps(self, out: Floats, starts_unix_ns: Ints) -> None:
        ts, seq = self._batches["ts_ns"], self._batches["seq"]
        if not self.numbered:
            return
        for gap in np.flatnonzero(np.diff(seq) > 1):
            touched = (starts_unix_ns[1:] > ts[gap]) & (starts_unix_ns[:-1] < ts[gap + 1])
            out[touched] = np.nan
