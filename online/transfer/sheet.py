"""The step time of a configuration by its data sheet, by overheads that models share, and by its own evidence.

With W = bytes of the weights that every step reads / B, X = those of all experts / B, kv = KV bytes of a token / B,
pair = attention FLOPs of a query-key pair / F, L layers, C = max_num_batched_tokens, tok = matrix FLOPs of a token / F,
link = what two all-reduces a layer move for a token / one direction of the link, in microseconds, and over = L (lay +
ar [tp > 1] + moe [experts]), the coefficients of ``portable`` are

    intercept = W + over                             never below W
    prefill_tokens = q (C tok / 0.62 - W) / C        what computing costs beyond reading the weights
    decode_context_tokens = kv + g pair              never below kv
    requests = link + d                              never below link
    active_experts = e X                             of mixtures; of these q's formula has W + X in place of W

Bandwidth terms are the sheet's, with coefficient 1. theta = (lay, ar, g, d, moe) >= 0 are overheads that models on one
kind of GPU share: launches of a layer, the latency of its all-reduces, the attention kernel's distance from peak,
bookkeeping per request, dispatch to experts. q and e belong to one configuration, 1 +- 0.5 and
1.25 +- 0.25: experts are read at 80 % of the bandwidth, at 67 to 100 % within one sd.

    beta = base + M theta          base (p,), M (p, 7) over (lay, ar, g, d, moe, q, e)
    theta = argmin (theta' A theta - 2 b' theta) / 2 + sum_j (theta_j - mu_j)^2 / (2 s_j^2),  theta >= 0
    V = M (A + S^-2)^-1 M'         se_j = sqrt V_jj

A and b are the capped evidence. The estimate is there from the first second (A = 0). Later it is published in place of
the learner's own coefficients where these cannot tell context from requests or prefill (vif > 10), and before there are
64 rows, unless the rows contradict it: the machine is not what the sheet says then, and the own fit stands.

**Prior.** mu and s of one more model's overheads, by empirical Bayes over the donors; the hyper-prior without any:

    theta_m, V_m = estimate by A_m, b_m and the prior (mu, tau)         from mu = mu0, tau = 1,000 s0
    mu_j    = precision mean of theta_mj, 1 / tau_j^2 each, and of the hyper-prior mu0_j, 1 / s0_j^2
    tau_j^2 = (sum_m ((theta_mj - mu_j)^2 + V_mj) + (s0_j / 2)^2) / (k_j + 1),   tau_j >= 10 % of mu_j
    s_j^2   = tau_j^2 + var mu_j

Left out of the sums of an overhead are donors that do not have it, and outliers: beyond 3 robust sd of the median, at
least max(10 % of it, s0 / 4). The hyper-prior counts as two donors there: one that is nothing like its sheet does not
outvote it, three alike do. Reference: Efron and Morris, Data analysis using Stein's estimator (JASA 1975).

Where telemetry hides prefix hits, prefill keeps the sheet's price: tokens are told that were not computed. Fewer than
64 rows that tell all columns apart (vif <= 10) do price it, as their own fit would.

References: Williams, Waterman and Patterson, Roofline (CACM 2009); docs/systems.md, source 2.

**Statistics.** What rows say of ``portable``'s coefficients, no surer than the form is right and the machine steady.

    A = W_s (A_s - b_s b_s') summed + B' C B     b = B' C 1     C = (1 + diag(W) K)^-1 diag(W)
    W_s = n_s / ((1 + n_s) sigma^2)              sigma = max(2 %, rms misfit of the points' own fit)
    K_rs = w^2 T / S  exp(-(t_r - t_s)^2 / 2 S^2)                       S^2 = T^2 + d_r^2 + d_s^2

A_s (p, p) and b_s (p,) are relative sums of operating point s, of n_s rows, scaled such that y'Wy = 1; rows of B are
b_s, the mean of a point, and A_s - b_s b_s' is what its rows differ by. A point is one observation of the form, however
many rows it has: where the load never let batch and context vary apart, 30,000 rows move the split of their costs by
0.1 % of a step and misfit by 1 to 3 %, and without the cap they decide it, surely.

The machine's speed wanders. A point that was visited around t_s, give or take d_s, is off by a level of a Gaussian
process in time, N(0, w^2) that forgets as exp(-d^2 / 2 T^2); K is the covariance of the levels. w = 5.2 %, T = 30 s:
levels of half a minute wander by 5 % in the root mean square over seven recordings. So minutes tell how costs compare
better than what they are, and points seen minutes apart do not tell how their costs compare. Without K the first 100
rows of two servers of the H100 tables leave errors of 5.1 and 6.1 % in E2E, with it 1.9 and 1.7 (`make bench
WHAT=systems ARGS=h100`).

Where telemetry hides prefix hits, prefill is left out, since nothing tells how much of it was computed.

Rows that a learner still holds have no weights of their own yet. They are weighed against what is expected, by Tukey's
bisquare with the variance of the expectation: the first requests of a server pay for cold caches and compilation.
Reference: Kennedy and O'Hagan, Bayesian calibration of computer models (JRSS B 2001), the discrepancy term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from online.blocks import Design, median_of
from online.constants import GEMM_EFFICIENCY, LACK_OF_FIT, MAD_TO_SD, SURE_SD, TENTH, TINY, TINY_US, VALUE_MAX
from online.features import PORTABLE, Column, Facts, experts_in, portable, share_touched
from online.features.sheets import sheet_of
from online.rls import IDENTIFIED_ERROR, VIF_MAX, Prior, RlsLearner, bisquare, is_contradicted, points_of, solve
from online.rows import Floats, Mask, Target
from online.snapshot import FeatureSnapshot, IntervalSnapshot, ModelSnapshot, Reason, TargetSnapshot

# Guess: of e the usual share of the sheet's bandwidth (online/features/systems.py, roofline). Chosen: ar on the servers
# of Llama-3.1-70B of tests/bench/bench_silicon.py, which reports on others; the sd of e with one of the H100 tables in
# view (docs/systems.md).
HYPER_MEAN = np.array([50.0, 24.0, 20.0, 5.0, 20.0, 1.0, 1.25])
HYPER_SD = np.array([30.0, 12.0, 20.0, 8.0, 20.0, 0.5, 0.25])
"""Of theta, q and e before any donor: microseconds per layer and request, and g as a share of peak."""
SHARED = len(HYPER_MEAN) - 2
"""Overheads in theta; q and e follow them."""
HIDES_HITS = "prefix_hits_hidden"
"""A fact: the telemetry counts tokens of cached prefixes as prefilled."""
PREFILL = portable(Target.STEP_TIME).names.index("prefill_tokens")

_LAY, _AR, _G, _D, _MOE, _Q, _E = np.eye(len(HYPER_MEAN))
# Guess: rows count as more than what was known before where they halve its error.
_KNOWN = 0.5
# Guess: rows of a fit that stands alone.
_ENOUGH_ROWS = 64
_TYPICAL = {"intercept": 1.0, "decode_context_tokens": 32_000.0, "requests": 32.0}
# Guard: an interval stays finite; beyond a factor of ten it says nothing.
_WIDE_MAX = math.log(10.0)
# Measured: over seven recordings; see the module's head.
_WANDER, _WANDER_S = 0.052, 30.0
# Guard: cost, and a start that is open. Guess: donors vary by 10 % at least.
_ROUNDS, _OPEN, _FLOOR = 20, 1e3, 0.1


@dataclass(frozen=True, slots=True)
class SheetTerms:
    """base (p,) and M (p, 7) of one configuration.

    ``columns`` (p) are those of ``portable``; ``typical`` (p,) is their step of 32 requests of 1,000 tokens.
    ``hides_hits``: its prefill tokens count cached prefixes as well.
    """

    columns: tuple[Column, ...]
    base: Floats
    matrix: Floats
    typical: Floats
    hides_hits: bool = False

    def fits(self, statistics: SufficientStatistics) -> bool:
        """Whether the statistics have as many columns: experts may have become known since."""
        return len(statistics.b) == len(self.base)

    @property
    def has(self) -> Mask:
        """Mask of theta, q and e that apply: no all-reduce on one GPU, no experts in a dense model; (7,)."""
        return np.asarray(self.matrix.any(axis=0), np.bool_)

    def beta(self, theta: Floats) -> Floats:
        """Coefficients of ``portable``, (p,), by theta, q and e, (7,)."""
        beta: Floats = self.base + self.matrix @ theta
        return beta


def terms_of(facts: Facts) -> SheetTerms | None:
    """Terms of a configuration's data sheet; None without one."""
    sheet, _ = sheet_of(facts)
    if sheet is None:
        return None
    experts_us = sheet.model.experts * sheet.expert_us if sheet.model.moe else 0.0
    chunk = sheet.max_batched_tokens or 2048.0  # vLLM's default
    prefill_us = max(chunk * sheet.token_us / GEMM_EFFICIENCY - sheet.dense_weight_us - experts_us, 0.0) / chunk
    # A maker's figure for a link counts both directions; an all-reduce fills each by itself.
    base = np.array([sheet.dense_weight_us, 0.0, sheet.kv_token_us, 2.0 * (sheet.all_reduce_us or 0.0)])
    overheads = sheet.model.layers * (_LAY + _AR * (sheet.tp > 1) + _MOE * sheet.model.moe)
    matrix = np.array([overheads, prefill_us * _Q, sheet.pair_us * _G, _D])
    columns = portable(Target.STEP_TIME, facts).columns
    typical = np.array([_TYPICAL.get(column.name, 0.0) for column in columns])
    if (experts := experts_in(facts)) is not None:
        base, matrix = np.append(base, 0.0), np.vstack([matrix, experts_us * _E])
        typical[-1] = share_touched(*experts, _TYPICAL["requests"])
    return SheetTerms(columns, base, matrix, typical, hides_hits=facts.get(HIDES_HITS) is True)


