"""From stamped boundaries to rows: features summed between stamps, and the intervals that give none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collector.telemetry import Counts, RowDrop, table
from online import Ints, Quality, RowBlock

from . import boundaries
from .raw_features import Cells, Rebuilt, complete

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Consecutive steps with what is known of each, shape (m,)."""

    steps: Cells
    cells: Cells
    counts: Rebuilt
    empty: Bools

    def cut(self, here: slice) -> Columns:
        """A run of these steps, as views."""
        return Columns(self.steps[here], self.cells[here], self.counts.cut(here), self.empty[here])


@dataclass(frozen=True, slots=True)
class Trust:
    """What decides whether a rebuilt step may be used.

    ``journeys_sampled``: not all requests send journeys, counts are scaled, none can be checked.
    ``open_after_unix_ns``:
    at the end of a stream, requests that began after it may still run and have not been heard of.
    """

    has_journeys: bool
    journeys_sampled: bool
    open_after_unix_ns: int | None
    row_steps_max: int


def neighbours(seen: Bools) -> tuple[Ints, Ints]:
    """Index of the nearest seen step at or before, and at or after, each step; -1 where there is none."""
    index = np.arange(len(seen))
    before = np.maximum.accumulate(np.where(seen, index, -1))
    after = np.minimum.accumulate(np.where(seen, index, len(seen))[::-1])[::-1]
    return before, np.where(after == len(seen), -1, after)


def drops(around: Columns, found: boundaries.Stamps, trust: Trust) -> list[tuple[RowDrop, Bools]]:
    """Which intervals between consecutive stamps give no row, by reason, the first reason first.

    ``around`` holds the steps that the stamps index; shape of each mask: (len(found.step) - 1,).
    """
    low, high = int(found.step[0]), int(found.step[-1])
    starts = found.step[:-1] - low
    here = slice(low, high)
    holes = ~around.cells["seen"][here]
    before, after = neighbours(around.cells["seen"])
    if trust.has_journeys and not trust.journeys_sampled:
        matched = complete(around.steps, around.cells, around.counts)
        credible = np.where(before >= 0, matched[before], True) & np.where(after >= 0, matched[after], True)
    else:
        credible = np.full(len(before), trust.has_journeys)
    incomplete = np.logical_or.reduceat(holes & ~credible[here], starts)
    if trust.open_after_unix_ns is not None:
        beyond = np.logical_or.reduceat(holes & (after[here] < 0), starts)
        incomplete |= beyond & (found.unix_ns[1:] > trust.open_after_unix_ns)
    idle = np.logical_or.reduceat(around.empty[here], starts)
    return [
        (RowDrop.IDLE, idle & ~incomplete),
        (RowDrop.INCOMPLETE, incomplete),
        (RowDrop.TIME_ORDER, np.diff(found.ns) <= 0),
        (RowDrop.TOO_LONG, np.diff(found.step) > trust.row_steps_max),
    ]


def pack(
    raw: NDArray[np.float64],
    seen: Bools,
    found: boundaries.Stamps,
    bad: list[tuple[RowDrop, Bools]],
    *,
    engine: int,
    quality: Quality,
) -> tuple[RowBlock, Counts]:
    """Rows between consecutive stamps, and how many were dropped by reason.

    ``raw`` (m, r) and ``seen`` (m,) describe the steps from the first stamp to the last.
    """
    dropped = Counts()
    offsets = (found.step - found.step[0]).astype(np.int64)
    keep = np.ones(len(offsets) - 1, bool)
    for reason, mask in bad:
        dropped[table.DROPPED_ROWS, reason] += int(np.count_nonzero(mask & keep))
        keep &= ~mask
    whole = np.logical_and.reduceat(seen, offsets[:-1])
    has_summaries = quality is not Quality.JOURNEYS
    row_quality = np.where(whole, int(min(quality, Quality.STEPS)), int(max(quality, Quality.SAMPLED)))
    block = RowBlock(
        raw=raw,
        offsets=offsets,
        elapsed_us=np.diff(found.ns) / 1e3,
        phase=boundaries.phase_columns(found.kind, has_start=has_summaries),
        weight=np.ones(len(keep)),
        end_ns=found.unix_ns[1:].astype(np.int64),
        engine=np.full(len(keep), engine, np.int64),
        quality=row_quality.astype(np.int64),
    )
    return (block if keep.all() else block.take(keep)), dropped
