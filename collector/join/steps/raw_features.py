"""Raw features of consecutive steps, from whatever describes them best.

A step with a summary takes everything from it but the decode context, which a summary does not carry: that comes from
the source decided for the engine (exact attributes, journeys, KV blocks). A step without a summary is rebuilt from
journeys: so are the requests that run in it, and how full their contexts leave the cache, where its size is known. What
is not known is NaN; nothing is interpolated.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.decode import MISSING
from collector.join.block_ratio import BlockRatio
from collector.join.window import Cells
from online import STEP_FEATURES, Floats, Ints, Mask


class ContextSource(enum.StrEnum):
    """Where ``decode_context_tokens`` of an engine's summaries comes from."""

    EXACT = "exact"
    JOURNEYS = "journeys"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Per step, shape (m,): what journeys say, in the summary's way of counting for the engine's scheduling mode."""

    prefill_requests: Floats
    prefill_tokens: Floats
    decode_requests: Floats
    decode_tokens: Floats
    context_tokens: Floats

    def take(self, index: Ints) -> Rebuilt:
        """The same counts for the chosen steps only."""
        return Rebuilt(
            self.prefill_requests[index],
            self.prefill_tokens[index],
            self.decode_requests[index],
            self.decode_tokens[index],
            self.context_tokens[index],
        )

    def cut(self, here: slice) -> Rebuilt:
        """A run of these steps, as views."""
        return Rebuilt(
            self.prefill_requests[here],
            self.prefill_tokens[here],
            self.decode_requests[here],
            self.decode_tokens[here],
            self.context_tokens[here],
        )


def rebuilt_counts(cells: Cells, *, asynchronous: bool) -> Rebuilt:
    """Asynchronous summaries count a request's first decode step as a one-token prefill (wire contract §5.6)."""
    first = cells["first_requests"].astype(float) if asynchronous else np.zeros(len(cells))
    return Rebuilt(
        prefill_requests=cells["prefill_requests"] + first,
        prefill_tokens=cells["prefill_tokens"] + first,
        decode_requests=cells["decode_requests"] - first,
        decode_tokens=cells["decode_tokens"] - first,
        context_tokens=cells["context_tokens"] - (cells["first_context_tokens"] if asynchronous else 0.0),
    )


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