# ---------------------------------------------------------------------- statistics


@dataclass(frozen=True, slots=True)
class SufficientStatistics:
    """A (p, p) and b (p,); sums of each point over (x, y), (k, p + 1, p + 1), with y'y = 1, and W, (k,)."""

    a: Floats
    b: Floats
    points: Floats
    weight: Floats

    def lack_of_fit(self, beta: Floats) -> float:
        """Root mean square relative error of coefficients (p,) over the points."""
        return _lack_of_fit(self.points, self.weight, beta)


def _lack_of_fit(points: Floats, weight: Floats, beta: Floats) -> float:
    signed = np.append(beta, -1.0)
    squares = np.maximum(np.einsum("i,kij,j->k", signed, points, signed), 0.0)
    return float(np.sqrt(squares @ weight / max(float(weight.sum()), TINY)))


def cap_statistics(sums: Floats, rows: Floats, *, hidden: bool) -> SufficientStatistics:
    """Statistics from sums by point over (x, y, l t), (k, p + 2, p + 2), of rows (k,); ``hidden``: prefix hits are."""
    p = sums.shape[1] - 2
    squares = sums[:, p, p]
    seen = (rows > 1.0 / VALUE_MAX) & (squares > 0.0)
    sums, rows = sums[seen] / squares[seen, None, None], rows[seen]
    if hidden:
        sums[:, PREFILL], sums[:, :, PREFILL] = 0.0, 0.0
    points, known = sums[:, : p + 1, : p + 1], rows / (1.0 + rows)
    total = np.einsum("k,kij->ij", known, points)
    sigma = max(LACK_OF_FIT, _lack_of_fit(points, known, solve(total[:p, :p], total[:p, p]).beta))
    weight, means = known / sigma**2, points[:, p, :p]
    c = np.linalg.solve(np.eye(len(weight)) + weight[:, None] * _levels(sums), np.diag(weight))
    a = np.einsum("k,kij->ij", weight, points[:, :p, :p]) - means.T @ (np.diag(weight) - c) @ means
    return SufficientStatistics(a, means.T @ c.sum(axis=1), points, weight)


