"""KV publishers, the engines they belong to, and what their events say of steps.

No KV event names the process it comes from (wire contract §8). Whose they are is said by the configuration
(``instance`` of an endpoint), by the emitter of a span event, or follows where there is one publisher and one engine.
A publisher's sequence starts again with its engine: every (source, rank, instance) is a row of lives, split where the
sequence falls while time goes on. A life belongs to the newest process of its engine that has no life yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from collector.config import JoinConfig
from collector.decode import MISSING, CoreSpan
from collector.decode.kv import KvBatch, count_batch
from collector.join.window import Cells, StepWindow
from collector.telemetry import Counts, table
from online import Ints, Mask

from .journeys import Chunks, Run
from .kv_timeline import LATENESS_NS, KvTimeline, Prefills
from .row_blocks import BlockRatio


@dataclass(slots=True)
class KvSteps:
    """The publisher of a process, once known, and the prefills it may correct."""

    timeline: KvTimeline | None = None
    prefills: Prefills = field(default_factory=Prefills)

    @property
    def known(self) -> bool:
        """Whether steps carry block columns; NaN where nothing is known."""
        return self.timeline is not None

    def add_request(self, span: CoreSpan, chunks: Sequence[Chunks], runs: Sequence[Run]) -> list[Chunks]:
        """Record a request laid over its steps in these runs; returns ``chunks``, its multi-step prefills."""
        self.prefills.add(span, chunks, runs)
        return list(chunks)

    def settled(self, final: Mask, unix_ns: Ints, event_unix_ns: int) -> Mask:
        """Final steps whose batches have had time to arrive."""
        return final if self.timeline is None else final & (unix_ns <= event_unix_ns - LATENESS_NS)

    def final_stop(self, window: StepWindow, stop_step: int, event_unix_ns: int) -> int:
        """``stop_step``, or the first step of a prefill whose batches may still be on their way."""
        if self.timeline is None:
            return stop_step
        self.prefills.pass_over(window.base)  # memory was short, or step ids have jumped: they are lost
        return self.prefills.final_stop(window, stop_step, event_unix_ns - LATENESS_NS)

    @property
    def lateness_ns(self) -> int:
        """How long steps wait for the batches of their time."""
        return LATENESS_NS if self.timeline is not None else 0

    def take_hits(self, window: StepWindow, stop_step: int, waited_ns: int, *, asynchronous: bool) -> None:
        """Subtract prefix hits from rebuilt prefills that begin below ``stop_step``, and forget those.

        ``waited_ns``: how long steps have waited; what is older than that may have left before the first batch came,
        and is left alone so that the order of arrival does not show.
        """
        if self.timeline is not None:
            since_ns = self.timeline.since_unix_ns - waited_ns
            self.prefills.subtract(window, stop_step, self.timeline, since_ns, asynchronous=asynchronous)
        self.prefills.pass_over(stop_step)

    def fill(
        self, steps: Cells, cells: Cells, here: slice, first_step: int, ratio: BlockRatio, *, asynchronous: bool
    ) -> None:
        """Write the block columns of steps ``here`` of these columns, whose first is ``first_step``."""
        if self.timeline is None:
            return
        starts_unix_ns = schedule_starts(steps, cells, asynchronous=asynchronous)
        covered = cells[here]
        self.timeline.fill(covered, starts_unix_ns[here.start : here.stop + 1], first_step + here.start)
        ratio.event_tokens = float(self.timeline.block_size)
        ratio.event_from_unix_ns = self.timeline.active_unix_ns


def schedule_starts(steps: Cells, cells: Cells, *, asynchronous: bool) -> Ints:
    """Wall clock at which each step began to be scheduled, never decreasing; where no stamp says it, the one before."""
    wall = steps["unix_ns"] - steps["ts_end_ns"] + steps["ts_start_ns"]
    ended = np.zeros(len(steps), np.int64)
    lag = 2 if asynchronous else 1
    ended[lag:] = cells["completed_unix_ns"][:-lag]
    known = np.where(cells["seen"], wall, np.where(cells["scheduled_unix_ns"] > 0, cells["scheduled_unix_ns"], ended))
    return np.asarray(np.maximum.accumulate(known), np.int64)


_LIVES_MAX = 4
"""Lives held per publisher: a restart loop must not grow memory."""


class KvSequence(Protocol):
    """What an engine process shows of itself; :class:`~collector.join.inferred.sequence.StepSequence` is one."""

    kv: KvSteps

    @property
    def event_unix_ns(self) -> int:
        """Newest event heard of."""
        ...


@dataclass(slots=True, eq=False)
class _Life:
    """A publisher's life, the engine it names, and the process it was given to."""

    timeline: KvTimeline
    instance: str
    owner: KvSequence | None = None


