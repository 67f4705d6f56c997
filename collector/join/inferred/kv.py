"""KV events: whose they are, and the block columns of steps.

Whose they are. No KV event names the process it comes from (wire contract §8). The configuration names the engine
(``instance`` of an endpoint), the emitter of a span event does, or there is one publisher and one engine.

When. A batch is stamped at the end of the step whose events it carries, 20-130 µs after that step's FIRST_TOKEN
(captures c1, c5, c10); a step without events has no batch. So "nothing was moved in between" is only known where the
sequence numbers on both sides are consecutive. Batches come in order of time; one that goes back is late. Columns of
steps begin ``allowed_lateness_s`` after the first batch, and steps wait as long for their batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from collector.config import Config
from collector.decode import MISSING
from collector.decode.kv import KvBatch, count_batch
from collector.join.window import StepView
from collector.telemetry import Counts, Skip, table
from online import Floats, Ints

MOVES_MAX = 65_536
"""Block moves kept per publisher, which last for hours."""
_GAPS_MAX = 1024
_SAME_PROCESS_NS = 60_000_000_000
"""Step ids start again with the process; the time of an event says which process it belongs to."""


class KvTimeline:
    """Block moves of one publisher in order of time; bounded by count and by age."""

    def __init__(self, lateness_ns: int) -> None:
        self._lateness_ns = lateness_ns
        self._newest = (0, 0)
        """(time, sequence) of its latest batch."""
        self._moves: list[tuple[int, int, int, float]] = []
        """(time, step or MISSING, column, GPU blocks)."""
        self._gaps: list[tuple[int, int]] = []
        """From when to when batches are missing."""
        self.block_size = self._offload_block_size = 0

    def __len__(self) -> int:
        """How many moves are held."""
        return len(self._moves)

    def add(self, batch: KvBatch) -> Skip | None:
        """Add the next batch; returns None, or why it is left out."""
        (ts_ns, seq), (before_ns, before) = place, newest = (batch.ts_unix_ns, batch.seq), self._newest
        if place <= newest:
            return Skip.DUPLICATE if place == newest else Skip.LATE
        self._newest = place
        if not before_ns:
            self._gaps.append((0, ts_ns + self._lateness_ns))
        elif seq > before + 1:
            self._gaps.append((before_ns, ts_ns))
        self.block_size = self.block_size or batch.block_size
        self._offload_block_size = self._offload_block_size or batch.offload_block_size
        sizes = self._offload_block_size, self.block_size
        ratio = sizes[0] / sizes[1] if all(sizes) else 1.0
        for (move, step, is_below), blocks in batch.moves.items():
            self._moves.append((ts_ns, step, move, blocks * (ratio if is_below else 1.0)))
        del self._moves[:-MOVES_MAX], self._gaps[:-_GAPS_MAX]
        return None

    def forget_before(self, unix_ns: int) -> None:
        """Drop what is older."""
        del self._moves[: bisect_left(self._moves, (unix_ns,))]
        self._gaps = [gap for gap in self._gaps if gap[1] > unix_ns]

    def moved_blocks(self, starts_unix_ns: Ints, first_step: int) -> Floats:
        """Blocks offloaded, restored and evicted in m steps from first_step on, shape (m, 3).

        ``starts_unix_ns`` (m + 1,) has when each began, and where the last one ends. NaN where batches are missing.
        What has no step is put where its time falls.
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
        for before_ns, after_ns in self._gaps:
            out[(starts_unix_ns[1:] > before_ns) & (starts_unix_ns[:-1] < after_ns)] = np.nan
        return out


def schedule_starts(view: StepView) -> Ints:
    """Wall clock start of each step's scheduling, never decreasing; a step without a stamp takes the one before."""
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
        self.unbound = 0
        """Publishers that belong to no engine, or to none yet."""
        self._counts = Counts()

    def add(self, batch: KvBatch) -> None:
        """Add one batch and count its outcome."""
        key = batch.source, batch.rank, batch.instance
        if key not in self._publishers:
            self._publishers[key] = KvTimeline(self._settings.lateness_ns)
            if len(self._publishers) > self._settings.engines_max:
                self._publishers.popitem(last=False)
        count_batch(self._counts, batch, self._publishers[key].add(batch))

    def by_engine(self, instances: Collection[str]) -> dict[str, KvTimeline]:
        """The publisher of each engine where it is known: the one that names the engine, else the only one."""
        publishers = [(instance, timeline) for (_, _, instance), timeline in self._publishers.items()]
        unnamed = [timeline for instance, timeline in publishers if not instance]
        bound = dict.fromkeys(instances, unnamed[0]) if len(unnamed) == len(instances) == 1 else {}
        bound |= {instance: timeline for instance, timeline in reversed(publishers) if instance in instances}
        self.unbound = len(publishers) - len(bound)
        return bound

    def take_counts(self) -> Counts:
        """Counts since the last call, and what is held now."""
        counts, self._counts = self._counts, Counts()
        counts[table.SIZE, "kv_moves"] = sum(map(len, self._publishers.values()))
        counts[table.KV_UNBOUND,] = self.unbound
        return counts