def _levels(sums: Floats) -> Floats:
    """K, (k, k), from sums (k, p + 2, p + 2)."""
    steps, time = 0, sums.shape[1] - 1
    weight = np.maximum(sums[:, steps, steps], TINY)
    mean = sums[:, time, steps] / weight
    variance = np.maximum(sums[:, time, time] / weight - mean * mean, 0.0)
    spread = _WANDER_S**2 + variance + variance[:, None]
    levels: Floats = _WANDER**2 * _WANDER_S / np.sqrt(spread) * np.exp(-0.5 * (mean - mean[:, None]) ** 2 / spread)
    return levels


def statistics_of(learner: RlsLearner, *, hidden: bool) -> SufficientStatistics | None:
    """Capped statistics of a learner of ``portable``; None before it has any.

    Phases belong to the stamps of one server: they are taken out at their estimate.
    """
    kept = learner.strata.points
    if kept is None or learner.in_burn_in or not kept.rows.any():
        return None
    visited = kept.rows > 0.0
    p, y = len(learner.features), learner.p
    change = np.zeros((p + 2, y + 2))
    change[:p, :p], change[p:, y:] = np.eye(p), np.eye(2)
    change[p, p:y] = -learner.beta[p:y]
    return cap_statistics(change @ kept.g[visited] @ change.T, kept.rows[visited], hidden=hidden)


