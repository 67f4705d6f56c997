"""KV events: whose they are, and the block columns of steps.

Whose they are. No KV event names the process it comes from (wire contract §8). The configuration names the engine
(``instance`` of an endpoint), the emitter of a span event does, or there is one publisher and one engine.

When. A batch is stamped at the end of the step whose events it carries, 20-130 µs after that step's FIRST_TOKEN
(captures c1, c5, c10); a step without events has no batch. So "nothing was moved in between" is only known where the
sequence numbers on both sides are consecutive. Batches come in order of time; one that goes back is late. Columns of
steps begin ``allowed_lateness_s`` after the first batch; steps wait ``LATENESS_NS`` for their batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection
from itertools import pairwise

import numpy as np

from collector.config import Config
from collector.decode import MISSING
from collector.decode.kv import KvBatch, Move, count_batch
from collector.telemetry import Counts, Skip, table
from online import Floats, Ints

from .steps import StepView

BATCHES_MAX = 65_536
"""Batches held of one publisher, and moves of blocks: hours of steps."""
_OFFLOADED, _RESTORED, _EVICTED = range(3)
"""Columns of a step (KV_COLUMNS)."""
_SAME_PROCESS_NS = 60_000_000_000
"""Step ids start again with the process; an event's time tells which process it means."""


class KvTimeline:
    """Batches of one publisher in order of time; bounded by count and by age."""

    LATENESS_NS = 10_000_000_000
    """Events of one moment arrive within this time of each other; what is asked of a moment this old is final."""

    def __init__(self, grace_ns: int) -> None:
        self._grace_ns = grace_ns
        self._batches: list[tuple[int, int]] = []
        """(time, sequence)."""
        self._moves: list[tuple[int, int, int, float]] = []
        """(time, step or MISSING, column, GPU blocks)."""
        self.block_size = self._offload_block_size = 0
        self.since_unix_ns = 0
        """Its first batch."""
        self.is_bound = False
        """Whether it is known whose it is."""

    def __len__(self) -> int:
        """How many batches are held."""
        return len(self._batches)

    @property
    def active_unix_ns(self) -> int:
        """From when on steps carry what it says."""
        return self.since_unix_ns + self._grace_ns

    def add(self, batch: KvBatch) -> Skip | None:
        """Take the next batch; None, or why it is left out."""
        place, newest = (batch.ts_unix_ns, batch.seq), self._batches[-1] if self._batches else (0, 0)
        if place <= newest:
            return Skip.DUPLICATE if place == newest else Skip.LATE
        self._batches.append(place)
        self.since_unix_ns = self.since_unix_ns or batch.ts_unix_ns
        self.block_size = self.block_size or batch.block_size
        self._offload_block_size = self._offload_block_size or batch.offload_block_size
        sizes = self._offload_block_size, self.block_size
        ratio = sizes[0] / sizes[1] if all(sizes) else 1.0
        for move in batch.moves:
            is_restored = move.move is Move.RESTORED
            column, blocks = (_RESTORED, move.blocks * ratio) if is_restored else (_OFFLOADED, move.blocks)
            self._moves.append((batch.ts_unix_ns, move.step, column, blocks))
        if batch.removed_blocks or batch.removed_below:
            removed = batch.removed_blocks + batch.removed_below * ratio
            self._moves.append((batch.ts_unix_ns, MISSING, _EVICTED, removed))
        for held in (self._batches, self._moves):
            if len(held) > BATCHES_MAX:
                self.forget_before(held[len(held) - BATCHES_MAX][0] + 1)
        return None

    def forget_before(self, unix_ns: int) -> None:
        """Drop what is older, but for the newest batch."""
        del self._batches[: min(bisect_left(self._batches, (unix_ns,)), len(self._batches) - 1)]
        del self._moves[: bisect_left(self._moves, (unix_ns,))]

    def moved_blocks(self, starts_unix_ns: Ints, first_step: int) -> Floats:
        """Blocks offloaded, restored and evicted in m steps from first_step on, shape (m, 3).

        ``starts_unix_ns`` (m + 1,) has when each began, and where the last one ends. NaN before ``active_unix_ns`` and
        where batches are missing. What has no step is put where its time falls.
        """
        m, begin_ns, end_ns = len(starts_unix_ns) - 1, int(starts_unix_ns[0]), int(starts_unix_ns[-1])
        out = np.zeros((m, 3))
        low, high = (bisect_left(self._moves, (ns,)) for ns in (begin_ns - _SAME_PROCESS_NS, end_ns + _SAME_PROCESS_NS))
        if high > low:
            ts_ns, step, column, blocks = map(np.array, zip(*self._moves[low:high], strict=True))
            by_time = np.searchsorted(starts_unix_ns, ts_ns, side="left") - 1
            index = np.where(step == MISSING, by_time, step - first_step)
            inside = (index >= 0) & (index < m)
            np.add.at(out, (index[inside], column[inside]), blocks[inside])
        out[starts_unix_ns[:-1] < self.active_unix_ns] = np.nan
        near = slice(max(bisect_left(self._batches, (begin_ns,)) - 1, 0), bisect_left(self._batches, (end_ns,)) + 1)
        for (before_ns, before), (after_ns, after) in pairwise(self._batches[near]):
            if after > before + 1:
                out[(starts_unix_ns[1:] > before_ns) & (starts_unix_ns[:-1] < after_ns)] = np.nan
        return out


