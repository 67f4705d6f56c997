"""The step time of a configuration by its data sheet, by overheads that models share, and by its own evidence.

With W = weight bytes / B (mixtures: the experts that 64 tokens touch), kv = KV bytes of a token / B, pair = attention
FLOPs of a query-key pair / F, L layers, C = max_num_batched_tokens, tok = matrix FLOPs of a token / F, link = what two
all-reduces a layer move for a token / one direction of the link, in microseconds, and over = L (lay + ar [tp > 1] +
moe [experts]), the coefficients of ``portable`` are

    intercept = W + over                             never below W
    prefill_tokens = q (C tok / 0.62 - W) / C        what computing costs beyond reading the weights
    decode_context_tokens = kv + g pair              never below kv
    requests = link + d                              never below link

Bandwidth terms are the sheet's, with coefficient 1. theta = (lay, ar, g, d, moe) >= 0 are overheads that models on one
kind of GPU share: launches of a layer, the latency of its all-reduces, the attention kernel's distance from peak,
bookkeeping per request, dispatch to experts. q belongs to one configuration, 1 +- 0.5.

    beta = base + M theta          base (4,), M (4, 6) over (lay, ar, g, d, moe, q)
    theta = argmin (theta' A theta - 2 b' theta) / 2 + sum_j (theta_j - mu_j)^2 / (2 s_j^2),  theta >= 0
    V = M (A + S^-2)^-1 M'         se_j = sqrt V_jj

mu and s are of the population (online/transfer/pool.py), A and b the capped evidence (online/transfer/evidence.py).
The estimate is there from the first second (A = 0). Later it is published in place of the learner's own coefficients
where these cannot tell context from requests or prefill (vif > 10), and before there are 64 rows, unless the rows
contradict it: the machine is not what the sheet says then, and the own fit stands.

Where telemetry hides prefix hits, prefill keeps the sheet's price: tokens are told that were not computed. Fewer than
64 rows that tell all columns apart (vif <= 10) do price it, as their own fit would.

References: Williams, Waterman and Patterson, Roofline (CACM 2009); docs/systems.md, source 2.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from online.blocks import Design
from online.constants import GEMM_EFFICIENCY, TENTH
from online.features import Facts, portable
from online.features.sheets import sheet_of
from online.features.systems import PORTABLE
from online.rls import IDENTIFIED_ERROR, VIF_MAX, RlsLearner, contradicted, solve
from online.rows import Floats, Mask, Target
from online.snapshot import FeatureSnapshot, IntervalSnapshot, ModelSnapshot, Reason, TargetSnapshot

from .evidence import COLUMNS, MISFIT, PREFILL, Evidence, evidence_of, evidence_of_held

HYPER_MEAN = np.array([50.0, 12.0, 20.0, 5.0, 20.0, 1.0])
HYPER_SD = np.array([30.0, 8.0, 20.0, 8.0, 20.0, 0.5])
"""Of theta and q before any donor: microseconds per layer and request, and g as a share of peak."""
SHARED = len(HYPER_MEAN) - 1
"""Overheads in theta; q follows them."""
HIDES_HITS = "prefix_hits_hidden"
"""A fact: the telemetry counts tokens of cached prefixes as prefilled."""

_COLUMNS = portable(Target.STEP_TIME).columns
_LAY, _AR, _G, _D, _MOE, _Q = np.eye(SHARED + 1)
# Guess: of a step in decode, and vLLM's default of max_num_batched_tokens where none is told.
_TYPICAL_TOKENS, _CHUNK_TOKENS = 64.0, 2048.0
# Format: of data sheets.
_DIRECTIONS = 2.0
"""A maker's figure for a link counts both; an all-reduce fills each by itself."""
# Guess: rows count as more than a prior where they halve its error.
_KNOWN = 0.5
# Guess: rows of a fit that stands alone, and passes over held rows.
_ENOUGH_ROWS, _PASSES = 64, 2
_TYPICAL = np.array([1.0, 0.0, 32_000.0, 32.0])
# Guard: an interval stays finite.
_WIDE_MAX = 2.3
"""Log of a factor of ten, above which an interval says nothing."""