def statistics_of_burn_in(
    block: Design, expected: Floats, variance: Floats, *, hidden: bool = False
) -> SufficientStatistics:
    """Capped statistics of rows without weights, weighed by expected coefficients (p,) of covariance (p, p)."""
    p = len(expected)
    x, y = block.x[:, :p].copy(), block.elapsed_us
    if hidden:
        x[:, PREFILL] = 0.0
    prediction = np.maximum(x @ expected, TINY_US)
    spread = np.sqrt(np.einsum("ij,jk,ik->i", x, variance, x)) / prediction
    share = bisquare((y - prediction) / (prediction * np.hypot(LACK_OF_FIT, spread)))
    seconds = 1e-9 * (block.end_ns - block.end_ns[0])
    point, labels = np.unique(points_of(np.column_stack([x, y, block.steps])), return_inverse=True)
    z = np.column_stack([x, y, block.steps * seconds])
    sums, rows = np.zeros((len(point), p + 2, p + 2)), np.zeros(len(point))
    np.add.at(sums, labels, np.einsum("n,ni,nj->nij", block.weight * share / prediction**2, z, z))
    np.add.at(rows, labels, block.weight * share)
    return cap_statistics(sums, rows, hidden=hidden)


# ------------------------------------------------------------------------ estimates


def estimate(terms: SheetTerms, statistics: Sequence[SufficientStatistics], prior: Prior) -> tuple[Floats, Floats]:
    """Theta, q and e, (7,), and their covariance (7, 7), by statistics and a prior; without any the prior itself."""
    has, m = terms.has, terms.matrix
    mean = np.where(has, prior.mean, 0.0)
    if not statistics:
        return mean, np.diag(np.where(has, prior.sd**2, 0.0))
    own_a, own_b = np.sum([each.a for each in statistics], axis=0), np.sum([each.b for each in statistics], axis=0)
    precision = np.where(has, prior.sd**-2.0, 1.0)
    a, b = m.T @ own_a @ m, m.T @ (own_b - own_a @ terms.base)
    theta = solve(a, b, prior_precision=precision, prior_mean=mean).beta
    return theta, np.linalg.inv(a + np.diag(precision)) * np.outer(has, has)


def shared_overheads(donors: Sequence[tuple[SheetTerms, SufficientStatistics]]) -> Prior:
    """The prior of one more model's overheads, (7,); see the module's head. Nobody shares q and e."""
    if not donors:
        return Prior(HYPER_MEAN, HYPER_SD)
    mean, sd, own = HYPER_MEAN, HYPER_SD, np.arange(len(HYPER_MEAN)) >= SHARED
    has = np.array([terms.has for terms, _ in donors]) & ~own
    mu, tau = mean, np.where(own, sd, _OPEN * sd)
    for _ in range(_ROUNDS):
        found = [estimate(terms, [statistics], Prior(mu, tau)) for terms, statistics in donors]
        theta = np.array([theta for theta, _ in found])
        variance = np.array([covariance.diagonal() for _, covariance in found])
        kept = has & ~_outliers(theta, has)
        weight = np.where(kept, tau**-2.0, 0.0)
        mu = ((weight * theta).sum(axis=0) + mean / sd**2) / (weight.sum(axis=0) + sd**-2.0)
        squares = np.where(kept, (theta - mu) ** 2 + variance, 0.0).sum(axis=0) + (sd / 2.0) ** 2
        tau = np.where(own, sd, np.maximum(np.sqrt(squares / (kept.sum(axis=0) + 1)), _FLOOR * mu))
    spread = np.sqrt(tau**2 + 1.0 / (kept.sum(axis=0) / tau**2 + sd**-2.0))
    return Prior(mu, np.where(own, sd, spread))


def _outliers(theta: Floats, has: Mask) -> Mask:
    """Mask of the donors' overheads, (m, 7)."""
    outliers = np.zeros(has.shape, np.bool_)
    for j in np.flatnonzero(has.any(axis=0)).tolist():
        values = np.append(theta[has[:, j], j], [HYPER_MEAN[j]] * 2)
        center = median_of(values)
        spread = max(MAD_TO_SD * median_of(np.abs(values - center)), _FLOOR * center, HYPER_SD[j] / 4.0)
        outliers[:, j] = has[:, j] & (np.abs(theta[:, j] - center) > SURE_SD * spread)
    return outliers


