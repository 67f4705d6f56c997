"""KV events: whose they are, the block columns of steps, and the prefix hits that journeys cannot see.

Whose they are. No KV event names the process it comes from (wire contract §8). The configuration names the engine
(``instance`` of an endpoint), the emitter of a span event does, or there is one publisher and one engine.

When. A batch is stamped at the end of the step whose events it carries, 20-130 µs after that step's FIRST_TOKEN
(captures c1, c5, c10); a step without events has no batch. So "nothing was stored in between" is only known where the
sequence numbers on both sides are consecutive: a gap, and what lies behind the last batch, stay unknown. Batches are
kept by (time, sequence), so that order of arrival does not matter, and a publisher that restarts goes on. Columns of
steps begin ``allowed_lateness_s`` after the first batch; steps wait ``LATENESS_NS`` for their batches.

Prefix hits. A journey tells how many tokens a prompt has, not how many of them the cache had. The cache tells how many
blocks a step stored. With B tokens per block, over the steps a..b of prefills that overlap,

    hit blocks = Σ floor(t / B)  -  (stored - filled by decoding)  +  loaded          0 <= hit <= Σ floor((t - 1) / B)

since a prefill stores each of its full blocks but the ones it found, decoding fills one block every B tokens, and
blocks loaded from a tier below are stored without being computed (the last token is always computed). Hits are
subtracted from the rebuilt tokens, first of requests resumed after a preemption, which find their own blocks again (c3:
all hit blocks were theirs), then of the others in proportion; nowhere unless every batch of that time is here.
Asynchronous scheduling stores a decoded block one step after it was filled: its token was in flight.

Rebuilt prefill tokens ÷ true ones, journeys only: c5 1.763 without, 0.996 with (84 of 86 steps exact); c3's recomputed
tokens 1.60 and 1.03 (51 of 53); c7 and c9, without hits, stay exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from collector.config import Config
from collector.decode import MISSING, CoreSpan
from collector.decode.kv import KvBatch, Move, count_batch
from collector.join.window import StepWindow
from collector.telemetry import Counts, Skip, table
from online import Floats, Ints

from .calibration import EngineCalibration
from .journeys import Chunks, Run
from .steps import StepView

LATENESS_NS = 10_000_000_000
"""Events of one moment arrive within this time of each other; what is asked of a moment this old is final."""
OWN_BATCH_NS = 3_000_000
"""A step's batch follows its end stamp by less than this."""
BATCHES_MAX = 65_536
"""Batches held of one publisher, and moves of blocks: hours of steps."""
_OFFLOADED, _RESTORED, _EVICTED = range(3)
"""Columns of a step (KV_COLUMNS)."""
_SAME_PROCESS_NS = 60_000_000_000
"""Step ids start again with the process; an event's time tells which process it means."""
_PENDING_MAX = 65_536
"""Prefills held: a process whose steps never pass must not grow memory."""
_END_STEPS_MAX = 64


