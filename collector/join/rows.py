"""From stamped boundaries to rows, for exact and for inferred telemetry.

Boundary b is the moment step b starts to execute. Rows run between consecutive stamped boundaries, so that every step
is learned once.

The first step after start-up carries 10-21 s of compilation against 25 ms of work (wire contract §9), which must not be
learned: the first ``rows_min`` rows are held; among the first three, those longer than 2 s and 20 times the median pace
are dropped, and so is every request that spans one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collector.decode import MISSING
from collector.join.window import Cells, StepView
from collector.telemetry import Counts, RowDrop, table
from online import PHASES, STEP_FEATURES, Floats, Ints, Mask, Quality, RowBlock, median_of

COLUMN = {name: number for number, name in enumerate(STEP_FEATURES)}
KV_COLUMNS = [COLUMN[name] for name in ("offload_blocks", "restore_blocks", "evicted_blocks")]
START, SCHEDULED, COMPLETED = -1, PHASES.index("scheduled"), PHASES.index("completed")
_FIRST_ROWS = 3
_LONG_US = 2e6
_LONG_RATIO = 20.0


class Stamps(NamedTuple):
    """Stamped boundaries in order.

    Index of the step that begins (within the columns given); when the step before it ended, by monotonic and by wall
    clock, ns; the kind of stamp; when the step began, ns: later than the other ended where the engine was idle.
    """

    step: Ints
    ns: Ints
    unix_ns: Ints
    kind: Ints
    begin_ns: Ints

    @property
    def elapsed_ns(self) -> Ints:
        """From each stamp to the next one, shape (len(step) - 1,)."""
        return self.ns[1:] - self.begin_ns[:-1]

    @property
    def covered(self) -> slice:
        """The steps from the first stamp to the last."""
        return slice(int(self.step[0]), int(self.step[-1]))


def raw_features(columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Raw features by name, each (m,), as lines of shape (m, len(STEP_FEATURES)); NaN for those that are not there."""
    unknown = np.full(len(next(iter(columns.values()))), np.nan)
    return np.stack([columns.get(name, unknown) for name in STEP_FEATURES], axis=1, dtype=float, casting="unsafe")


def summary_features(steps: Cells) -> Floats:
    """Raw features of steps by their summaries.

    Decode tokens beyond one a request are recomputed after a preemption: prefill work.
    """
    single, pairs = steps["context_tokens_single"], steps["attention_pairs"]
    recomputed = np.maximum(steps["decode_tokens"] - steps["decode_requests"], 0)
    same = ("prefill_requests", "decode_requests", "running", "waiting", "preempted", "finished", "kv_usage_ratio")
    return raw_features(
        {
            "prefill_tokens": steps["prefill_tokens"] + recomputed,
            "decode_tokens": steps["decode_requests"],
            "decode_context_tokens": np.where(single == MISSING, np.nan, single),
            "prefill_attention": np.where(pairs == MISSING, np.nan, pairs - single),
            "requests": steps["prefill_requests"] + steps["decode_requests"],
            "kv_blocks_used": steps["kv_blocks_total"] - steps["kv_blocks_free"],
            **{name: steps[name] for name in same},
        }
    )


def schedule_block(view: StepView, raw: Floats, steps: slice, *, engine: int, quality: Quality) -> RowBlock:
    """How long scheduling took in each of some steps of a view that has a summary and tokens; ``raw`` (m, r)."""
    timed = steps.start + np.flatnonzero(view.seen[steps] & (view.steps["scheduled_tokens"][steps] > 0))
    schedule_us, ends_ns = view.steps["duration_us"][timed].astype(float), view.steps["unix_ns"][timed]
    return RowBlock.of_lines(raw.take(timed, axis=0), schedule_us, end_ns=ends_ns, engine=engine, quality=quality)


def row_block(
    view: StepView,
    raw: Floats,
    stamps: Stamps,
    known: Mask,
    counts: Counts,
    *,
    engine: int,
    quality: Quality,
    row_steps_max: int,
) -> RowBlock:
    """Rows between consecutive stamps; those that cannot be learned are counted by the first reason.

    Args:
        view: m steps that the stamps index.
        raw: their features, shape (m, r).
        stamps: two boundaries or more.
        known: steps that have a summary, or of which journeys tell enough, shape (m,).
        counts: where what is left out is counted.
        engine: the number that rows bear.
        quality: of rows of which each step has a summary.
        row_steps_max: more steps make no row.
    """
    here, offsets = stamps.covered, stamps.step - stamps.step[0]
    starts = offsets[:-1]
    keep = np.ones(len(starts), bool)
    for reason, dropped in (
        (RowDrop.INCOMPLETE, np.logical_or.reduceat(~known[here], starts)),
        (RowDrop.IDLE, np.logical_or.reduceat(view.empty[here], starts)),
        (RowDrop.TIME_ORDER, stamps.elapsed_ns < 0),  # of none at all the learner says that the clock is too coarse
        (RowDrop.TOO_LONG, np.diff(offsets) > row_steps_max),
    ):
        counts[table.DROPPED_ROWS, reason] += int(np.count_nonzero(dropped & keep))
        keep &= ~dropped
    whole = np.logical_and.reduceat(view.seen[here], starts)
    phase = np.zeros((len(offsets), len(PHASES)))
    phase[stamps.kind == SCHEDULED, SCHEDULED] = 1.0
    if quality is not Quality.JOURNEYS:  # without start stamps ``completed`` is the reference: else rank-deficient
        phase[stamps.kind == COMPLETED, COMPLETED] = 1.0
    block = replace(
        RowBlock.of_lines(
            raw[here], stamps.elapsed_ns / 1e3, end_ns=stamps.unix_ns[1:].astype(np.int64), engine=engine
        ),
        offsets=offsets,
        phase=np.diff(phase, axis=0),
        quality=np.where(whole, int(min(quality, Quality.STEPS)), int(max(quality, Quality.SAMPLED))),
    )
    return block if keep.all() else block.take(keep)


@dataclass(slots=True)
class WarmUp:
    """Holds rows until the pace of the engine is known, then passes them through."""

    rows_min: int
    over: bool = False
    spans_unix_ns: list[tuple[int, int]] = field(default_factory=list)
    _held: list[RowBlock] = field(default_factory=list)

    def pass_through(self, rows: list[RowBlock], counts: Counts, *, flush: bool) -> RowBlock:
        """Return the rows to learn now, none during warm-up; dropped rows are counted."""
        self._held += rows
        if not self._held or not (self.over or flush or sum(map(len, self._held)) >= self.rows_min):
            return RowBlock.empty(STEP_FEATURES)
        block, self._held = RowBlock.concatenate(self._held), []
        was_over, self.over = self.over, True
        if was_over or not len(block):
            return block
        pace_us = block.elapsed_us / block.steps
        compiling = (block.elapsed_us > _LONG_US) & (pace_us > _LONG_RATIO * median_of(pace_us))
        compiling[_FIRST_ROWS:] = False
        for end_ns, elapsed_us in zip(block.end_ns[compiling], block.elapsed_us[compiling], strict=True):
            self.spans_unix_ns.append((max(int(end_ns - elapsed_us * 1e3), 0), int(end_ns)))
        counts[table.DROPPED_ROWS, RowDrop.WARM_UP] += len(self.spans_unix_ns)
        return block.take(~compiling)

    def spanned(self, start_unix_ns: int, end_unix_ns: int) -> bool:
        """Whether a request ran through a dropped row."""
        return any(start < end_unix_ns and end > start_unix_ns for start, end in self.spans_unix_ns)
