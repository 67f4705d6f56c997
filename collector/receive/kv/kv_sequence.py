"""Which batches of a KV publisher are missing, and when to ask again. No socket, no clock: time is an argument.

A publisher numbers its batches from 0 and starts again with its process (wire contract §7.1). PUB drops silently, so a
gap shows in the numbers only; a replay socket, where there is one, still has the last 10 000 batches. One request at a
time; one that is not answered is repeated after a growing pause. What a finished replay did not bring is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from collector.telemetry import Counts, SequenceEvent, table

MISSING_MAX = 10_000
"""Numbers remembered as missing per rank: as many as vLLM's publisher buffers by default."""
_PAUSE_MIN_S = 1.0


@dataclass(slots=True)
class _Numbers:
    """One rank's numbers: the next one, and those that are missing."""

    expected: int | None = None
    missing: set[int] = field(default_factory=set)


@dataclass(slots=True)
class EndpointSequence:
    """The numbers of one endpoint, by data-parallel rank."""

    can_replay: bool
    timeout_s: float
    pause_max_s: float
    counts: Counts = field(default_factory=Counts)
    _ranks: dict[int, _Numbers] = field(default_factory=dict)
    _deadline_s: float | None = None
    _not_before_s: float = 0.0
    _pause_s: float = _PAUSE_MIN_S
    _requested: dict[int, int] = field(default_factory=dict)

    def live(self, rank: int, seq: int) -> None:
        """A batch came by subscription."""
        numbers = self._ranks.setdefault(rank, _Numbers())
        if numbers.expected is not None and seq < numbers.expected:
            self.counts[table.KV_SEQUENCE, SequenceEvent.RESTARTS] += 1
            self.counts[table.KV_SEQUENCE, SequenceEvent.UNRECOVERABLE] += len(numbers.missing)
            numbers = self._ranks[rank] = _Numbers()
            self._requested.pop(rank, None)
        start = numbers.expected or 0
        if seq > start:
            self.counts[table.KV_SEQUENCE, SequenceEvent.GAPS] += 1
            self.counts[table.KV_SEQUENCE, SequenceEvent.MISSING] += seq - start
            old = max(start, seq - MISSING_MAX)
            numbers.missing.update(range(old, seq))
            excess = sorted(numbers.missing)[:-MISSING_MAX]
            numbers.missing.difference_update(excess)
            self.counts[table.KV_SEQUENCE, SequenceEvent.UNRECOVERABLE] += old - start + len(excess)
        numbers.expected = seq + 1

    def replayed(self, rank: int, seq: int) -> bool:
        """A batch came by replay; whether it was missing."""
        numbers = self._ranks.get(rank)
        if numbers is None or seq not in numbers.missing:
            return False
        numbers.missing.discard(seq)
        self.counts[table.KV_SEQUENCE, SequenceEvent.RECOVERED] += 1
        return True

    def request(self, now_s: float) -> int | None:
        """The number to ask for from, if a request is due."""
        wanted = {rank: numbers.missing for rank, numbers in self._ranks.items() if numbers.missing}
        if not self.can_replay or not wanted or self._deadline_s is not None or now_s < self._not_before_s:
            return None
        self._deadline_s = now_s + self.timeout_s
        self._requested = {rank: max(missing) for rank, missing in wanted.items()}
        self.counts[table.KV_SEQUENCE, SequenceEvent.REPLAYS_REQUESTED] += 1
        return min(min(missing) for missing in wanted.values())

    def answered(self, now_s: float) -> None:
        """Some of the replay came: the rest may take as long again."""
        if self._deadline_s is not None:
            self._deadline_s = now_s + self.timeout_s

    def finished(self) -> None:
        """The replay is over; what it did not bring is gone. A gap that came meanwhile is asked for again."""
        for rank, newest in self._requested.items():
            gone = {seq for seq in self._ranks[rank].missing if seq <= newest}
            self._ranks[rank].missing -= gone
            self.counts[table.KV_SEQUENCE, SequenceEvent.UNRECOVERABLE] += len(gone)
        self.counts[table.KV_SEQUENCE, SequenceEvent.REPLAYS_FINISHED] += 1
        self._deadline_s, self._pause_s = None, _PAUSE_MIN_S
        self._requested = {}

    def overdue(self, now_s: float) -> bool:
        """Whether the outstanding request has gone unanswered; the next one waits twice as long as the last did."""
        if self._deadline_s is None or now_s < self._deadline_s:
            return False
        self.counts[table.KV_SEQUENCE, SequenceEvent.REPLAYS_UNANSWERED] += 1
        self._deadline_s = None
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self.pause_max_s)
        return True
