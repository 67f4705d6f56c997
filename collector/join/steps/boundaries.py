"""Stamps at step boundaries, and the intervals between them.

Boundary b is the moment step b starts to execute. What is stamped there (wire contract §5.4, §5.6):

    kind        synchronous            asynchronous
    start       ts_start(b)            ts_start(b + 1), if step b has tokens     reference, no phase
    completed   end stamps of b - 1    end stamps of b - 1                       reference where there is no start stamp
    scheduled   SCHEDULED of b         SCHEDULED of b + 1, as start
    done        ts_done(b - 1) if it had tokens, else ts_start(b)                plugin only; no lag in either mode

Each boundary keeps its best stamp; rows run between consecutive stamped boundaries, so every step is learned once.

An engine that has nothing to do makes an empty step and waits. Where that step is not in the telemetry, ``ts_done``
tells all the same when the engine was done: step b then starts idle(b) later, which no step took:

    idle(b) = max(ts_start(b) - ts_done(b - 1), 0)      if nobody waited, nobody decodes in b, and all that ran before
                                                        have ended, or no prompt of theirs can go on in b
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.decode import MISSING
from collector.join.window import Cells
from online import PHASES, Floats, Ints, Mask

from .raw_features import Rebuilt

START, SCHEDULED, COMPLETED = -1, PHASES.index("scheduled"), PHASES.index("completed")


@dataclass(frozen=True, slots=True)
class Stamps:
    """Stamped boundaries in order: step index (within the columns given), monotonic ns, wall clock ns, kind.

    ``idle_ns``: how long the engine had nothing to do behind the stamp.
    """

    step: Ints
    ns: Ints
    unix_ns: Ints
    kind: Ints
    idle_ns: Ints

    def take(self, chosen: Mask) -> Stamps:
        """The stamps of the chosen boundaries."""
        return Stamps(self.step[chosen], self.ns[chosen], self.unix_ns[chosen], self.kind[chosen], self.idle_ns[chosen])

    @property
    def elapsed_ns(self) -> Ints:
        """From each stamp to the next one, idle time apart, shape (len(step) - 1,)."""
        return np.asarray(np.diff(self.ns) - self.idle_ns[:-1])


def empty_steps(steps: Cells, cells: Cells, *, asynchronous: bool) -> Mask:
    """Steps that ran nothing: a summary without tokens, or no request in a rebuilt step."""
    empty: Mask = steps["scheduled_tokens"] == 0
    unseen = np.flatnonzero(~cells["seen"])
    if len(unseen):
        empty[unseen] = Rebuilt(cells.take(unseen), asynchronous=asynchronous).requests == 0
    return empty


def stamps(steps: Cells, cells: Cells, empty: Mask, *, asynchronous: bool) -> Stamps:
    """The best stamp of every boundary 1..m-2 of m consecutive steps (the edges lack a neighbour).

    Index 0 is a step before the range of interest and the last one a step after it.
    """
    inner = slice(1, len(steps) - 1)
    after = slice(2, len(steps))
    before = slice(0, len(steps) - 2)
    at = after if asynchronous else inner
    wall_offset = steps["unix_ns"] - steps["ts_end_ns"]
    start = cells["seen"][at] & ~empty[inner] if asynchronous else cells["seen"][inner].copy()
    scheduled = cells["scheduled_ns"][at] > 0
    if asynchronous:
        scheduled &= ~empty[inner]
    completed = cells["completed_ns"][before] > 0
    ns = np.where(
        start, steps["ts_start_ns"][at], np.where(completed, cells["completed_ns"][before], cells["scheduled_ns"][at])
    )
    unix = np.where(
        start,
        steps["ts_start_ns"][at] + wall_offset[at],
        np.where(completed, cells["completed_unix_ns"][before], cells["scheduled_unix_ns"][at]),
    )
    kind = np.where(start, START, np.where(completed, COMPLETED, SCHEDULED))
    index = np.flatnonzero(start | completed | scheduled)
    return Stamps(index + 1, ns[index], unix[index], kind[index], np.zeros(len(index), np.int64))


def done_stamps(steps: Cells, cells: Cells, empty: Mask) -> Stamps:
    """Stamps of an engine whose summaries carry ``ts_done_ns``; same shape rules as :func:`stamps`."""
    inner, before = slice(1, len(steps) - 1), slice(0, len(steps) - 2)
    wall_offset = steps["unix_ns"] - steps["ts_end_ns"]
    busy = cells["seen"][before] & ~empty[before] & (steps["ts_done_ns"][before] != MISSING)
    idle = cells["seen"][before] & empty[before] & cells["seen"][inner]
    ns = np.where(busy, steps["ts_done_ns"][before], steps["ts_start_ns"][inner])
    unix = ns + np.where(busy, wall_offset[before], wall_offset[inner])
    index = np.flatnonzero(busy | idle)
    resumed = busy & cells["seen"][inner] & ~empty[inner] & _resumed(steps[inner], steps[before])
    idle_ns = np.where(resumed, np.maximum(steps["ts_start_ns"][inner] - ns, 0), 0)
    return Stamps(index + 1, ns[index], unix[index], np.full(len(index), START), idle_ns[index])


def _resumed(steps: Cells, before: Cells) -> Mask:
    """Steps that find nothing left of the step before them, so that the engine may have been idle."""
    tokens = steps["prefill_tokens"].astype(np.int64)
    prompts_begin = (steps["attention_pairs"] > 0) & (2 * steps["attention_pairs"] <= tokens * (tokens + 1))
    nobody_left = (before["running"] <= steps["finished"]) | (before["prefill_requests"] == 0) | prompts_begin
    return np.asarray(nobody_left & (steps["decode_requests"] == 0) & (before["waiting"] == 0))


def phase_columns(kind: Ints, *, has_start: bool) -> Floats:
    """Phase of the rows between consecutive stamps, shape (n - 1, len(PHASES)).

    Without start stamps ``completed`` is the reference: both columns together would be rank-deficient.
    """
    columns = np.zeros((len(kind), len(PHASES)))
    columns[kind == SCHEDULED, SCHEDULED] = 1.0
    if has_start:
        columns[kind == COMPLETED, COMPLETED] = 1.0
    return np.diff(columns, axis=0)