@dataclass(frozen=True, slots=True)
class SheetTerms:
    """base (4,) and M (4, 6) of one configuration; ``hides_hits``: its prefill tokens count cached prefixes as well."""

    base: Floats
    matrix: Floats
    hides_hits: bool = False

    @property
    def has(self) -> Mask:
        """Mask of the overheads, and of q, that apply: no all-reduce on one GPU, no dispatch in a dense model; (6,)."""
        return np.asarray(self.matrix.any(axis=0), np.bool_)

    def beta(self, theta: Floats) -> Floats:
        """Coefficients of ``portable``, (4,), by theta and q, (6,)."""
        beta: Floats = self.base + self.matrix @ theta
        return beta


def terms_of(facts: Facts) -> SheetTerms | None:
    """Terms of a configuration's data sheet; None without one."""
    sheet, _ = sheet_of(facts)
    if sheet is None:
        return None
    weights_us = float(sheet.weight_us(np.array([_TYPICAL_TOKENS]))[0])
    chunk = sheet.max_batched_tokens or _CHUNK_TOKENS
    prefill_us = max(chunk * sheet.token_us / GEMM_EFFICIENCY - weights_us, 0.0) / chunk
    base = np.array([weights_us, 0.0, sheet.kv_token_us, _DIRECTIONS * (sheet.all_reduce_us or 0.0)])
    overheads = sheet.model.layers * (_LAY + _AR * (sheet.tp > 1) + _MOE * sheet.model.moe)
    matrix = np.array([overheads, prefill_us * _Q, sheet.pair_us * _G, _D])
    return SheetTerms(base, matrix, hides_hits=facts.get(HIDES_HITS) is True)


@dataclass(frozen=True, slots=True)
class Population:
    """Overheads as models share them, and q: mean (6,) and sd (6,) of one more model's."""

    mean: Floats
    sd: Floats


class Estimate(NamedTuple):
    """theta and q, (6,), and their covariance (6, 6)."""

    theta: Floats
    covariance: Floats


def estimate(terms: SheetTerms, evidence: Evidence | None, prior: Population) -> Estimate:
    """Theta and q of a configuration by its evidence and a prior; without evidence the prior itself."""
    has, m = terms.has, terms.matrix
    mean = np.where(has, prior.mean, 0.0)
    if evidence is None:
        return Estimate(mean, np.diag(np.where(has, prior.sd**2, 0.0)))
    precision = np.where(has, prior.sd**-2.0, 1.0)
    a, b = m.T @ evidence.a @ m, m.T @ (evidence.b - evidence.a @ terms.base)
    none = np.zeros(len(has), np.bool_)
    theta = solve(a, b, none, ~none, prior_precision=precision, prior_mean=mean).beta
    return Estimate(theta, np.linalg.inv(a + np.diag(precision)) * np.outer(has, has))


class SheetEstimate(NamedTuple):
    """beta (4,), the covariance of its errors (4, 4), status and reason of each coefficient.

    ``spread``: relative sd of a step of 32 requests of 1,000 tokens.

    A coefficient is ``prior_only`` where the sd by its rows alone, sqrt (A^-1)_jj, is more than half the prior's;
    ``weak`` where it is less, but vif > 10 or the error is more than 20 %; else ``identified``.
    """

    beta: Floats
    covariance: Floats
    status: tuple[str, ...]
    reason: tuple[Reason | None, ...]
    spread: float

    def model(self, learned: ModelSnapshot) -> ModelSnapshot:
        """The model as published, in place of what was learned."""
        own, features = {feature.name: feature for feature in learned.features}, []
        stderr = np.sqrt(np.maximum(self.covariance.diagonal(), 0.0)).tolist()
        for j, column in enumerate(_COLUMNS):
            fresh = FeatureSnapshot(name=column.name, unit=column.unit, coefficient=0.0, status="")
            here = msgspec.structs.replace(
                own.get(column.name, fresh),
                coefficient=float(self.beta[j]),
                stderr=stderr[j],
                status=self.status[j],
                reason=self.reason[j],
            )
            features.append(here)
        return msgspec.structs.replace(learned, features=features, covariance=self.covariance.tolist())

    def interval(self) -> IntervalSnapshot:
        """Band of observed / predicted before the first row."""
        wide = min(TENTH * float(np.hypot(self.spread, MISFIT)), _WIDE_MAX)
        return IntervalSnapshot(p10=float(np.exp(-wide)), p50=1.0, p90=float(np.exp(wide)))


