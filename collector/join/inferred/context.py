"""What is known of an engine process as a whole: what its telemetry carries, how it schedules, where context is from.

Nothing is taken back: once summaries, journeys or exact context were seen, rows are made with them.

Synchronous or asynchronous scheduling, told from where end stamps lie (wire contract §5.6).

FIRST_TOKEN and FINISHED of step s come before ts_start(s + 1) if the engine waits for each step, after it if the next
step is scheduled while s runs. SCHEDULED of s + 1 tells the same where there is no summary.

What passed steps teach about an engine: tokens per KV block, the share of requests that send journeys, holes.

Learned step by step in order, but in force only from the next block boundary on (step ids divisible by
``block_steps``), so that a row does not depend on how much telemetry came in one piece.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from collector.config import Config
from collector.decode import MISSING, StepColumns
from collector.join.window import Cells
from collector.telemetry import Counts, JoinEvent, table
from online import Quality

from . import row_blocks as boundaries
from .row_blocks import BlockRatio, Columns, ContextSource, Rebuilt, complete, snapshot_complete

_VOTES_MIN = 8
_SWITCH_SHARE = 0.9
_DECAY = 0.5


class Scheduling(enum.StrEnum):
    """How the engine's busy loop overlaps scheduling and execution."""

    SYNC = "sync"
    ASYNC = "async"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class SchedulingVotes:
    """Decides once there are enough votes, then re-checks with forgetting."""

    decided: Scheduling = Scheduling.UNKNOWN
    sync: float = 0.0
    asynchronous: float = 0.0

    def add(self, steps: NDArray[np.void], cells: NDArray[np.void]) -> None:
        """Count the votes of consecutive steps; each step must be given once."""
        sync, asynchronous = votes(steps, cells)
        self.sync += sync
        self.asynchronous += asynchronous
        if self.decided is Scheduling.UNKNOWN:
            self._decide()

    def settle_block(self) -> None:
        """End of a block of steps: re-check, then count what has been less."""
        self._decide()
        if self.decided is Scheduling.UNKNOWN:
            return  # journeys alone cast a vote or two a block: forgetting them would never let them decide
        self.sync, self.asynchronous = _DECAY * self.sync, _DECAY * self.asynchronous

    def provisional(self, steps: NDArray[np.void], cells: NDArray[np.void]) -> Scheduling:
        """The mode as these steps show it, without counting their votes; UNKNOWN while they show too little."""
        sync, asynchronous = votes(steps, cells)
        if sync + asynchronous < _VOTES_MIN:
            return Scheduling.UNKNOWN
        return Scheduling.SYNC if sync >= asynchronous else Scheduling.ASYNC

    def settle(self, steps: NDArray[np.void], cells: NDArray[np.void]) -> Scheduling:
        """End of the stream: decide with whatever there is, else synchronous."""
        sync, asynchronous = votes(steps, cells)
        more_async = asynchronous + self.asynchronous > sync + self.sync
        self.decided = Scheduling.ASYNC if more_async else Scheduling.SYNC
        return self.decided

    def _decide(self) -> None:
        total = self.sync + self.asynchronous
        if total < _VOTES_MIN:
            return
        if self.decided is Scheduling.UNKNOWN:
            self.decided = Scheduling.SYNC if self.sync >= self.asynchronous else Scheduling.ASYNC
        elif self.sync > _SWITCH_SHARE * total:
            self.decided = Scheduling.SYNC
        elif self.asynchronous > _SWITCH_SHARE * total:
            self.decided = Scheduling.ASYNC


def votes(steps: NDArray[np.void], cells: NDArray[np.void]) -> tuple[int, int]:
    """(synchronous, asynchronous) votes of consecutive steps: does an end stamp precede the next step's start?"""
    completed = cells["completed_ns"][:-1]
    by_start = cells["seen"][1:]
    next_ns = np.where(by_start, steps["ts_start_ns"][1:], cells["scheduled_ns"][1:])
    usable = (completed > 0) & (next_ns > 0)
    sync = int(np.count_nonzero(usable & (completed < next_ns)))
    return sync, int(np.count_nonzero(usable)) - sync


FIRST_BLOCK_STEPS = 256
"""A new engine waits for its first block; the later ones only cost per block."""

_HABIT_DECAY = 0.8
"""Per block: some 5000 steps are remembered."""
_COMPLETE_SHARE = 0.97
"""Below this share of rebuilt requests in summaries, journeys are sampled: rebuilt counts are scaled up."""
_REQUESTS_MIN = 32.0
_STEPS_SHARE = 0.7
"""Share of steps with a summary from which on the telemetry counts as ``steps`` rather than ``sampled``."""


