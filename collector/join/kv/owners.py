"""KV publishers and the engines they belong to.

No KV event names the process it comes from (wire contract §8), and sequence numbers start again with the engine. So
every (source, rank) is a row of lives, split where the sequence falls while time goes on, and a life is recognised by
its rhythm: a batch follows the end of a prefilling step within a millisecond. It belongs to the engine process most of
whose prefill ends it answers, from the moment (event time) the evidence was enough; the decision is taken when
everything up to that moment must have arrived, so that it does not depend on the order of arrival. Events that come as
OTLP spans carry their engine's instance and need no evidence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from collector.config import JoinConfig
from collector.decode import MISSING
from collector.decode.kv import KvBatch, count_batch
from collector.join.window import StepWindow
from collector.telemetry import Counts, table
from online import Ints
from online.state import Named, saved

from .step_events import KvSteps
from .timeline import KvTimeline

_NEAR_NS = 1_000_000
_EVIDENCE_MIN = 6
_SHARE_MIN = 0.15
_SHARE_OVER_CHANCE = 5.0
_SHARE_ENOUGH = 0.9
_LIVES_MAX = 4
"""Lives held per publisher: a restart loop must not grow memory."""


class KvSequence(Protocol):
    """What an engine process shows of itself; :class:`~collector.join.steps.sequence.StepSequence` is one."""

    window: StepWindow | None
    kv: KvSteps

    @property
    def event_unix_ns(self) -> int:
        """Newest event heard of."""
        ...


_Named = tuple[str, KvSequence]
"""An engine process, by the instance that sends."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How well a life fits an engine process, and since when that is known."""

    since_unix_ns: int
    share: float


class KvSources:
    """All publishers; bounded in publishers, lives and batches."""

    STATE = saved(
        "kv_sources",
        _lives=OrderedDict[tuple[str, int, str], list[KvTimeline]],
        _unbound=list[tuple[KvTimeline, str]],
        _bound=list[tuple[KvTimeline, Annotated[KvSequence, Named("step_sequence")]]],
    )

    def __init__(self, settings: JoinConfig) -> None:
        self._grace_ns = int(settings.grace_s * 1e9)
        self._window_ns = int(settings.window_s * 1e9)
        self._batches_max = settings.kv_batches_max
        self._sources_max = settings.engines_max
        self._lives: OrderedDict[tuple[str, int, str], list[KvTimeline]] = OrderedDict()
        self._unbound: list[tuple[KvTimeline, str]] = []
        self._bound: list[tuple[KvTimeline, KvSequence]] = []
        self._touched: set[KvTimeline] = set()
        self.counts = Counts()

    @property
    def batches(self) -> int:
        """Batches held, all publishers together."""
        return sum(len(life) for lives in self._lives.values() for life in lives)

    @property
    def missing(self) -> int:
        """Sequence numbers missing between batches held: lost and not replayed."""
        return sum(life.missing for lives in self._lives.values() for life in lives)

    @property
    def unbound(self) -> int:
        """Lives that belong to no engine yet."""
        return len(self._unbound)

    # --- in ---------------------------------------------------------------------------------------------------------

    def add(self, batch: KvBatch) -> None:
        """Add one batch; what is done with it is counted."""
        life = self._life_of(batch)
        self._touched.add(life)
        count_batch(self.counts, batch, life.add(batch))

    def _life_of(self, batch: KvBatch) -> KvTimeline:
        """The life in which sequence and time grow together; a new one after a restart."""
        key = batch.source, batch.rank, batch.instance
        lives = self._lives.get(key)
        if lives is None:
            lives = self._lives[key] = []
            if len(self._lives) > self._sources_max:
                for life in self._lives.popitem(last=False)[1]:
                    self._forget(life)
        at = len(lives)
        for life in reversed(lives):
            (oldest_ns, oldest_seq), (newest_ns, newest_seq) = life.oldest, life.newest
            if batch.seq == MISSING or _fits(batch, oldest_ns, oldest_seq, newest_ns, newest_seq):
                return life
            if batch.ts_unix_ns > newest_ns:
                break
            at -= 1
        life = KvTimeline(batch.source, batch.rank, self._batches_max)
        lives.insert(at, life)
        self._unbound.append((life, batch.instance))
        if len(lives) > _LIVES_MAX:
            self._forget(lives.pop(0))
        return life

    def _forget(self, life: KvTimeline) -> None:
        self._touched.discard(life)
        self._unbound = [entry for entry in self._unbound if entry[0] is not life]
        self._bound = [entry for entry in self._bound if entry[0] is not life]

    def part(self, settings: JoinConfig, owners: Iterable[KvSequence]) -> KvSources:
        """The publishers of these engine processes, and those that nobody owns yet; to be copied."""
        part, own = KvSources(settings), {id(owner) for owner in owners}
        part._unbound = list(self._unbound)
        part._bound = [entry for entry in self._bound if id(entry[1]) in own]
        kept = {id(life) for life, _ in (*part._unbound, *part._bound)}
        part._lives = OrderedDict(
            (key, own_lives)
            for key, lives in self._lives.items()
            if (own_lives := [life for life in lives if id(life) in kept])
        )
        return part

    # --- whose it is ------------------------------------------------------------------------------------------------

    def bind(self, sequences: Iterable[tuple[str, KvSequence]], *, flush: bool) -> list[KvSequence]:
        """Give lives to the engine processes that show enough evidence; ``sequences`` are (instance, process).

        Returns the processes that something new is known of.
        """
        owners = [owner for life, owner in self._bound if life in self._touched]
        for life, owner in self._bound:
            if life in self._touched:
                life.forget_before(owner.event_unix_ns - 2 * self._window_ns)
        self._touched.clear()
        if not self._unbound:
            return owners
        free, served = self._sort(sequences)
        for life, instance in [entry for entry in self._unbound if len(entry[0])]:
            binding = self._owner(life, instance, free, flush=flush) if free else None
            if binding is not None:
                owner, since_unix_ns = binding
                life.bind(since_unix_ns, self._grace_ns)
                owner.kv.bind(life)
                served[not instance].extend((name, sequence) for name, sequence in free if sequence is owner)
                free = [(name, sequence) for name, sequence in free if sequence is not owner]
            elif instance or not free:  # a publisher may belong to an engine that has none
                binding = self._owner(life, instance, served[bool(instance)], flush=flush)
            if binding is not None:
                self._bound.append((life, binding[0]))
                owners.append(binding[0])
                self._unbound = [entry for entry in self._unbound if entry[0] is not life]
        return owners

    def _sort(self, sequences: Iterable[tuple[str, KvSequence]]) -> tuple[list[_Named], tuple[list[_Named], ...]]:
        """Engine processes whose events are not known yet; those that have them by spans; those that have a publisher.

        Whose events come the second of the two ways, too, is known then; they are not used twice.
        """
        by_spans = {id(life) for (_, _, name), lives in self._lives.items() if name for life in lives}
        free: list[_Named] = []
        served: tuple[list[_Named], list[_Named]] = [], []
        for name, sequence in sequences:
            timeline = sequence.kv.timeline
            (free if timeline is None else served[id(timeline) not in by_spans]).append((name, sequence))
        return free, served

    def _owner(
        self, life: KvTimeline, instance: str, free: list[tuple[str, KvSequence]], *, flush: bool
    ) -> tuple[KvSequence, int | None] | None:
        if instance:
            own = [sequence for name, sequence in free if name == instance]
            return (own[-1], None) if own else None
        best: tuple[float, int, KvSequence] | None = None
        for _, sequence in free:
            until = sequence.event_unix_ns if flush else sequence.event_unix_ns - self._grace_ns
            rhythm = evidence(life.times(), sequence, until)
            if rhythm is not None and (best is None or rhythm.share > best[0]):
                best = rhythm.share, rhythm.since_unix_ns, sequence
        return (best[2], best[1]) if best is not None else None

    def take_counts(self) -> Counts:
        """Counts since the last call, and what is held now."""
        counts, self.counts = self.counts, Counts()
        for _, owner in self._bound:
            counts[table.KV_HIT_TOKENS] += owner.kv.prefills.take_hit_tokens()
        counts[table.KV_HELD], counts[table.KV_MISSING] = self.batches, self.missing
        counts[table.KV_UNBOUND] = self.unbound
        return counts


