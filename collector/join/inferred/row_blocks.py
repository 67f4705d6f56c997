"""From steps to rows: boundaries, features, blocks.

Stamps at step boundaries, and the intervals between them.

Boundary b is the moment step b starts to execute. What is stamped there (wire contract §5.4, §5.6):

    kind        synchronous            asynchronous
    start       ts_start(b)            ts_start(b + 1), if step b has tokens     reference, no phase
    completed   end stamps of b - 1    end stamps of b - 1                       reference where there is no start stamp
    scheduled   SCHEDULED of b         SCHEDULED of b + 1, as start

Each boundary keeps its best stamp; rows run between consecutive stamped boundaries, so every step is learned once.

Raw features of consecutive steps, from whatever describes them best.

A step with a summary takes everything from it but the decode context, which a summary does not carry: that comes from
the source decided for the engine (exact attributes, journeys, KV blocks). A step without a summary is rebuilt from
journeys: so are the requests that run in it, and how full their contexts leave the cache, where its size is known. What
is not known is NaN; nothing is interpolated.

From stamped boundaries to rows: features summed between stamps, and the intervals that give none.


Tokens per KV block, and the share of the cache that tokens fill, are running ratios of one engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.decode import MISSING, StepColumns
from collector.join.window import Cells
from collector.telemetry import Counts, RowDrop, table
from online import PHASES, STEP_FEATURES, Floats, Ints, Mask, Quality, RowBlock


@dataclass(slots=True)
class BlockRatio:
    """Context tokens per KV block in use: the running ratio where the context is exact, else a fact (block size).

    ``context_tokens``, ``blocks`` and ``usage`` (of the whole cache) are sums over the same steps.
    """

    fact_tokens: float | None = None
    event_tokens: float = 0.0
    """``BlockStored.block_size``, for steps from ``event_from_unix_ns`` on; 0 while there is none."""
    event_from_unix_ns: int = 0
    context_tokens: float = 0.0
    blocks: float = 0.0
    usage: float = 0.0
    fact_blocks: float | None = None
    """Blocks of the whole cache."""

    def usage_by(self, tokens: Floats) -> Floats:
        """Share of the cache that so many tokens fill, (m,); NaN while nothing is known of its size."""
        if self.usage > 0.0 and self.context_tokens > 0.0:
            per_token = self.usage / self.context_tokens
        elif self.fact_tokens and self.fact_blocks:
            per_token = 1.0 / (self.fact_tokens * self.fact_blocks)
        else:
            return np.full(len(tokens), np.nan)
        return np.asarray(np.clip(tokens * per_token, 0.0, 1.0))

    def estimate(self, steps: StepColumns) -> Floats:
        """Decode context from blocks in use, shape (m,); NaN while nothing is known.

        The last block of a request is half full on average; prompts being prefilled hold blocks too.
        """
        used = (steps["kv_blocks_total"] - steps["kv_blocks_free"]).astype(float)
        if self.blocks > 0:
            tokens = used * (self.context_tokens / self.blocks)
        elif self.fact_tokens is not None or self.event_tokens > 0:
            size = self.fact_tokens or np.where(steps["unix_ns"] >= self.event_from_unix_ns, self.event_tokens, np.nan)
            tokens = (used - (steps["decode_requests"] + steps["prefill_requests"]) / 2) * size
        else:
            return np.full(len(steps), np.nan)
        return np.asarray(np.maximum(tokens - steps["prefill_tokens"], steps["decode_requests"]), float)


START, SCHEDULED, COMPLETED = -1, PHASES.index("scheduled"), PHASES.index("completed")


@dataclass(frozen=True, slots=True)
class Stamps:
    """Stamped boundaries in order: step index (within the columns given), monotonic ns, wall clock ns, kind."""

    step: Ints
    ns: Ints
    unix_ns: Ints
    kind: Ints

    def take(self, chosen: Mask) -> Stamps:
        """The stamps of the chosen boundaries."""
        return Stamps(self.step[chosen], self.ns[chosen], self.unix_ns[chosen], self.kind[chosen])

    @property
    def elapsed_ns(self) -> Ints:
        """From each stamp to the next one, shape (len(step) - 1,)."""
        return np.diff(self.ns)


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
    return Stamps(index + 1, ns[index], unix[index], kind[index])


def phase_columns(kind: Ints, *, has_start: bool) -> Floats:
    """Phase of the rows between consecutive stamps, shape (n - 1, len(PHASES)).

    Without start stamps ``completed`` is the reference: both columns together would be rank-deficient.
    """
    columns = np.zeros((len(kind), len(PHASES)))
    columns[kind == SCHEDULED, SCHEDULED] = 1.0
    if has_start:
        columns[kind == COMPLETED, COMPLETED] = 1.0
    return np.diff(columns, axis=0)


class ContextSource(enum.StrEnum):
    """Where ``decode_context_tokens`` of an engine's summaries comes from."""

    EXACT = "exact"
    JOURNEYS = "journeys"
    BLOCKS = "blocks"


class Rebuilt:
    """Per step, shape (m,): what journeys say, in the summary's way of counting for the engine's scheduling mode.

    Asynchronous summaries count a request's first decode step as a one-token prefill (wire contract §5.6). Nobody has
    to count where summaries say all: each column is made when it is asked for.
    """

    __slots__ = ("_asynchronous", "_cells")

    def __init__(self, cells: Cells, *, asynchronous: bool) -> None:
        self._cells, self._asynchronous = cells, asynchronous

    def _column(self, name: str, firsts: float, first: str = "first_requests") -> Floats:
        column = self._cells[name].astype(float)
        if self._asynchronous:
            column += firsts * self._cells[first]
        return column

    @property
    def prefill_requests(self) -> Floats:
        """Requests of which it prefills some."""
        return self._column("prefill_requests", 1.0)

    @property
    def prefill_tokens(self) -> Floats:
        """Tokens of theirs."""
        return self._column("prefill_tokens", 1.0)

    @property
    def decode_requests(self) -> Floats:
        """Requests that decode a token."""
        return self._column("decode_requests", -1.0)

    @property
    def requests(self) -> Floats:
        """All that run."""
        return self.prefill_requests + self.decode_requests

    @property
    def context_tokens(self) -> Floats:
        """Contexts of those that decode, in sum."""
        return self._column("context_tokens", -1.0, "first_context_tokens")


