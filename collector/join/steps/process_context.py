"""What is known of an engine process as a whole: what its telemetry carries, how it schedules, where context is from.

Nothing is taken back: once summaries, journeys or exact context were seen, rows are made with them.
"""

from __future__ import annotations

import numpy as np

from collector.config import JoinConfig
from collector.decode import MISSING, StepColumns
from collector.join.block_ratio import BlockRatio
from collector.join.window import Cells
from collector.telemetry import Counts, JoinEvent, table
from online import Quality
from online.state import saved

from . import boundaries
from .habits import Habits
from .raw_features import ContextSource, Rebuilt, complete
from .row_blocks import Columns
from .scheduling import Scheduling, SchedulingVotes


class ProcessContext:
    """Sources, scheduling mode and habits of one engine process; times are wall clock."""

    STATE = saved(
        "process_context",
        habits=Habits,
        votes=SchedulingVotes,
        scheduling_fact=Scheduling,
        budget_fact_tokens=float | None,
        event_unix_ns=int,
        first_unix_ns=int,
        has_summaries=bool,
        has_journeys=bool,
        has_exact_context=bool,
        has_done_stamps=bool,
        longest_run_ns=int,
        _scheduled_tokens_max=int,
        _first_finish_unix_ns=int,
    )

    def __init__(self, settings: JoinConfig, ratio: BlockRatio) -> None:
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
        self._scheduled_tokens_max = 0
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
        self._scheduled_tokens_max = max(self._scheduled_tokens_max, int(steps["scheduled_tokens"].max()))
        finishing = steps["unix_ns"][steps["finished"] > 0]
        if len(finishing):
            earliest = int(finishing.min())
            self._first_finish_unix_ns = min(self._first_finish_unix_ns or earliest, earliest)

    @property
    def budget_tokens(self) -> float | None:
        """Token budget of a step: as configured, else the most that was scheduled; None while nothing is known."""
        return self.budget_fact_tokens or (self._scheduled_tokens_max or None)

    @property
    def waited_ns(self) -> int:
        """How much longer than ``grace_s`` steps wait before they are final: without summaries, the whole window."""
        return 0 if self.has_summaries else int((self._settings.window_s - self._settings.grace_s) * 1e9)

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
        grace_ns, window_ns = self._settings.grace_s * 1e9, self._settings.window_s * 1e9
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
        waited = self.event_unix_ns >= self.first_unix_ns + int(self._settings.window_s * 1e9)
        if self.has_journeys and not (flush or waited):
            return Scheduling.UNKNOWN
        if self.scheduling_fact is not Scheduling.UNKNOWN:
            return self.scheduling_fact
        return self.votes.settle(steps, cells) if flush or self.has_journeys else Scheduling.SYNC

    def stamps(self, around: Columns, *, asynchronous: bool) -> boundaries.Stamps:
        """The stamped boundaries that rows may run between."""
        if self.has_done_stamps:
            stamps = boundaries.done_stamps(around.steps, around.cells, around.empty)
        else:
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