class SheetPrior:
    """Prior of one configuration: its sheet, the population, and ``known``, the evidence of a donor of its identity."""

    def __init__(self, terms: SheetTerms, population: Population, known: Evidence | None = None) -> None:
        self.terms, self._population, self._known = terms, population, known

    def before(self) -> SheetEstimate:
        """The estimate before the first row."""
        return self._published(None, np.ones(COLUMNS))

    def target_before(self, feature_sets: Collection[str]) -> TargetSnapshot | None:
        """The step time before the first row; None where ``portable`` is not among the sets that are learned."""
        if PORTABLE.name not in feature_sets:
            return None
        told, none = self.before(), ModelSnapshot(features=[], rows=0, effective_rows=0.0)
        models = {PORTABLE.name: told.model(none)}
        return TargetSnapshot(vector="beta", unit="us", champion=PORTABLE.name, models=models, interval=told.interval())

    def after(self, learner: RlsLearner) -> SheetEstimate | None:
        """The estimate to publish in place of what was learned; None where that stands on its own."""
        if not learner.started:
            return self.before()
        vif, held = np.nan_to_num(learner.diagnosis().vif[:COLUMNS], nan=np.inf), learner.held
        asked = vif[np.arange(COLUMNS) != PREFILL] if self.terms.hides_hits else vif
        if asked.max() <= VIF_MAX and (held is None or len(held) >= _ENOUGH_ROWS):
            return None
        hidden = self.terms.hides_hits and not vif.max() <= VIF_MAX
        evidence = evidence_of(learner, hidden=hidden)
        if evidence is None and held is not None:
            evidence = self._evidence_of_held(held, hidden=hidden)
        if evidence is None:
            return None
        published = self._published(evidence, vif)
        own = evidence.misfit(learner.fit.beta[:COLUMNS])
        return None if contradicted(evidence.misfit(published.beta), own) else published

    def _evidence_of_held(self, held: Design, *, hidden: bool) -> Evidence:
        """Evidence of rows without weights, weighed by what is expected, which they move."""
        expected, evidence = self._estimate(None), None
        for _ in range(_PASSES):
            evidence = evidence_of_held(held, *self._of_columns(expected), hidden=hidden)
            expected = self._estimate(evidence)
        assert evidence is not None  # noqa: S101  there is at least one pass
        return evidence

    def _estimate(self, evidence: Evidence | None) -> Estimate:
        whole = self._known if evidence is None else evidence.plus(self._known)
        return estimate(self.terms, whole, self._population)

    def _of_columns(self, found: Estimate) -> tuple[Floats, Floats]:
        """Beta (4,) and its covariance (4, 4)."""
        return self.terms.beta(found.theta), self.terms.matrix @ found.covariance @ self.terms.matrix.T

    def _published(self, evidence: Evidence | None, vif: Floats) -> SheetEstimate:
        beta, covariance = self._of_columns(self._estimate(evidence))
        stderr = np.sqrt(np.maximum(covariance.diagonal(), 0.0))
        known = _KNOWN * np.sqrt(self.terms.matrix**2 @ np.where(self.terms.has, self._population.sd, 0.0) ** 2)
        alone = np.full(COLUMNS, np.inf) if evidence is None else _alone(evidence.a)
        status, reason = [], []
        for j, sure in enumerate((stderr < IDENTIFIED_ERROR * beta).tolist()):
            prior = not alone[j] < known[j]
            weak = None if prior else Reason.COLLINEAR if vif[j] > VIF_MAX else None if sure else Reason.WIDE
            status.append("prior_only" if prior else "weak" if weak else "identified")
            reason.append(weak)
        spread = math.sqrt(max(float(_TYPICAL @ covariance @ _TYPICAL), 0.0)) / float(_TYPICAL @ beta)
        return SheetEstimate(beta, covariance, tuple(status), tuple(reason), spread)


def _alone(a: Floats) -> Floats:
    """Standard errors by the rows alone, (4,); infinite where they say nothing."""
    scale = 1.0 / np.sqrt(np.where(a.diagonal() > 0.0, a.diagonal(), 1.0))
    inverse = np.linalg.inv(a * scale * scale[:, None] + 1e-12 * np.eye(len(a)))
    alone: Floats = np.sqrt(inverse.diagonal()) * scale
    return np.where(a.diagonal() > 0.0, alone, np.inf)
