"""What KV events say of the steps of one engine process; nothing while no publisher is known to be its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collector.decode import CoreSpan
from collector.join.block_ratio import BlockRatio
from collector.join.requests import Chunks, Run
from collector.join.window import Cells, StepWindow
from online import Ints, Mask
from online.state import saved

from .prefix_hits import Prefills
from .timeline import LATENESS_NS, KvTimeline


@dataclass(slots=True)
class KvSteps:
    """The publisher of a process, once known, and the prefills it may correct."""

    STATE = saved("kv_steps")

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
