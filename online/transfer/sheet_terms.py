"""What a data sheet says of the step time in the columns of ``portable``, and what it leaves open.

With W = weight bytes / B (mixtures: the experts that 64 tokens touch), kv = KV bytes of a token / B, pair = attention
FLOPs of a query-key pair / F, L layers, C = max_num_batched_tokens, tok = matrix FLOPs of a token / F, link = what two
all-reduces a layer move for a token / one direction of the link, in microseconds:

    intercept      = W + L (lay + ar [tp > 1] + moe [experts])      never below W
    prefill_tokens = q (C tok / 0.62 - W) / C                       what computing costs beyond reading the weights
    decode_context = kv + g pair                                    never below kv
    requests       = link + d                                       never below link

Bandwidth terms are the sheet's, with coefficient 1. theta = (lay, ar, g, d, moe) >= 0 are overheads that models on one
kind of GPU share: launches of a layer, the latency of its all-reduces, the attention kernel's distance from peak,
bookkeeping per request, dispatch to experts. q belongs to one configuration, 1 +- 0.5.

    beta = base + M theta          base (4,), M (4, 6) over (lay, ar, g, d, moe, q)

Reference: Williams, Waterman and Patterson, Roofline (CACM 2009); docs/learning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from online.features import Facts
from online.features.sheets import Sheet, sheet_of
from online.rows import Floats, Mask

OVERHEADS = ("lay", "ar", "g", "d", "moe")
SHARED = len(OVERHEADS)
HYPER_MEAN = np.array([50.0, 12.0, 20.0, 5.0, 20.0])
HYPER_SD = np.array([30.0, 8.0, 20.0, 8.0, 20.0])
"""Of theta before any donor: microseconds per layer and request, and g as a share of peak."""

PREFILL_SD = 0.5
"""Of q."""
_GEMM_EFFICIENCY = 0.62
_TYPICAL_TOKENS = 64.0
_CHUNK_TOKENS = 2048.0
_DIRECTIONS = 2.0
"""A maker's figure for a link counts both; an all-reduce fills each by itself."""
_INTERCEPT, _PREFILL, _CONTEXT, _REQUESTS = range(4)


@dataclass(frozen=True, slots=True)
class SheetTerms:
    """base (4,) and M (4, 6) of one configuration; ``hides_hits``: its prefill tokens count cached prefixes as well."""

    base: Floats
    matrix: Floats
    hides_hits: bool = False

    @property
    def has(self) -> Mask:
        """Which of theta and q this configuration has, (6,)."""
        return np.asarray(self.matrix.any(axis=0), np.bool_)

    def beta(self, theta: Floats) -> Floats:
        """Coefficients of ``portable``, (4,), by theta and q, (6,)."""
        beta: Floats = self.base + self.matrix @ theta
        return beta


HIDES_HITS = "prefix_hits_hidden"
"""A fact: the telemetry counts tokens of cached prefixes as prefilled."""


def terms_of(facts: Facts) -> SheetTerms | None:
    """What the sheet of a configuration says; None without one."""
    sheet, _ = sheet_of(facts)
    return None if sheet is None else _terms(sheet, hides_hits=facts.get(HIDES_HITS) is True)


def _terms(sheet: Sheet, *, hides_hits: bool) -> SheetTerms:
    weights_us = float(sheet.weight_us(np.array([_TYPICAL_TOKENS]))[0])
    layers = float(sheet.model.layers)
    chunk = sheet.max_batched_tokens or _CHUNK_TOKENS
    base, matrix = np.zeros(4), np.zeros((4, SHARED + 1))
    base[_INTERCEPT], base[_CONTEXT] = weights_us, sheet.kv_token_us
    base[_REQUESTS] = _DIRECTIONS * (sheet.all_reduce_us or 0.0)
    matrix[_INTERCEPT, :SHARED] = layers, layers * (sheet.tp > 1), 0.0, 0.0, layers * sheet.model.moe
    matrix[_CONTEXT, 2], matrix[_REQUESTS, 3] = sheet.pair_us, 1.0
    matrix[_PREFILL, SHARED] = max(chunk * sheet.token_us / _GEMM_EFFICIENCY - weights_us, 0.0) / chunk
    return SheetTerms(base, matrix, hides_hits)


@dataclass(frozen=True, slots=True)
class Population:
    """Overheads as models share them: mean (5,) and sd (5,) of one more model's, and how many models said so."""

    mean: Floats
    sd: Floats
    donors: int = 0

    def mean_of_all(self) -> Floats:
        """With q, (6,)."""
        return np.append(self.mean, 1.0)

    def sd_of_all(self) -> Floats:
        """With q, (6,)."""
        return np.append(self.sd, PREFILL_SD)


def nobody() -> Population:
    """Before any donor."""
    return Population(HYPER_MEAN.copy(), HYPER_SD.copy())
