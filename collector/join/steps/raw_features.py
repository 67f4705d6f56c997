"""Raw features of consecutive steps, from whatever describes them best.

A step with a summary takes everything from it but the decode context, which a summary does not carry: that comes from
the source decided for the engine (exact attributes, journeys, KV blocks). A step without a summary is rebuilt from
journeys: so are the requests that run in it, and how full their contexts leave the cache, where its size is known. What
is not known is NaN; nothing is interpolated.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.decode import MISSING
from collector.join.block_ratio import BlockRatio
from collector.join.window import Cells
from online import STEP_FEATURES, Floats, Mask


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