class KvTimeline:
    """Batches of one publisher in order of time; bounded by count and by age."""

    def __init__(self, grace_ns: int) -> None:
        self._grace_ns = grace_ns
        self._batches: list[tuple[int, int, int]] = []
        """(time, sequence or MISSING, blocks stored)."""
        self._moves: list[tuple[int, int, int, float]] = []
        """(time, step or MISSING, column, blocks); of those restored, blocks of the tier below."""
        self._loads: dict[str, tuple[int, int]] = {}
        self._horizon_ns = 0
        self.block_size = self.offload_block_size = 0
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

    @property
    def offload_ratio(self) -> float:
        """GPU blocks per offload block; 1 while either size is unknown."""
        return self.offload_block_size / self.block_size if self.block_size and self.offload_block_size else 1.0

    def add(self, batch: KvBatch) -> Skip | None:
        """Take a batch, whatever its place; None, or why it is left out."""
        ts_ns = batch.ts_unix_ns
        if ts_ns <= self._horizon_ns:
            return Skip.LATE
        at = bisect_left(self._batches, (ts_ns, batch.seq))
        if batch.seq != MISSING and at < len(self) and self._batches[at][:2] == (ts_ns, batch.seq):
            return Skip.DUPLICATE
        self._batches.insert(at, (ts_ns, batch.seq, batch.stored_blocks))
        self.since_unix_ns = min(self.since_unix_ns or ts_ns, ts_ns)
        self.block_size = self.block_size or batch.block_size
        self.offload_block_size = self.offload_block_size or batch.offload_block_size
        self._add_moves(batch)
        for held in (self._batches, self._moves):
            if len(held) > BATCHES_MAX:
                self.forget_before(held[len(held) - BATCHES_MAX][0] + 1)
        return None

    def _add_moves(self, batch: KvBatch) -> None:
        ts_ns, below, moves = batch.ts_unix_ns, batch.removed_below, []
        for move in batch.moves:
            match move.move:
                case Move.EVICTED:
                    moves.append((ts_ns, move.step, _EVICTED, move.blocks * self.offload_ratio))
                    below -= move.blocks  # the same blocks come as BlockRemoved of their medium, in the same batch
                case Move.OFFLOADED:
                    moves.append((ts_ns, move.step, _OFFLOADED, move.blocks))
                case Move.RESTORED:
                    moves.append((ts_ns, move.step, _RESTORED, move.blocks))
                    self._loads[move.request] = (ts_ns, move.blocks)
        if batch.removed_blocks or below > 0:
            moves.append((ts_ns, MISSING, _EVICTED, batch.removed_blocks + max(0, below) * self.offload_ratio))
        if moves:
            at = bisect_left(self._moves, (ts_ns,))
            self._moves[at:at] = moves

    def forget_before(self, unix_ns: int) -> None:
        """Drop what is older; it counts as late from now on."""
        if not self._batches or self._batches[0][0] >= unix_ns:
            return
        gone = bisect_left(self._batches, (unix_ns,))
        self._horizon_ns = self._batches[gone - 1][0]
        del self._batches[:gone]
        del self._moves[: bisect_left(self._moves, (self._horizon_ns + 1,))]
        self._loads = {request: load for request, load in self._loads.items() if load[0] > self._horizon_ns}

    def loaded_blocks(self, request: str) -> float:
        """GPU blocks that were loaded from a tier below for this request."""
        return self._loads[request][1] * self.offload_ratio if request in self._loads else 0.0

    def stored(self, after_ns: int, end_ns: int, *, own: bool) -> int | None:
        """GPU blocks stored by batches in (after_ns, end_ns]; ``own``: and by the batch of the step that ends there.

        None unless it is certain that every batch of that time is here.
        """
        batches = self._batches
        first, stop = (bisect_left(batches, (ns + 1,)) for ns in (after_ns, end_ns))
        closed = own and stop < len(batches) and batches[stop][0] <= end_ns + OWN_BATCH_NS
        stop += closed
        behind = [] if closed else batches[stop : stop + 1]
        if not closed and (stop == 0 or not behind or behind[0][0] > end_ns + LATENESS_NS):
            return None
        numbers = [seq for _, seq, _ in batches[max(first - 1, 0) : stop] + behind]
        if first == 0 and numbers[0] != 0:
            return None
        if any(after - before != 1 for before, after in pairwise(numbers) if after != MISSING):
            return None
        return sum(blocks for _, _, blocks in batches[first:stop])

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
            blocks = np.where(column == _RESTORED, blocks * self.offload_ratio, blocks)
            np.add.at(out, (index[inside], column[inside]), blocks[inside])
        out[starts_unix_ns[:-1] < self.active_unix_ns] = np.nan
        near = slice(max(bisect_left(self._batches, (begin_ns,)) - 1, 0), bisect_left(self._batches, (end_ns,)) + 1)
        for (before_ns, before, _), (after_ns, after, _) in pairwise(self._batches[near]):
            if after > before + 1:
                out[(starts_unix_ns[1:] > before_ns) & (starts_unix_ns[:-1] < after_ns)] = np.nan
        return out


# --- one engine process -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Prefill:
    """One prefill, or the recomputation after a preemption, over steps first_step..last_step."""

    first_step: int
    last_step: int
    tokens: int
    request: str
    resumed: bool
    known: bool
    """False when it was cut short: nobody knows how far it came."""
    chunk: Chunks | None = None

    def subtract(self, tokens: float, window: StepWindow) -> None:
        """Take hits off what was rebuilt for it."""
        index, cells = self.first_step - window.base, window.rebuilt
        if self.resumed:
            steps = slice(index, self.last_step - window.base + 1)
            column = cells["recomputed_tokens"]
            column[steps] = np.maximum(0.0, column[steps] - tokens / (steps.stop - steps.start))
        elif self.chunk is None:
            cells["prefill_tokens"][index] -= tokens
            cells["prefill_attention"][index] -= tokens**2 / 2  # t(c + t/2) with c = hit, t = prompt - hit
        elif self.chunk.done == 0:
            self.chunk.left -= tokens
            self.chunk.done += tokens


