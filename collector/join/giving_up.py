"""Giving up what waits longest, when memory is short: the older half of what each emitter holds.

Outside of invariant 4: what is given up depends on when memory was short. All of it is counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from collector.telemetry import Counts, JoinEvent, table

from .emitter import Emitter
from .engine import Engine
from .engine_process import EngineProcess

_STEPS_BEFORE = 2
"""Steps behind the rows that the next row needs: they may say when it begins."""


def give_up_oldest(emitters: Iterable[Emitter]) -> Counts:
    """Let go of the older half of steps and requests that gave no rows yet, and of all steps kept behind them."""
    counts = Counts()
    for emitter in emitters:
        if isinstance(emitter, Engine):
            for process in emitter.processes:
                counts.merge(_give_up_of(process))
    return counts


def _give_up_of(process: EngineProcess) -> Counts:
    counts, window, frontier = Counts(), process.sequence.window, process.sequence.frontier
    process.sort_requests()
    requests = len(process.requests) // 2
    del process.requests[:requests]
    counts[table.JOIN_EVENTS, JoinEvent.OPEN_REQUESTS_EVICTED] += requests
    if window is not None:
        first = max(window.base, frontier.first_boundary(window.base))
        stop = first + (window.newest_step + 1 - first) // 2
        _, cells = window.columns(first, stop)
        heard_of = cells["seen"] | (cells["completed_ns"] > 0) | (cells["scheduled_ns"] > 0)
        counts[table.JOIN_EVENTS, JoinEvent.STEP_GIVEN_UP] += int(np.count_nonzero(heard_of))
        if stop == first:  # the rows go on where they are
            window.give_up_before(first - _STEPS_BEFORE)
        else:  # they begin anew at ``stop``, which the step before it may have to tell
            window.give_up_before(stop - 1)
            frontier.emitted_to, frontier.learned_to = 0, max(frontier.learned_to, window.base)  # none is missing
    return counts