class KvSources:
    """All publishers; bounded in publishers, lives and batches."""

    def __init__(self, settings: JoinConfig) -> None:
        self._settings = settings
        self._lives: OrderedDict[tuple[str, int, str], list[_Life]] = OrderedDict()
        self._touched: set[_Life] = set()
        self.counts = Counts()

    def _all(self) -> list[_Life]:
        return [life for lives in self._lives.values() for life in lives]

    @property
    def batches(self) -> int:
        """Batches held, all publishers together."""
        return sum(len(life.timeline) for life in self._all())

    @property
    def missing(self) -> int:
        """Sequence numbers missing between batches held."""
        return sum(life.timeline.missing for life in self._all())

    @property
    def unbound(self) -> int:
        """Lives that belong to no engine yet."""
        return sum(life.owner is None for life in self._all())

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, batch: KvBatch) -> None:
        """Add one batch; what is done with it is counted."""
        life = self._life_of(batch)
        self._touched.add(life)
        count_batch(self.counts, batch, life.timeline.add(batch))

    def _life_of(self, batch: KvBatch) -> _Life:
        """The life in which sequence and time grow together; a new one after a restart."""
        key = batch.source, batch.rank, batch.instance
        lives = self._lives.get(key)
        if lives is None:
            lives = self._lives[key] = []
            if len(self._lives) > self._settings.engines_max:
                self._touched.difference_update(self._lives.popitem(last=False)[1])
        at = len(lives)
        for life in reversed(lives):
            if batch.seq == MISSING or _fits(batch, life.timeline.oldest, life.timeline.newest):
                return life
            if batch.ts_unix_ns > life.timeline.newest[0]:
                break
            at -= 1
        timeline = KvTimeline(batch.source, batch.rank, int(self._settings.grace_s * 1e9))
        lives.insert(at, _Life(timeline, batch.instance))
        life = lives[at]
        if len(lives) > _LIVES_MAX:
            self._touched.discard(lives.pop(0))
        return life

    # --- whose it is ------------------------------------------------------------------------------------------------

    def bind(self, engines: Mapping[str, Sequence[KvSequence]]) -> list[KvSequence]:
        """Give lives to the processes of ``engines`` (by instance); returns those that something new is known of."""
        if not self._lives:
            return []
        touched, self._touched = self._touched, set()
        only = self._only_engine(engines)
        changed = []
        for life in self._all():
            if life.owner is None:
                self._give(life, engines.get(life.instance, ()) if life.instance else only)
            elif not life.instance and not any(life.owner is own for own in only):
                self._take_back(life)
            if life.owner is not None and life in touched:
                life.timeline.forget_before(life.owner.event_unix_ns - 2 * int(self._settings.window_s * 1e9))
                changed.append(life.owner)
        return changed

    def _only_engine(self, engines: Mapping[str, Sequence[KvSequence]]) -> Sequence[KvSequence]:
        """Processes of the engine that a publisher without a name belongs to; () where that could be another one."""
        publishers = sum(not instance for _, _, instance in self._lives)
        different = {id(own[-1]): own for own in engines.values() if own}
        return next(iter(different.values())) if publishers == 1 and len(different) == 1 else ()

    @staticmethod
    def _give(life: _Life, processes: Sequence[KvSequence]) -> None:
        """To the newest process without a life; one whose events come by another way, too, uses them once."""
        free = [process for process in processes if process.kv.timeline is None]
        if free:
            life.owner = free[-1]
            free[-1].kv.timeline = life.timeline
        elif processes and (known := processes[-1].kv.timeline) and known.source != life.timeline.source:
            life.owner = processes[-1]

    @staticmethod
    def _take_back(life: _Life) -> None:
        """There is a second engine, or a second publisher: nobody knows whose events these are."""
        if life.owner is not None and life.owner.kv.timeline is life.timeline:
            life.owner.kv.timeline = None
        life.owner = None

    def take_counts(self) -> Counts:
        """Counts since the last call, and what is held now."""
        counts, self.counts = self.counts, Counts()
        for life in self._all():
            if life.owner is not None:
                counts[table.KV_HIT_TOKENS] += life.owner.kv.prefills.take_hit_tokens()
        counts[table.KV_HELD], counts[table.KV_MISSING] = self.batches, self.missing
        counts[table.KV_UNBOUND] = self.unbound
        return counts


def _fits(batch: KvBatch, oldest: tuple[int, int], newest: tuple[int, int]) -> bool:
    """Whether sequence and time are on the same side of a life's ends: behind, before, or both between them."""
    (oldest_ns, oldest_seq), (newest_ns, newest_seq) = oldest, newest
    if batch.seq > newest_seq:
        return batch.ts_unix_ns >= newest_ns
    if batch.seq < oldest_seq:
        return batch.ts_unix_ns <= oldest_ns
    return oldest_ns <= batch.ts_unix_ns <= newest_ns
