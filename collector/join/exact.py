"""Rows of an engine process that tells every step exactly: our producer plugin (``steps+``).

A summary has the contexts of the requests that ran and when the step was done, so nothing has to be rebuilt. In the
order of step ids,

    y(n) = done(n) - done(n - 1)            if step n - 1 had tokens
    y(n) = done(n) - start(n)               if it had none: the engine was idle until step n began

with no lag in either scheduling mode. An engine that has nothing to do makes an empty step and waits. Where that step
is not in the telemetry, step n began late by what no step took:

    idle(n) = max(start(n) - done(n - 1), 0)     if nobody waited, nobody decodes in n, and all that ran before have
                                                 ended, or no prompt of theirs can go on in n

Steps up to the watermark, ``allowed_lateness_s`` behind the newest event, give their rows; a step that is missing by
then and the one behind it give none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from collector.decode import MISSING
from collector.telemetry import Counts, JoinEvent, RowDrop, table
from online import PHASES, STEP_FEATURES, Floats, Ints, Mask, Quality, RowBlock

from .window import Cells, StepWindow

_KV_COLUMNS = ("offload_blocks", "restore_blocks", "evicted_blocks")
_VOTES_MIN = 8
"""Steps behind each other that tell how an engine schedules; fewer may all stand next to an idle moment."""


@dataclass(slots=True)
class Advance:
    """What moving on gave: rows by target, in order."""

    rows: list[RowBlock] = field(default_factory=list)
    schedule_rows: list[RowBlock] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def final_stop(window: StepWindow, first: int, watermark_unix_ns: int) -> int:
    """One past the last step, from ``first`` on, before which nothing can still come: all up to the watermark."""
    steps, cells = window.columns(first, window.newest_step + 1)
    young = np.flatnonzero(cells["seen"] & (steps["unix_ns"] > watermark_unix_ns))
    old = np.flatnonzero(cells["seen"][: young[0]] if len(young) else cells["seen"])
    return first + int(old[-1]) + 1 if len(old) else first


@dataclass(frozen=True, slots=True)
class DoneStamps:
    """Boundaries at which a step was done: index of the step that begins, monotonic ns, wall clock ns, idle time."""

    step: Ints
    ns: Ints
    unix_ns: Ints
    idle_ns: Ints


def done_stamps(steps: Cells, cells: Cells) -> DoneStamps:
    """The boundaries 1..m-2 that m consecutive steps stamp (the edges lack a neighbour)."""
    at, before = slice(1, len(steps) - 1), slice(0, len(steps) - 2)
    seen, empty = cells["seen"], steps["scheduled_tokens"] == 0
    wall_offset = steps["unix_ns"] - steps["ts_end_ns"]
    busy = seen[before] & ~empty[before] & (steps["ts_done_ns"][before] > 0)
    begins = seen[before] & empty[before] & seen[at]
    ns = np.where(busy, steps["ts_done_ns"][before], steps["ts_start_ns"][at])
    unix_ns = ns + np.where(busy, wall_offset[before], wall_offset[at])
    resumed = busy & seen[at] & ~empty[at] & _resumed(steps[at], steps[before])
    idle_ns = np.where(resumed, np.maximum(steps["ts_start_ns"][at] - ns, 0), 0)
    index = np.flatnonzero(busy | begins)
    return DoneStamps(index + 1, ns[index], unix_ns[index], idle_ns[index])


def _resumed(steps: Cells, before: Cells) -> Mask:
    """Steps that find nothing left of the step before them, so that the engine may have been idle."""
    tokens = steps["prefill_tokens"].astype(np.int64)
    prompts_begin = (steps["attention_pairs"] > 0) & (2 * steps["attention_pairs"] <= tokens * (tokens + 1))
    nobody_left = (before["running"] <= steps["finished"]) | (before["prefill_requests"] == 0) | prompts_begin
    return np.asarray(nobody_left & (steps["decode_requests"] == 0) & (before["waiting"] == 0))


def step_features(steps: Cells, cells: Cells | None) -> Floats:
    """Raw features, shape (m, len(STEP_FEATURES)); ``cells`` have the block columns where KV events are known."""
    raw = np.full((len(steps), len(STEP_FEATURES)), np.nan)
    single, pairs = steps["context_tokens_single"], steps["attention_pairs"]
    columns = {
        "prefill_tokens": steps["prefill_tokens"] + np.maximum(steps["decode_tokens"] - steps["decode_requests"], 0),
        "prefill_requests": steps["prefill_requests"],
        "prefill_attention": np.where(pairs == MISSING, np.nan, pairs - single),
        "decode_requests": steps["decode_requests"],
        "decode_tokens": steps["decode_requests"],
        "decode_context_tokens": np.where(single == MISSING, np.nan, single),
        "requests": steps["prefill_requests"] + steps["decode_requests"],
        "kv_blocks_used": steps["kv_blocks_total"] - steps["kv_blocks_free"],
        **{name: steps[name] for name in ("running", "waiting", "preempted", "finished", "kv_usage_ratio")},
        **({name: cells[name] for name in _KV_COLUMNS} if cells is not None else {}),
    }
    for number, name in enumerate(STEP_FEATURES):
        if name in columns:
            raw[:, number] = columns[name]
    return raw


def add_rows(out: Advance, steps: Cells, cells: Cells, stamps: DoneStamps, *, engine: int, with_kv: bool) -> None:
    """Rows of the steps between the first and the last of these stamps, and why the others give none."""
    low, high = int(stamps.step[0]), int(stamps.step[-1])
    covered, seen = steps[low:high], cells["seen"][low:high]
    timed = np.flatnonzero(seen & (covered["scheduled_tokens"] > 0))
    raw = step_features(covered[timed], cells[low:high][timed] if with_kv else None)
    out.schedule_rows.append(
        RowBlock.of_lines(
            raw,
            covered["duration_us"][timed].astype(float),
            end_ns=covered["unix_ns"][timed],
            engine=engine,
            quality=Quality.STEPS_PLUS,
        )
    )
    elapsed_ns = np.diff(stamps.ns) - stamps.idle_ns[:-1]
    incomplete = np.diff(stamps.step) > 1
    idle = ~incomplete & (covered["scheduled_tokens"][stamps.step[:-1] - low] == 0)
    backwards = ~incomplete & ~idle & (elapsed_ns < 0)
    for reason, mask in ((RowDrop.INCOMPLETE, incomplete), (RowDrop.IDLE, idle), (RowDrop.TIME_ORDER, backwards)):
        out.counts[table.DROPPED_ROWS, reason] += int(np.count_nonzero(mask))
    kept = np.flatnonzero(~(incomplete | idle | backwards))
    lines = np.searchsorted(timed, stamps.step[kept] - low)
    out.rows.append(
        RowBlock(
            raw=raw if len(lines) == len(raw) else raw[lines],
            offsets=np.arange(len(kept) + 1),
            elapsed_us=elapsed_ns[kept] / 1e3,
            phase=np.zeros((len(kept), len(PHASES))),
            weight=np.ones(len(kept)),
            end_ns=stamps.unix_ns[1:][kept].astype(np.int64),
            engine=np.full(len(kept), engine, np.int64),
            quality=np.full(len(kept), int(Quality.STEPS_PLUS), np.int64),
        )
    )


def overlaps(steps: Cells, cells: Cells) -> bool | None:
    """Whether an engine schedules a step while the one before it runs; None where these steps are too few to tell."""
    behind = cells["seen"][:-1] & cells["seen"][1:] & (steps["scheduled_tokens"][:-1] > 0)
    behind &= (steps["scheduled_tokens"][1:] > 0) & (steps["ts_done_ns"][:-1] > 0)
    pairs = np.count_nonzero(behind)
    early = np.count_nonzero(behind & (steps["ts_start_ns"][1:] < steps["ts_done_ns"][:-1]))
    return None if pairs < _VOTES_MIN else bool(2 * early > pairs)


def missing_steps(window: StepWindow, first: int, stop: int) -> Counts:
    """Steps of first..stop-1 whose summary never came, and those with speculated tokens."""
    counts = Counts()
    _, cells = window.columns(first, min(stop, window.newest_step + 1))
    counts[table.JOIN_EVENTS, JoinEvent.STEP_MISSING] += int(np.count_nonzero(~cells["seen"]))
    counts[table.JOIN_EVENTS, JoinEvent.SPECULATIVE_STEP] += window.speculative_steps(first, stop)
    return counts