@dataclass(slots=True)
class Sums:
    """What steps add up to."""

    context_tokens: float = 0.0
    blocks: float = 0.0
    rebuilt_requests: float = 0.0
    summary_requests: float = 0.0
    steps: float = 0.0
    holes: float = 0.0
    usage: float = 0.0

    def to_plain(self) -> dict[str, float]:
        """By name, for a checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_plain(cls, sums: Mapping[str, float]) -> Sums:
        """Read them back; names of another version are left out."""
        return cls(**{name: sums.get(name, 0.0) for name in cls.__slots__})

    def fold(self, other: Sums) -> None:
        """Decay, then add a block."""
        for name in self.__slots__:
            setattr(self, name, _HABIT_DECAY * getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Habits:
    """Decayed sums over whole blocks of passed steps, and the block under way."""

    ratio: BlockRatio
    settled: bool = False
    _past: Sums = field(default_factory=Sums)
    _block: Sums = field(default_factory=Sums)

    def learn(self, steps: Cells, cells: Cells, counts: Rebuilt) -> None:
        """Take passed steps of one block."""
        block, seen = self._block, cells["seen"]
        block.steps += len(steps)
        block.holes += int(np.count_nonzero(~seen))
        busy = seen & (steps["scheduled_tokens"] > 0)
        snapped = snapshot_complete(steps, cells)
        block.rebuilt_requests += float(counts.requests @ busy)
        block.summary_requests += float((steps["prefill_requests"] + steps["decode_requests"]) @ busy)
        exact = (busy & (steps["prefill_requests"] == 0) & (complete(steps, cells, counts) | snapped)).nonzero()[0]
        context = counts.context_tokens
        if snapped.any():
            context = np.where(snapped, cells["snapshot_context_tokens"], context)
        block.context_tokens += float(context.take(exact).sum())
        block.blocks += float((steps["kv_blocks_total"] - steps["kv_blocks_free"]).take(exact).sum())
        usage = steps["kv_usage_ratio"].take(exact)
        block.usage += float(np.where(np.isfinite(usage), usage, 0.0).sum())

    def missing_steps(self, cells: Cells) -> int:
        """Steps about to be learned whose summary never came, from the first on that did: without one, none."""
        seen, block, past = cells["seen"], self._block, self._past
        if block.steps + past.steps <= block.holes + past.holes:
            seen = seen[np.argmax(seen) :] if seen.any() else seen[:0]
        return int(np.count_nonzero(~seen))

    def settle(self) -> None:
        """End of a block: what it taught is in force from here on."""
        self._past.fold(self._block)
        self._block = Sums()
        self._apply()

    def _apply(self) -> None:
        self.settled = True
        self.ratio.context_tokens, self.ratio.blocks = self._past.context_tokens, self._past.blocks
        self.ratio.usage = self._past.usage

    @property
    def sums(self) -> Sums:
        """Decayed sums over the blocks that ended."""
        return self._past

    def restore(self, sums: Sums, *, learned: bool) -> None:
        """Begin with what an earlier process of ours had learned."""
        self._past = sums
        if learned:
            self._apply()

    @property
    def hole_scale(self) -> float:
        """1 ÷ the share of requests whose journeys are sent; 1 while that looks like all of them."""
        past = self._past
        if past.summary_requests < _REQUESTS_MIN or past.rebuilt_requests <= 0:
            return 1.0
        share = past.rebuilt_requests / past.summary_requests
        return 1.0 / share if share < _COMPLETE_SHARE else 1.0

    @property
    def sampled(self) -> bool:
        """Whether too many steps have no summary to call the telemetry complete."""
        steps, holes = self._past.steps + self._block.steps, self._past.holes + self._block.holes
        return holes > (1 - _STEPS_SHARE) * steps


class ProcessContext:
    """Sources, scheduling mode and habits of one engine process; times are wall clock."""

    def __init__(self, settings: Config, ratio: BlockRatio) -> None:
        self._settings = settings
        self.habits = Habits(ratio)
        self.votes = SchedulingVotes()
        self.scheduling_fact = Scheduling.UNKNOWN
        self.budget_fact_tokens: float | None = None
        self.event_unix_ns = 0
        self.first_unix_ns = 0
        self.has_summaries = False
        self.has_journeys = False
        self.has_exact_context = False
        self.has_done_stamps = False
        self.longest_run_ns = 0
        self.scheduled_tokens_max = 0
        self._first_finish_unix_ns = 0

    def record_times(self, oldest_unix_ns: int, newest_unix_ns: int) -> None:
        """Something happened from ``oldest_unix_ns`` to ``newest_unix_ns``."""
        self.event_unix_ns = max(self.event_unix_ns, newest_unix_ns)
        self.first_unix_ns = min(self.first_unix_ns or oldest_unix_ns, oldest_unix_ns)

    def record_summaries(self, steps: StepColumns) -> None:
        """Step summaries came: what they carry."""
        self.record_times(int(steps["unix_ns"].min()), int(steps["unix_ns"].max()))
        self.has_summaries = True
        self.has_exact_context = self.has_exact_context or bool((steps["context_tokens_single"] != MISSING).any())
        self.has_done_stamps = self.has_done_stamps or bool((steps["ts_done_ns"] > 0).any())
        self.scheduled_tokens_max = max(self.scheduled_tokens_max, int(steps["scheduled_tokens"].max()))
        finishing = steps["unix_ns"][steps["finished"] > 0]
        if len(finishing):
            earliest = int(finishing.min())
            self._first_finish_unix_ns = min(self._first_finish_unix_ns or earliest, earliest)

    @property
    def is_exact(self) -> bool:
        """Whether summaries say all: with contexts, and with when each step was done."""
        return self.has_exact_context and self.has_done_stamps

    @property
    def budget_tokens(self) -> float | None:
        """Token budget of a step: as configured, else the most that was scheduled; None while nothing is known."""
        return self.budget_fact_tokens or (self.scheduled_tokens_max or None)

    @property
    def waited_ns(self) -> int:
        """How much longer than ``allowed_lateness_s`` steps wait to be final: without summaries, the whole window."""
        return (
            0 if self.has_summaries else int((self._settings.join_timeout_s - self._settings.allowed_lateness_s) * 1e9)
        )

    @property
    def quality(self) -> Quality:
        """Telemetry quality: what the rows of this process are made from."""
        if not self.has_summaries:
            return Quality.JOURNEYS
        if self.has_exact_context:
            return Quality.STEPS_PLUS
        return Quality.SAMPLED if self.habits.sampled else Quality.STEPS

    @property
    def source(self) -> ContextSource | None:
        """Where decode context comes from; None while it cannot be told yet whether journeys will come."""
        if self.has_exact_context:
            return ContextSource.EXACT
        if self.has_journeys:
            return ContextSource.JOURNEYS
        grace_ns, window_ns = self._settings.allowed_lateness_s * 1e9, self._settings.join_timeout_s * 1e9
        finished = self._first_finish_unix_ns and self.event_unix_ns >= self._first_finish_unix_ns + grace_ns
        if finished or self.event_unix_ns >= self.first_unix_ns + window_ns:
            return ContextSource.BLOCKS
        return None

    def mode(self, steps: Cells, cells: Cells, *, flush: bool) -> Scheduling:
        """The scheduling mode, by these steps where it is not decided; UNKNOWN while end stamps may still tell it."""
        if self.votes.decided is not Scheduling.UNKNOWN:
            return self.votes.decided
        mode = self.votes.provisional(steps, cells)
        if mode is not Scheduling.UNKNOWN:
            return mode
        waited = self.event_unix_ns >= self.first_unix_ns + int(self._settings.join_timeout_s * 1e9)
        if self.has_journeys and not (flush or waited):
            return Scheduling.UNKNOWN
        if self.scheduling_fact is not Scheduling.UNKNOWN:
            return self.scheduling_fact
        return self.votes.settle(steps, cells) if flush or self.has_journeys else Scheduling.SYNC

    def stamps(self, around: Columns, *, asynchronous: bool) -> boundaries.Stamps:
        """The stamped boundaries that rows may run between."""
        stamps = boundaries.stamps(around.steps, around.cells, around.empty, asynchronous=asynchronous)
        if self.has_summaries and self.habits.hole_scale != 1.0:
            # Journey stamps pick intervals around the requests that are traced: scaled up, those would count too much.
            stamps = stamps.take(stamps.kind == boundaries.START)
        return stamps

    def learn_steps(self, steps: Cells, cells: Cells, *, asynchronous: bool) -> Counts:
        """Take the votes and habits of passed steps, all but the last one, which is their successor."""
        self.votes.add(steps, cells)
        steps, cells = steps[:-1], cells[:-1]
        rebuilt, counts = Rebuilt(cells, asynchronous=asynchronous), Counts()
        self.habits.learn(steps, cells, rebuilt)
        if self.has_journeys and not self.has_exact_context:
            busy = cells["seen"] & (steps["scheduled_tokens"] > 0)
            matched = int(np.count_nonzero(busy & complete(steps, cells, rebuilt)))
            counts[table.JOIN_EVENTS, JoinEvent.STEP_MATCHED] += matched
            counts[table.JOIN_EVENTS, JoinEvent.STEP_MISMATCHED] += int(np.count_nonzero(busy)) - matched
        return counts

    def settle_block(self) -> None:
        """End of a block: what its steps taught is in force from here on."""
        self.habits.settle()
        self.votes.settle_block()