def complete(steps: Cells, cells: Cells, counts: Rebuilt) -> Mask:
    """Steps whose journeys are all here: rebuilt request counts equal the summary's (no false positive was seen)."""
    return np.asarray(
        cells["seen"]
        & (counts.prefill_requests == steps["prefill_requests"])
        & (counts.decode_requests == steps["decode_requests"])
    )


def snapshot_complete(steps: Cells, cells: Cells) -> Mask:
    """Steps whose request snapshots account for every scheduled token."""
    return np.asarray(
        cells["seen"]
        & (cells["snapshot_tokens"] == steps["scheduled_tokens"])
        & (cells["snapshot_requests"] == steps["decode_requests"])
    )


def step_features(
    steps: Cells,
    cells: Cells,
    counts: Rebuilt,
    *,
    source: ContextSource,
    ratio: BlockRatio,
    hole_scale: float,
    kv_events: bool,
) -> Floats:
    """Raw features, shape (m, len(STEP_FEATURES)); ``hole_scale`` makes up for journeys that are sampled."""
    seen = cells["seen"]
    no_holes = bool(seen.all())

    def told(column: NDArray[Any], rebuilt: Callable[[], Floats | float]) -> Floats:
        """By the summaries, else by journeys, which nobody has to ask where there are no holes."""
        return column.astype(float) if no_holes else np.where(seen, column, rebuilt())

    recomputed = told(
        np.maximum(steps["decode_tokens"] - steps["decode_requests"], 0), lambda: cells["recomputed_tokens"]
    )
    out: dict[str, Floats | float] = {}
    out["prefill_tokens"] = told(steps["prefill_tokens"], lambda: counts.prefill_tokens * hole_scale) + recomputed
    prefilling = told(steps["prefill_requests"], lambda: counts.prefill_requests * hole_scale)
    decoding = told(steps["decode_requests"], lambda: counts.decode_requests * hole_scale)
    out["prefill_requests"], out["decode_requests"], out["decode_tokens"] = prefilling, decoding, decoding
    requests = out["requests"] = prefilling + decoding
    out["decode_context_tokens"] = told(
        _summary_context(steps, cells, counts, source, ratio), lambda: counts.context_tokens * hole_scale
    )
    out["prefill_attention"] = _prefill_attention(steps, cells, counts, source, hole_scale)
    used = steps["kv_blocks_total"] - steps["kv_blocks_free"]
    out["running"] = told(steps["running"], lambda: requests)
    out["kv_usage_ratio"] = told(
        steps["kv_usage_ratio"], lambda: ratio.usage_by((counts.context_tokens + counts.prefill_tokens) * hole_scale)
    )
    for name, column in (
        ("waiting", steps["waiting"]),
        ("preempted", steps["preempted"]),
        ("finished", steps["finished"]),
        ("kv_blocks_used", used),
    ):
        out[name] = told(column, lambda: np.nan)
    if kv_events:
        for name in ("offload_blocks", "restore_blocks", "evicted_blocks"):
            out[name] = cells[name]
    raw = np.empty((len(steps), len(STEP_FEATURES)))
    for number, name in enumerate(STEP_FEATURES):
        raw[:, number] = out.get(name, np.nan)
    return raw


def _summary_context(steps: Cells, cells: Cells, counts: Rebuilt, source: ContextSource, ratio: BlockRatio) -> Floats:
    if source is ContextSource.EXACT:
        single = steps["context_tokens_single"]
        return np.asarray(np.where(single == MISSING, np.nan, single), float)
    estimate = ratio.estimate(steps)
    if source is ContextSource.JOURNEYS:
        estimate = np.where(complete(steps, cells, counts), counts.context_tokens, estimate)
    estimate = np.where(snapshot_complete(steps, cells), cells["snapshot_context_tokens"], estimate)
    return np.where(steps["decode_requests"] == 0, 0.0, estimate)


def _prefill_attention(steps: Cells, cells: Cells, counts: Rebuilt, source: ContextSource, hole_scale: float) -> Floats:
    """Σ t·(c + t/2) over prefills: exact from attention pairs; else rebuilt; unknown where journeys miss a prefill."""
    if source is ContextSource.EXACT:
        pairs = steps["attention_pairs"] - steps["context_tokens_single"]
        return np.where(steps["attention_pairs"] == MISSING, np.nan, pairs).astype(float)
    known = complete(steps, cells, counts) | (steps["prefill_requests"] == 0) | ~cells["seen"]
    scale = np.where(cells["seen"], 1.0, hole_scale)
    return np.where(known, cells["prefill_attention"] * scale, np.nan)


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
        empty = empty_steps(steps, cells, asynchronous=asynchronous)
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


def drops(around: Columns, stamps: Stamps, trust: Trust) -> list[tuple[RowDrop, Mask]]:
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


def _incomplete(around: Columns, here: slice, holes: Mask, stamps: Stamps, trust: Trust) -> Mask:
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
    stamps: Stamps,
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
        phase=phase_columns(stamps.kind, has_start=has_summaries),
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
