"""From stamped boundaries to rows: features summed between stamps, and the intervals that give none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collector.join.window import Cells
from collector.telemetry import Counts, RowDrop, table
from online import Ints, Mask, Quality, RowBlock

from . import boundaries
from .raw_features import Rebuilt, complete


@dataclass(frozen=True, slots=True)
class Columns:
    """Consecutive steps with what is known of each, shape (m,)."""

    steps: Cells
    cells: Cells
    empty: Mask
    asynchronous: bool

    @classmethod
    def of(cls, steps: Cells, cells: Cells, *, asynchronous: bool) -> Columns:
        """The columns of a step window."""
        empty = boundaries.empty_steps(steps, cells, asynchronous=asynchronous)
        return cls(steps, cells, empty, asynchronous)

    @property
    def counts(self) -> Rebuilt:
        """What journeys say ran."""
        return Rebuilt(self.cells, asynchronous=self.asynchronous)

    def cut(self, here: slice) -> Columns:
        """A run of these steps, as views."""
        return Columns(self.steps[here], self.cells[here], self.empty[here], self.asynchronous)

    def take(self, index: Ints) -> Columns:
        """The chosen steps, whose indices grow; as views where they are a run."""
        first, stop = int(index[0]), int(index[-1]) + 1
        if stop - first == len(index):
            return self.cut(slice(first, stop))
        return Columns(self.steps.take(index), self.cells.take(index), self.empty[index], self.asynchronous)


@dataclass(frozen=True, slots=True)
class Trust:
    """What decides whether a rebuilt step may be used.

    ``journeys_sampled``: not all requests send journeys, counts are scaled, none can be checked.
    ``open_after_unix_ns``: at the end of a stream, requests that began after it may still run unheard of.
    """

    has_journeys: bool
    journeys_sampled: bool
    open_after_unix_ns: int | None
    row_steps_max: int


def neighbours(seen: Mask) -> tuple[Ints, Ints]:
    """Index of the nearest seen step at or before, and at or after, each step; -1 where there is none."""
    index = np.arange(len(seen))
    before = np.maximum.accumulate(np.where(seen, index, -1))
    after = np.minimum.accumulate(np.where(seen, index, len(seen))[::-1])[::-1]
    return before, np.where(after == len(seen), -1, after)


def drops(around: Columns, stamps: boundaries.Stamps, trust: Trust) -> list[tuple[RowDrop, Mask]]:
    """Which intervals between consecutive stamps give no row, by reason, the first reason first.

    ``around`` holds the steps that the stamps index; shape of each mask: (len(stamps.step) - 1,).
    """
    low, high = int(stamps.step[0]), int(stamps.step[-1])
    starts = stamps.step[:-1] - low
    here = slice(low, high)
    holes = ~around.cells["seen"][here]
    incomplete = _incomplete(around, here, holes, stamps, trust) if holes.any() else np.zeros(len(starts), np.bool_)
    idle = np.logical_or.reduceat(around.empty[here], starts)
    return [
        (RowDrop.IDLE, idle & ~incomplete),
        (RowDrop.INCOMPLETE, incomplete),
        (RowDrop.TIME_ORDER, stamps.elapsed_ns < 0),  # of none at all the learner says that the clock is too coarse
        (RowDrop.TOO_LONG, np.diff(stamps.step) > trust.row_steps_max),
    ]


def _incomplete(around: Columns, here: slice, holes: Mask, stamps: boundaries.Stamps, trust: Trust) -> Mask:
    """Which intervals have a hole that nothing tells enough of, shape (len(stamps.step) - 1,)."""
    starts = stamps.step[:-1] - here.start
    before, after = neighbours(around.cells["seen"])
    if trust.has_journeys and not trust.journeys_sampled:
        matched = complete(around.steps, around.cells, around.counts)
        credible = np.where(before >= 0, matched[before], True) & np.where(after >= 0, matched[after], True)
    else:
        credible = np.full(len(before), trust.has_journeys)
    incomplete: Mask = np.logical_or.reduceat(holes & ~credible[here], starts)
    if trust.open_after_unix_ns is not None:
        beyond = np.logical_or.reduceat(holes & (after[here] < 0), starts)
        incomplete |= beyond & (stamps.unix_ns[1:] > trust.open_after_unix_ns)
    return incomplete


def pack(
    raw: NDArray[np.float64],
    seen: Mask,
    stamps: boundaries.Stamps,
    dropped: list[tuple[RowDrop, Mask]],
    *,
    engine: int,
    quality: Quality,
) -> tuple[RowBlock, Counts]:
    """Rows between consecutive stamps, and how many were dropped by reason.

    ``raw`` (m, r) and ``seen`` (m,) describe the steps from the first stamp to the last.
    """
    counts = Counts()
    offsets = (stamps.step - stamps.step[0]).astype(np.int64)
    keep = np.ones(len(offsets) - 1, bool)
    for reason, mask in dropped:
        counts[table.DROPPED_ROWS, reason] += int(np.count_nonzero(mask & keep))
        keep &= ~mask
    whole = np.logical_and.reduceat(seen, offsets[:-1])
    has_summaries = quality is not Quality.JOURNEYS
    row_quality = np.where(whole, int(min(quality, Quality.STEPS)), int(max(quality, Quality.SAMPLED)))
    block = RowBlock(
        raw=raw,
        offsets=offsets,
        elapsed_us=stamps.elapsed_ns / 1e3,
        phase=boundaries.phase_columns(stamps.kind, has_start=has_summaries),
        weight=np.ones(len(keep)),
        end_ns=stamps.unix_ns[1:].astype(np.int64),
        engine=np.full(len(keep), engine, np.int64),
        quality=row_quality.astype(np.int64),
    )
    return (block if keep.all() else block.take(keep)), counts


def schedule_rows(raw: NDArray[np.float64], covered: Columns, *, engine: int, quality: Quality) -> RowBlock:
    """What ``schedule()`` took in each step with a summary, shape of ``raw``: (m, r), of the steps ``covered``."""
    timed = np.flatnonzero(covered.cells["seen"] & ~covered.empty)
    return RowBlock.of_lines(
        raw.take(timed, axis=0),
        covered.steps["duration_us"][timed].astype(float),
        end_ns=covered.steps["unix_ns"][timed],
        engine=engine,
        quality=quality,
    )