@dataclass(slots=True)
class KvSteps:
    """The publisher of a process, once known; and its prefills that have not been passed, with what decodes beside."""

    timeline: KvTimeline | None = None
    _pending: list[Prefill] = field(default_factory=list)
    _decodes: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each request: first step, last step, context after the first."""

    @property
    def lateness_ns(self) -> int:
        """How long steps wait for the batches of their time."""
        return LATENESS_NS if self.timeline is not None else 0

    def add_request(self, span: CoreSpan, chunks: Sequence[Chunks], runs: Sequence[Run]) -> None:
        """Record a request laid over its steps in these runs; ``chunks`` are its multi-step prefills."""
        by_step = {chunk.first_step: chunk for chunk in chunks}
        for run in runs:
            resumed, tokens, first = run.outputs > 0, span.prompt_tokens + run.outputs, run.first_step
            known = resumed or run.first_token_step is not None
            last = first + run.recomputed_steps if resumed else run.first_token_step or run.last_step
            self._pending.append(Prefill(first, last, tokens, span.request, resumed, known, by_step.get(first)))
            if known and run.last_step > last:
                self._decodes.append((last + 1, run.last_step, tokens + 1))
        if len(self._pending) > _PENDING_MAX:
            self.pass_over(sorted(p.first_step for p in self._pending)[_PENDING_MAX // 2])

    def pass_over(self, stop_step: int) -> None:
        """Prefills that begin below ``stop_step`` are passed, or lost."""
        self._pending = [p for p in self._pending if p.first_step >= stop_step]
        self._decodes = [d for d in self._decodes if d[1] >= stop_step]

    def final_stop(self, window: StepWindow, stop_step: int, event_unix_ns: int) -> int:
        """``stop_step``, or the first step of a prefill whose batches may still be on their way."""
        if self.timeline is None:
            return stop_step
        self.pass_over(window.base)  # memory was short, or step ids have jumped: they are lost
        for group in self._groups(stop_step):
            end = _end_step(window, max(p.last_step for p in group)) - window.base
            if int(window.rebuilt["completed_unix_ns"][end]) > event_unix_ns - LATENESS_NS:
                return min(stop_step, group[0].first_step)
        return stop_step

    def take_hits(self, window: StepWindow, stop_step: int, waited_ns: int, *, asynchronous: bool) -> float:
        """Subtract prefix hits from rebuilt prefills that begin below ``stop_step``; how many tokens.

        ``waited_ns``: how long steps have waited; what is older than that may have left before the first batch came,
        and is left alone so that the order of arrival does not show.
        """
        hit_tokens, timeline = 0.0, self.timeline
        groups = self._groups(stop_step) if timeline is not None and timeline.block_size else []
        for group in groups:
            first, last = group[0].first_step - window.base, max(p.last_step for p in group) - window.base
            if first < 0 or window.rebuilt["seen"][first : last + 1].all() or timeline is None:
                continue
            if window.rebuilt["scheduled_unix_ns"][first] >= timeline.since_unix_ns - waited_ns:
                blocks = self._hit_blocks(group, window, timeline, lag=1 if asynchronous else 0)
                hit_tokens += blocks * timeline.block_size
                _share(group, blocks * timeline.block_size, timeline.block_size, window)
        self.pass_over(stop_step)
        return hit_tokens

    def _groups(self, stop_step: int) -> list[list[Prefill]]:
        """Prefills that begin below ``stop_step``, together with all that overlap them, in step order."""
        groups: list[list[Prefill]] = []
        last = -1
        for prefill in sorted(self._pending, key=lambda p: (p.first_step, p.last_step, p.request)):
            if groups and prefill.first_step <= last:
                groups[-1].append(prefill)
            elif prefill.first_step >= stop_step:
                break
            else:
                groups.append([prefill])
            last = max(last, prefill.last_step)
        return groups

    def _hit_blocks(self, group: list[Prefill], window: StepWindow, timeline: KvTimeline, *, lag: int) -> float:
        """Hit blocks of the group; 0 where it cannot be told. ``lag``: steps between filling and storing a block."""
        size, first, prefilled = timeline.block_size, group[0].first_step, max(p.last_step for p in group)
        last = _end_step(window, prefilled)
        if not all(p.known for p in group) or any(prefilled < p.first_step <= last for p in self._pending):
            return 0.0
        stored = _stored(window, timeline, first, last, asynchronous=lag > 0)
        if stored is None:
            return 0.0
        begin, end, context = np.array(self._decodes, np.int64).reshape(-1, 3).T
        low, high, base = np.maximum(first, begin + lag), np.minimum(last, end), context - begin - lag
        filled = int(np.where(high >= low, (base + high) // size - (base + low - 1) // size, 0).sum())
        loaded = sum(timeline.loaded_blocks(p.request) for p in group if not p.resumed)
        expected, most = sum(p.tokens // size for p in group), sum((p.tokens - 1) // size for p in group)
        return min(max(0.0, expected - (stored - filled) + loaded), most)

    def moved_blocks(
        self, view: StepView, here: slice, first_step: int, calibration: EngineCalibration
    ) -> Floats | None:
        """Block columns of steps ``here`` of these, whose first is ``first_step``; None where no publisher is known."""
        if self.timeline is None:
            return None
        starts_unix_ns = _schedule_starts(view)[here.start : here.stop + 1]
        calibration.kv_block_tokens = float(self.timeline.block_size)
        calibration.kv_from_unix_ns = self.timeline.active_unix_ns
        return self.timeline.moved_blocks(starts_unix_ns, first_step + here.start)


def _schedule_starts(view: StepView) -> Ints:
    """Wall clock at which each step began to be scheduled, never decreasing; where no stamp says it, the one before."""
    steps, cells, lag = view.steps, view.cells, 2 if view.asynchronous else 1
    wall = steps["unix_ns"] - steps["ts_end_ns"] + steps["ts_start_ns"]
    ended = np.zeros(len(steps), np.int64)
    ended[lag:] = cells["completed_unix_ns"][:-lag]
    known = np.where(view.seen, wall, np.where(cells["scheduled_unix_ns"] > 0, cells["scheduled_unix_ns"], ended))
    return np.asarray(np.maximum.accumulate(known), np.int64)


def _share(group: list[Prefill], hit_tokens: float, size: int, window: StepWindow) -> None:
    """Give a group's hits to its prefills: those that were resumed first."""
    left = hit_tokens
    for resumed in (True, False):
        capped = [(p, float((p.tokens - 1) // size * size)) for p in group if p.resumed is resumed]
        most = sum(cap for _, cap in capped)
        given = min(left, most)
        left -= given
        for prefill, cap in capped if given > 0 else ():
            prefill.subtract(given * cap / most, window)


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
    before = cells[last - 1 - base] if asynchronous and last > base else None
    busy = before is not None and before["prefill_requests"] + before["decode_requests"] > 0
    return timeline.stored(begin_ns, end_ns, own=not busy)


# --- all publishers ---------------------------------------------------------------------------------------------------


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

    def assign(self, engines: Mapping[str, Sequence[tuple[KvSteps, int]]]) -> None:
        """Give each engine its publisher: the one that names it, else the only one.

        ``engines`` has, by instance, what each of its processes knows of KV events, and its newest event.
        """
        named = {instance: timeline for (_, _, instance), timeline in reversed(self._publishers.items()) if instance}
        unnamed = [timeline for (_, _, instance), timeline in self._publishers.items() if not instance]
        only = unnamed[0] if len(unnamed) == 1 and len(engines) == 1 else None
        for (_, _, instance), timeline in self._publishers.items():
            timeline.is_bound = instance in engines if instance else only is not None
        for instance, processes in engines.items():
            found = named.get(instance, only)
            for steps, event_unix_ns in processes:
                steps.timeline = found
                if found is not None:
                    found.forget_before(event_unix_ns - 2 * self._settings.timeout_ns)

    def take_counts(self) -> Counts:
        """Counts since the last call, and what is held now."""
        counts, self._counts = self._counts, Counts()
        counts[table.SIZE, "kv_batches"] = sum(map(len, self._publishers.values()))
        counts[table.KV_UNBOUND] = self.unbound
        return counts
