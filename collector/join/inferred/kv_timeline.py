"""What KV events say of one publisher's life, and the prefix hits that follow from it.

One KV publisher's life, from its first batch to its restart: what left and entered the cache, in event time.

Batches are stamped at the end of the step whose events they carry, 20-130 µs after that step's FIRST_TOKEN (captures
c1, c5, c10); a step without events has no batch. So "nothing was stored in between" is only known where the sequence
numbers on both sides are consecutive: what lies in a gap, or behind the last batch, is unknown and stays unknown.

Order of arrival does not matter: batches are kept by (time, sequence), and each is taken once. What a life says is used
for steps from ``grace_s`` after its first batch on (they wait ``LATENESS_NS`` for it); rebuilt prefills, which wait
longer than that anyway, use it from its first batch on, and where there are no summaries from before it.

Prefix-cache hits: what journeys cannot see and KV events tell.

A journey says that a prompt of t tokens was prefilled, not how many of its tokens were found in the cache. The cache
says how many blocks a step stored. With B tokens per block, over the steps a..b of prefills that overlap,

    hit blocks = Σ floor(t / B)  -  (stored - filled by decoding)  +  loaded          0 <= hit <= Σ floor((t - 1) / B)

since a prefill stores each of its full blocks but the ones it found, decoding fills one block every B tokens, and
blocks loaded from a tier below are stored without being computed (the last token is always computed). Hits are
subtracted from the rebuilt tokens, first of requests resumed after a preemption, which find their own blocks again (c3:
all hit blocks were theirs), then of the others in proportion. Only where every batch of that time is known to be here;
elsewhere nothing is changed. Asynchronous scheduling stores a decoded block one step after it was filled: its token was
in flight.

Rebuilt prefill tokens ÷ true ones, journeys only: c5 1.763 without, 0.996 with (84 of 86 steps exact); c3's recomputed
tokens 1.60 and 1.03 (51 of 53); c7 and c9, without hits, stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collector.decode import MISSING, CoreSpan
from collector.decode.kv import KvBatch
from collector.join.window import Cells, StepWindow
from collector.telemetry import Direction, KvSkip, Phase
from online import Floats, Ints

from .journeys import Chunks, Run

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


_PENDING_MAX = 65_536
"""Prefills held: a process whose steps never pass must not grow memory."""
_END_STEPS_MAX = 64


@dataclass(slots=True)
class Prefill:
    """One prefill, or the recomputation after a preemption, over steps first_step..last_step."""

    first_step: int
    last_step: int
    tokens: int
    request_id: str
    resumed: bool
    known: bool
    """False when it was cut short: nobody knows how far it came."""
    chunk: Chunks | None = None


class Prefills:
    """Prefills of one engine process that have not been passed, and the decoding beside them."""

    def __init__(self) -> None:
        self._pending: list[Prefill] = []
        self._decodes: list[tuple[int, int, int]] = []
        self.hit_tokens = 0.0

    def add(self, span: CoreSpan, chunks: Sequence[Chunks], runs: Sequence[Run]) -> None:
        """Add a finished request, its runs, and the multi-step prefills laid for it."""
        by_step = {chunk.first_step: chunk for chunk in chunks}
        for run in runs:
            prefill, decoding = _of(run, span)
            prefill.chunk = by_step.get(run.first_step)
            self._pending.append(prefill)
            if decoding[1] >= decoding[0]:
                self._decodes.append(decoding)
        if len(self._pending) > _PENDING_MAX:
            self.pass_over(sorted(p.first_step for p in self._pending)[_PENDING_MAX // 2])

    def take_hit_tokens(self) -> float:
        """Tokens subtracted since the last call."""
        tokens, self.hit_tokens = self.hit_tokens, 0.0
        return tokens

    def pass_over(self, stop_step: int) -> None:
        """Forget what lies below ``stop_step``."""
        self._pending = [p for p in self._pending if p.first_step >= stop_step]
        self._decodes = [d for d in self._decodes if d[1] >= stop_step]

    def final_stop(self, window: StepWindow, stop_step: int, settled_unix_ns: int) -> int:
        """The first step of a prefill that ended too lately for all of its batches to be here, else ``stop_step``."""
        for group in self._groups(stop_step):
            end = _end_step(window, max(p.last_step for p in group))
            if int(window.rebuilt["completed_unix_ns"][end - window.base]) > settled_unix_ns:
                return min(stop_step, group[0].first_step)
        return stop_step

    def subtract(
        self, window: StepWindow, stop_step: int, timeline: KvTimeline, from_unix_ns: int, *, asynchronous: bool
    ) -> None:
        """Take the hits off the rebuilt tokens of prefills that begin below ``stop_step``, from ``from_unix_ns`` on."""
        groups = self._groups(stop_step) if timeline.block_size else []
        if not groups:
            return
        concurrent = _Concurrent(
            np.sort(np.array([p.first_step for p in self._pending])),
            np.array(self._decodes, np.int64).reshape(-1, 3),
            lag=1 if asynchronous else 0,
        )
        for group in groups:
            first, last = group[0].first_step, max(p.last_step for p in group)
            here = slice(first - window.base, last - window.base + 1)
            if here.start < 0 or window.rebuilt["seen"][here].all():
                continue
            if window.rebuilt["scheduled_unix_ns"][here.start] < from_unix_ns:
                continue
            blocks = _hit_blocks(group, concurrent, window, timeline, asynchronous=asynchronous)
            if blocks > 0:
                self._share(group, blocks * timeline.block_size, timeline.block_size, window)

    def _groups(self, stop_step: int) -> list[list[Prefill]]:
        """Prefills that begin below ``stop_step``, together with all that overlap them, in step order."""
        groups: list[list[Prefill]] = []
        last = -1
        for prefill in sorted(self._pending, key=lambda p: (p.first_step, p.last_step, p.request_id)):
            if groups and prefill.first_step <= last:
                groups[-1].append(prefill)
            elif prefill.first_step >= stop_step:
                break
            else:
                groups.append([prefill])
            last = max(last, prefill.last_step)
        return groups

    def _share(self, group: list[Prefill], hit_tokens: float, size: int, window: StepWindow) -> None:
        left = hit_tokens
        for resumed in (True, False):
            capped = [(p, float((p.tokens - 1) // size * size)) for p in group if p.resumed is resumed]
            most = sum(cap for _, cap in capped)
            given = min(left, most)
            left -= given
            for prefill, cap in capped:
                if given > 0:
                    _subtract(prefill, given * cap / most, window)
        self.hit_tokens += hit_tokens


@dataclass(frozen=True, slots=True)
class _Concurrent:
    """What runs beside a group: steps in which prefills begin, shape (p,), in order; decoding, shape (d, 3).

    A line of ``decodes`` is a request's (first step, last step, context after the first). ``lag``: steps between
    filling a block and storing it.
    """

    begins: Ints
    decodes: Ints
    lag: int

    def filled(self, first: int, last: int, size: int) -> int:
        """Blocks that decoding stores in steps first..last: contexts that pass a multiple of the block size."""
        begin, end, context = self.decodes[:, 0] + self.lag, self.decodes[:, 1], self.decodes[:, 2]
        low, high = np.maximum(first, begin), np.minimum(last, end)
        base = context - begin
        return int(np.where(high >= low, (base + high) // size - (base + low - 1) // size, 0).sum())

    def begin_within(self, after: int, last: int) -> bool:
        """Whether a prefill begins in steps after+1..last."""
        low, high = np.searchsorted(self.begins, (after, last), side="right")
        return bool(high > low)


def _hit_blocks(
    group: list[Prefill], concurrent: _Concurrent, window: StepWindow, timeline: KvTimeline, *, asynchronous: bool
) -> float:
    """Hit blocks of the group; 0 where it cannot be told."""
    size = timeline.block_size
    first, prefilled = group[0].first_step, max(p.last_step for p in group)
    last = _end_step(window, prefilled)
    if not all(p.known for p in group) or concurrent.begin_within(prefilled, last):
        return 0.0
    stored = _stored(window, timeline, first, last, asynchronous=asynchronous)
    if stored is None:
        return 0.0
    loaded = sum(timeline.loaded_blocks(p.request_id) for p in group if not p.resumed)
    expected = sum(p.tokens // size for p in group)
    most = sum((p.tokens - 1) // size for p in group)
    return min(max(0.0, expected - (stored - concurrent.filled(first, last, size)) + loaded), most)


def _subtract(prefill: Prefill, tokens: float, window: StepWindow) -> None:
    index = prefill.first_step - window.base
    cells = window.rebuilt
    if prefill.resumed:
        steps = slice(index, prefill.last_step - window.base + 1)
        column = cells["recomputed_tokens"]
        column[steps] = np.maximum(0.0, column[steps] - tokens / (steps.stop - steps.start))
    elif prefill.chunk is None:
        cells["prefill_tokens"][index] -= tokens
        cells["prefill_attention"][index] -= tokens**2 / 2  # t(c + t/2) with c = hit, t = prompt - hit
    elif prefill.chunk.done == 0:
        prefill.chunk.left -= tokens
        prefill.chunk.done += tokens


def _of(run: Run, span: CoreSpan) -> tuple[Prefill, tuple[int, int, int]]:
    """The prefill a run begins with, and its decoding as (first step, last step, context after the first)."""
    if run.outputs == 0:
        last = run.last_step if run.first_token_step is None else run.first_token_step
        known = run.first_token_step is not None
        prefill = Prefill(run.first_step, last, span.prompt_tokens, span.request, resumed=False, known=known)
        return prefill, (last + 1, run.last_step if known else last, span.prompt_tokens + 1)
    tokens = span.prompt_tokens + run.outputs
    last = run.first_step + run.silent_steps
    prefill = Prefill(run.first_step, last, tokens, span.request, resumed=True, known=True)
    return prefill, (last + 1, run.last_step, tokens + 1)


def _end_step(window: StepWindow, last: int) -> int:
    """The first step from ``last`` on whose end is stamped (a resumed request stamps none); else ``last``."""
    low = last - window.base
    stamped = np.flatnonzero(window.rebuilt["completed_unix_ns"][low : low + _END_STEPS_MAX] > 0)
    return last + int(stamped[0]) if len(stamped) else last


def _stored(window: StepWindow, timeline: KvTimeline, first: int, last: int, *, asynchronous: bool) -> int | None:
    """Blocks stored by steps first..last; None where it cannot be told.

    Asynchronous: a step's blocks come with the batch at the end of the step before it (wire contract §5.6).
    """
    cells, base = window.rebuilt, window.base
    begin_ns = int(cells["scheduled_unix_ns"][first - base])
    end_ns = int(cells["completed_unix_ns"][last - base])
    if not begin_ns or not end_ns:
        return None
    if not asynchronous:
        return timeline.stored(begin_ns, end_ns, own=True)
    before = cells[last - 1 - base] if last > base else None
    busy = before is not None and before["prefill_requests"] + before["decode_requests"] > 0
    return timeline.stored(begin_ns, end_ns, own=not busy)