def schedule_starts(view: StepView) -> Ints:
    """Wall clock at which each step began to be scheduled, never decreasing; where no stamp says it, the one before."""
    steps, cells, lag = view.steps, view.cells, 2 if view.asynchronous else 1
    wall = steps["unix_ns"] - steps["ts_end_ns"] + steps["ts_start_ns"]
    ended = np.zeros(len(steps), np.int64)
    ended[lag:] = cells["completed_unix_ns"][:-lag]
    known = np.where(view.seen, wall, np.where(cells["scheduled_unix_ns"] > 0, cells["scheduled_unix_ns"], ended))
    return np.asarray(np.maximum.accumulate(known), np.int64)


class KvSources:
    """All publishers, at most as many as engines."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._publishers: OrderedDict[tuple[str, int, str], KvTimeline] = OrderedDict()
        self._counts = Counts()

    @property
    def unbound(self) -> int:
        """Publishers that belong to no engine, or to none yet."""
        return sum(not timeline.is_bound for timeline in self._publishers.values())

    def add(self, batch: KvBatch) -> None:
        """Add one batch; what is done with it is counted."""
        key = batch.source, batch.rank, batch.instance
        if key not in self._publishers:
            self._publishers[key] = KvTimeline(self._settings.lateness_ns)
            if len(self._publishers) > self._settings.engines_max:
                self._publishers.popitem(last=False)
        count_batch(self._counts, batch, self._publishers[key].add(batch))

    def by_engine(self, instances: Collection[str]) -> dict[str, KvTimeline]:
        """The publisher of each of all engines, where it is known: the one that names it, else the only one."""
        named = {instance: timeline for (_, _, instance), timeline in reversed(self._publishers.items()) if instance}
        unnamed = [timeline for (_, _, instance), timeline in self._publishers.items() if not instance]
        only = dict.fromkeys(instances, unnamed[0]) if len(unnamed) == 1 and len(instances) == 1 else {}
        for (_, _, instance), timeline in self._publishers.items():
            timeline.is_bound = instance in instances if instance else bool(only)
        return only | {instance: named[instance] for instance in instances if instance in named}

    def take_counts(self) -> Counts:
        """Counts since the last call, and what is held now."""
        counts, self._counts = self._counts, Counts()
        counts[table.SIZE, "kv_batches"] = sum(map(len, self._publishers.values()))
        counts[table.KV_UNBOUND] = self.unbound
        return counts