# ----------------------------------------------------------------- what is published


class SheetPrior:
    """Prior of one configuration: its sheet, the overheads of other models, and ``donor``, a donor of its identity."""

    def __init__(self, terms: SheetTerms, prior: Prior, donor: SufficientStatistics | None = None) -> None:
        self.terms, self._prior, self._donor = terms, prior, donor

    def target_before(self) -> TargetSnapshot:
        """The step time before the first row."""
        terms, none = self.terms, ModelSnapshot(features=[], rows=0, effective_rows=0.0)
        model = self._published(None, np.ones(len(terms.base)), none)
        step_us = terms.typical @ [feature.coefficient for feature in model.features]
        spread = math.sqrt(max(float(terms.typical @ model.covariance @ terms.typical), 0.0)) / float(step_us)
        wide = min(TENTH * math.hypot(spread, LACK_OF_FIT), _WIDE_MAX)
        band = IntervalSnapshot(p10=math.exp(-wide), p50=1.0, p90=math.exp(wide))
        return TargetSnapshot(vector="beta", unit="us", champion=PORTABLE, models={PORTABLE: model}, interval=band)

    def fits(self, learner: RlsLearner) -> bool:
        """Whether it has the same columns: a sheet may come after the first rows, and with it the experts."""
        return learner.features.names == tuple(column.name for column in self.terms.columns)

    def after(self, learner: RlsLearner, learned: ModelSnapshot) -> ModelSnapshot | None:
        """The sheet's estimate to publish in place of the learned model; None where that one stands alone."""
        p = len(self.terms.base)
        held = None if learner.burn_in is None else Design.of(learner.features, learner.burn_in)
        vif = np.nan_to_num(learner.infer().vif[:p], nan=np.inf)
        asked = vif[np.arange(p) != PREFILL] if self.terms.hides_hits else vif
        if asked.max() <= VIF_MAX and (held is None or len(held) >= _ENOUGH_ROWS):
            return None
        hidden = self.terms.hides_hits and not vif.max() <= VIF_MAX
        statistics = statistics_of(learner, hidden=hidden)
        if statistics is None and held is not None:
            for _ in range(2):  # weighed by what is expected, which they move
                statistics = statistics_of_burn_in(held, *self._estimate(statistics), hidden=hidden)
        if statistics is None:
            return None
        beta, _ = self._estimate(statistics)
        own = statistics.lack_of_fit(learner.beta[:p])
        return None if is_contradicted(statistics.lack_of_fit(beta), own) else self._published(statistics, vif, learned)

    def _estimate(self, statistics: SufficientStatistics | None) -> tuple[Floats, Floats]:
        """Beta (p,) and its covariance (p, p)."""
        known, m = [each for each in (statistics, self._donor) if each is not None], self.terms.matrix
        theta, covariance = estimate(self.terms, known, self._prior)
        return self.terms.beta(theta), m @ covariance @ m.T

    def _published(self, statistics: SufficientStatistics | None, vif: Floats, learned: ModelSnapshot) -> ModelSnapshot:
        """The estimate in place of what was learned.

        A coefficient is ``prior_only`` until its rows halve the error that was there before them; ``weak`` where
        vif > 10 or the error is more than 20 %; else ``identified``.
        """
        beta, covariance = self._estimate(statistics)
        stderr = np.sqrt(np.maximum(covariance.diagonal(), 0.0))
        before = np.sqrt(self.terms.matrix**2 @ np.where(self.terms.has, self._prior.sd, 0.0) ** 2)
        is_prior = np.ones(len(beta), np.bool_) if statistics is None else ~(stderr < _KNOWN * before)
        own, features = {feature.name: feature for feature in learned.features}, []
        for j, column in enumerate(self.terms.columns):
            weak = None
            if not is_prior[j]:
                wide = None if stderr[j] < IDENTIFIED_ERROR * beta[j] else Reason.WIDE
                weak = Reason.COLLINEAR if vif[j] > VIF_MAX else wide
            here = own.get(column.name, FeatureSnapshot(name=column.name, unit=column.unit, coefficient=0.0, status=""))
            status = "prior_only" if is_prior[j] else "weak" if weak else "identified"
            said = {"coefficient": float(beta[j]), "stderr": float(stderr[j]), "status": status, "reason": weak}
            features.append(msgspec.structs.replace(here, **said))
        return msgspec.structs.replace(learned, features=features, covariance=covariance.tolist())
