"""What is known of an engine process as a whole: what its telemetry carries, how it schedules, what its steps teach.

Nothing is taken back: once summaries, journeys or exact context were seen, rows are made with them.

Synchronous or asynchronous scheduling is told from where end stamps lie (wire contract §5.6): FIRST_TOKEN and FINISHED
of step s come before ts_start(s + 1) if the engine waits for each step, after it if the next step is scheduled while s
runs. SCHEDULED of s + 1 tells the same where there is no summary.

Steps teach tokens per KV block, the share of requests that send journeys, and holes. They are learned one by one in
order, but in force only from the next block boundary on (step ids divisible by ``block_rows``), so that a row does not
depend on how much telemetry came in one piece.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from collector.config import Config
from collector.decode import MISSING, StepColumns
from collector.join.window import Cells
from collector.telemetry import Counts, JoinEvent, table
from online import Quality

from . import row_blocks as boundaries
from .row_blocks import BlockRatio, Columns, ContextSource, Rebuilt, complete, snapshot_complete

Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

_VOTES_MIN = 8
"""End stamps that tell how an engine schedules: a stamp or two may be late."""
FIRST_BLOCK_STEPS = 256
"""A new engine waits for its first block; the later ones only cost per block."""
_DECAY = 0.8
"""Of what a block taught, per block: some 5000 steps are remembered."""
_COMPLETE_SHARE = 0.97
"""Below this share of rebuilt requests in summaries, journeys are sampled: rebuilt counts are scaled up."""
_REQUESTS_MIN = 32.0
_STEPS_SHARE = 0.7
"""Share of steps with a summary from which on the telemetry counts as ``steps`` rather than ``sampled``."""


class Scheduling(enum.StrEnum):
    """How the engine's busy loop overlaps scheduling and execution."""

    SYNC = "sync"
    ASYNC = "async"
    UNKNOWN = "unknown"


class SchedulingVotes(msgspec.Struct):
    """How many end stamps came before and after the next step began; what the majority says, once there are enough."""

    decided: Scheduling = Scheduling.UNKNOWN
    sync: Natural = 0
    asynchronous: Natural = 0

    def add(self, steps: Cells, cells: Cells) -> None:
        """Count the votes of consecutive steps; each step must be given once."""
        completed = cells["completed_ns"][:-1]
        next_ns = np.where(cells["seen"][1:], steps["ts_start_ns"][1:], cells["scheduled_ns"][1:])
        usable = (completed > 0) & (next_ns > 0)
        sync = int(np.count_nonzero(usable & (completed < next_ns)))
        self.sync += sync
        self.asynchronous += int(np.count_nonzero(usable)) - sync
        if self.sync + self.asynchronous >= _VOTES_MIN:
            self.decided = self.majority

    @property
    def majority(self) -> Scheduling:
        """What most of them say."""
        return Scheduling.ASYNC if self.asynchronous > self.sync else Scheduling.SYNC


class Sums(msgspec.Struct):
    """What steps add up to."""

    context_tokens: Amount = 0.0
    blocks: Amount = 0.0
    rebuilt_requests: Amount = 0.0
    summary_requests: Amount = 0.0
    steps: Amount = 0.0
    holes: Amount = 0.0
    usage: Amount = 0.0

    def fold(self, other: Sums) -> None:
        """Decay, then add a block."""
        for name in self.__struct_fields__:
            setattr(self, name, _DECAY * getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Habits:
    """Decayed sums over whole blocks of passed steps, and the block under way."""

    ratio: BlockRatio
    learned: bool = False
    """Whether a whole block has passed."""
    sums: Sums = field(default_factory=Sums)
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
        exact = busy & (steps["prefill_requests"] == 0) & (complete(steps, cells, counts) | snapped)
        context = np.where(snapped, cells["snapshot_context_tokens"], counts.context_tokens)
        block.context_tokens += float(context @ exact)
        block.blocks += float((steps["kv_blocks_total"] - steps["kv_blocks_free"]) @ exact)
        block.usage += float(np.nansum(steps["kv_usage_ratio"][exact]))

    def missing_steps(self, cells: Cells) -> int:
        """Steps about to be learned whose summary never came, from the first on that did: without one, none."""
        seen, block, past = cells["seen"], self._block, self.sums
        if block.steps + past.steps <= block.holes + past.holes:
            seen = seen[np.argmax(seen) :] if seen.any() else seen[:0]
        return int(np.count_nonzero(~seen))

    def end_block(self) -> None:
        """What the block taught is in force from here on."""
        self.sums.fold(self._block)
        self._block = Sums()
        self.apply()

    def apply(self) -> None:
        """Let rows be made by what is known."""
        self.learned = True
        self.ratio.context_tokens, self.ratio.blocks = self.sums.context_tokens, self.sums.blocks
        self.ratio.usage = self.sums.usage

    @property
    def hole_scale(self) -> float:
        """1 ÷ the share of requests whose journeys are sent; 1 while that looks like all of them."""
        if self.sums.summary_requests < _REQUESTS_MIN or self.sums.rebuilt_requests <= 0:
            return 1.0
        share = self.sums.rebuilt_requests / self.sums.summary_requests
        return 1.0 / share if share < _COMPLETE_SHARE else 1.0

    @property
    def sampled(self) -> bool:
        """Whether too many steps have no summary to call the telemetry complete."""
        steps, holes = self.sums.steps + self._block.steps, self.sums.holes + self._block.holes
        return holes > (1 - _STEPS_SHARE) * steps


class ProcessContext:
    """Sources, scheduling mode and habits of one engine process; times are wall clock."""

    def __init__(self, settings: Config, ratio: BlockRatio) -> None:
        self._lateness_ns = int(settings.allowed_lateness_s * 1e9)
        self._timeout_ns = int(settings.join_timeout_s * 1e9)
        self.habits = Habits(ratio)
        self.votes = SchedulingVotes()
        self.scheduling_fact = Scheduling.UNKNOWN
        self.budget_fact_tokens: float | None = None
        self.event_unix_ns = self.first_unix_ns = 0
        self.has_summaries = self.has_journeys = self.has_exact_context = self.has_done_stamps = False
        self.longest_run_ns = self.scheduled_tokens_max = 0
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
        """How much longer than the lateness steps wait before they are final: without summaries, to the timeout."""
        return 0 if self.has_summaries else self._timeout_ns - self._lateness_ns

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
        finished = self._first_finish_unix_ns and self.event_unix_ns >= self._first_finish_unix_ns + self._lateness_ns
        return ContextSource.BLOCKS if finished or self._has_waited else None

    @property
    def _has_waited(self) -> bool:
        return self.event_unix_ns >= self.first_unix_ns + self._timeout_ns

    def mode(self, steps: Cells, cells: Cells, *, flush: bool) -> Scheduling:
        """The scheduling mode, by these steps where it is not decided; UNKNOWN while end stamps may still tell it."""
        if self.votes.decided is not Scheduling.UNKNOWN:
            return self.votes.decided
        shown = SchedulingVotes()
        shown.add(steps, cells)
        if shown.decided is not Scheduling.UNKNOWN:
            return shown.decided
        if self.has_journeys and not (flush or self._has_waited):
            return Scheduling.UNKNOWN
        if self.scheduling_fact is not Scheduling.UNKNOWN:
            return self.scheduling_fact
        if not (flush or self.has_journeys):
            return Scheduling.SYNC
        shown.sync, shown.asynchronous = shown.sync + self.votes.sync, shown.asynchronous + self.votes.asynchronous
        self.votes.decided = shown.majority
        return self.votes.decided

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