def _fits(batch: KvBatch, oldest_ns: int, oldest_seq: int, newest_ns: int, newest_seq: int) -> bool:
    """Whether sequence and time are on the same side of a life's ends: behind, before, or both between them."""
    if batch.seq > newest_seq:
        return batch.ts_unix_ns >= newest_ns
    if batch.seq < oldest_seq:
        return batch.ts_unix_ns <= oldest_ns
    return oldest_ns <= batch.ts_unix_ns <= newest_ns


def evidence(batch_times_ns: Ints, sequence: KvSequence, until_unix_ns: int) -> Rhythm | None:
    """The earliest moment by which enough prefill ends were answered by a batch; None while there is no such moment.

    Ends: FIRST_TOKEN stamps (known when the request had finished), and starts of steps after a summary with prefill
    tokens. The share asked for grows with the share that chance would answer.
    """
    if len(batch_times_ns) == 0:
        return None
    known_ns, end_ns = _ends(sequence)
    inside = (known_ns <= until_unix_ns) & (end_ns >= batch_times_ns[0])
    known_ns, end_ns = known_ns[inside], end_ns[inside]
    order = np.lexsort((end_ns, known_ns))
    known_ns, end_ns = known_ns[order], end_ns[order]
    answered = np.searchsorted(batch_times_ns, end_ns) < np.searchsorted(batch_times_ns, end_ns + _NEAR_NS, "right")
    hits = np.cumsum(answered)
    share = hits / np.arange(1, len(hits) + 1)
    span_ns = np.maximum(1, known_ns - batch_times_ns[0])
    chance = np.searchsorted(batch_times_ns, known_ns, "right") * _NEAR_NS / span_ns
    enough = (hits >= _EVIDENCE_MIN) & (share >= np.clip(_SHARE_OVER_CHANCE * chance, _SHARE_MIN, _SHARE_ENOUGH))
    if not enough.any():
        return None
    first = int(np.argmax(enough))
    return Rhythm(int(known_ns[first]), float(share[first]))


def _ends(sequence: KvSequence) -> tuple[Ints, Ints]:
    """(when it is known, when it was) of prefill ends, wall clock; those of summaries a millisecond early."""
    stamps = np.array(sequence.kv.prefills.stamps or np.empty((0, 2)), np.int64)
    window = sequence.window
    if window is None or window.size < 2:  # noqa: PLR2004 -- a step and its next one
        return stamps[:, 0], stamps[:, 1]
    steps, seen = window.steps[: window.size], window.rebuilt["seen"][: window.size]
    pairs = np.flatnonzero(seen[:-1] & seen[1:] & (steps["prefill_tokens"][:-1] > 0)) + 1
    starts = steps["unix_ns"][pairs] - steps["ts_end_ns"][pairs] + steps["ts_start_ns"][pairs]
    return np.concatenate((stamps[:, 0], starts)), np.concatenate((stamps[:, 1], starts - _NEAR_NS))
