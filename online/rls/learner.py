"""The ``rls`` learner of one feature set: recursive least squares in information form.

Rows become z = [x, phase, y, l], (n, q) with q = p + 2. Each block once, in this order:

    predict     y by the coefficients as they are: that is the prequential error
    change      look for a change of speed (online/change.py), or take what another learner of the target found; where
                there is none, shape factors learn what a batch shape takes beside x beta (online/shapes.py)
    weigh       by the prediction (online/rls/solve.py)
    remember    decayed statistics by stratum, with the scores for error bars (online/rls/strata.py)
    solve       beta

At a confirmed change 2 % of the statistics is kept and multiplied by its time ratio. The rows since it began are in
there, and are then few beside those that come. The first 256 rows, or 64 windows of five minutes, are fitted together:
until then every block makes the statistics of all of them anew.

What is solved:

    G    = sum over strata of decayed w z z'                      z = [x, phase, y, l], G: (q, q) (online/rls/strata.py)
    beta = argmin over beta_j >= 0 where not free   beta' (A + H) beta - 2 (b + H beta0)' beta      A, b: blocks of G

H and beta0 are the prior's (online/rls/solve.py); a prior that the rows contradict is dropped, and their own fit is
published from then on. ``bsr_ard`` finds a precision for each column beside (the same).

Guarantees: beta is a function of the learned rows alone; reading changes nothing that is learned later.
"""

from __future__ import annotations

import math

import numpy as np

from online.blocks import Design
from online.change import Change, ChangeMonitor
from online.constants import (
    ALARM_KEEP,
    HALF_LIFE_STEPS,
    LACK_OF_FIT,
    START_NS,
    START_ROWS,
    START_WINDOWS,
    TINY,
    TINY_US,
)
from online.errors import Intervals, PrequentialError
from online.features import INTERCEPT, PORTABLE, FeatureSet
from online.rows import PHASES, Floats, Ints, Mask, Quality, RowBlock, Target
from online.shapes import ShapeFactors
from online.snapshot import ModelSnapshot
from online.state import StateError, Stateful, Tree

from .error_bars import InferenceResult, as_published, diagnose
from .solve import (
    Prior,
    huber,
    is_contradicted,
    relative_residuals,
    relevance,
    solve,
    update_median,
    update_scale,
    weigh_first_rows,
)
from .strata import Strata

_BY_POINT = (PORTABLE, Target.STEP_TIME)
"""What is kept by operating point, too: columns that data sheets and other configurations say something of."""
_RELEVANCE_SET = "bsr_ard"
"""The set whose columns are pruned."""
MEAN_TARGETS = frozenset({Target.API_QUEUEING, Target.POST_DECODE, Target.FIRST_RESPONSE})
"""Skewed times that add up to what a request sees: their mean is what adds up, and a robust fit is far off in it."""

# Guess: a prediction of a row beyond so many times its time, and its usual time, counts by the square less. Huber's
# share bounds the time of a row and not its features: one step of 2^31 tokens takes a coefficient away. With 5 sound
# rows of c0_smoke count less, too, and its error is 29.0 % instead of 26.7; with 100 more of such a step stays.
_REACH = 50.0
_CONTEXT_TOKENS = "decode_context_tokens"


def residual_squares(g: Floats, beta: Floats) -> float:
    """Weighted sum of squares that coefficients (p,) leave of y in statistics G (q, q), y behind the p columns."""
    p = len(beta)
    return float(beta @ g[:p, :p] @ beta - 2.0 * (g[p, :p] @ beta) + g[p, p])


def _lack_of_fit(g: Floats, beta: Floats) -> float:
    """Root mean square of what coefficients (p,) leave of y, relative to y."""
    return math.sqrt(max(residual_squares(g, beta), 0.0) / max(float(g[len(beta), len(beta)]), TINY))


def _augmented(block: Design) -> Floats:
    """Rows z, (n, q)."""
    return np.column_stack((block.x, block.phase, block.elapsed_us, block.steps))


class RlsLearner(Stateful):
    """One feature set on one target of one configuration.

    It has p columns: features, then phases, which are free of sign and not published.

    Args:
        features: columns it reads.
        prior: what is known of the coefficients before the first row.
        detector: of changes of speed (online/change.py).

    Attributes:
        beta, passive, live, h: the solution, (p,) each: coefficients; which are off their bound; which have evidence or
            a prior; the diagonal of H, without the solver's relative ridge.
        free, intercept: which columns may be negative, and which is the intercept, (p,).
        strata: the decayed statistics that are solved.
        burn_in: rows of the first fits; None before the first row and after the last of these fits.
        by_pages: whether all rows are of times between two scrapes of a page.
        scale, median_us: s and m of online/rls/solve.py.
        error, intervals: of the coefficients alone, each row predicted before it was learned.
        learns_intervals: not where another prediction's are published (online/target/published_prediction.py).
        change: what was found of the machine's speed in the last block, if anything.
        sums: plain sums of z, (q,), which no robust weight touches, decayed like the statistics: sum y / sum l is the
            mean time of a step (of a request), stalls included.
    """

    SAVED = (
        *("rows", "started", "by_pages", "scale", "median_us", "beta", "passive", "live", "h"),
        *("strata", "error", "intervals", "shapes", "drift", "sums"),
    )

    def __init__(self, features: FeatureSet, prior: Prior | None = None, *, detector: str = "cusum") -> None:
        self.features = features
        self.p = p = len(features) + len(PHASES)
        self.prior = None if prior is None else prior.with_phases()
        self.free: Mask = np.arange(p) >= len(features)
        self.intercept: Mask = np.array([name == INTERCEPT for name in (*features.names, *PHASES)], np.bool_)
        self._robust = features.target not in MEAN_TARGETS
        self.beta, self.h = np.zeros(p), np.zeros(p)
        self.passive, self.live = np.zeros(p, np.bool_), np.zeros(p, np.bool_)
        self.strata = self._no_statistics()
        self.rows = 0
        self.burn_in: RowBlock | None = None
        self.started, self.by_pages = False, True
        self.scale, self.median_us = LACK_OF_FIT, 0.0
        self.error, self.intervals, self.learns_intervals = PrequentialError(), Intervals(), True
        self.shapes = ShapeFactors(p)
        self.drift = ChangeMonitor(detector, features.names)
        self.change: Change | None = None
        self.sums = np.zeros(p + 2)

    def _no_statistics(self) -> Strata:
        return Strata(self.p + 2, by_point=(self.features.name, self.features.target) == _BY_POINT)

    def to_state(self) -> Tree:
        """See Stateful."""
        own = {"prior": self.prior, "burn_in": self.burn_in}
        return super().to_state() | {name: None if each is None else each.to_state() for name, each in own.items()}

    def from_state(self, state: Tree) -> None:
        """See Stateful; a prior is of its columns."""
        super().from_state(state)
        self.prior = None if state["prior"] is None else Prior.of_state(state["prior"])
        if self.prior is not None and len(self.prior.mean) != self.p:
            raise StateError(f"a prior of {len(self.prior.mean)} columns, expected {self.p}")
        if state["burn_in"] is not None:
            self.burn_in = RowBlock.of_state(state["burn_in"], self.features.target.vocabulary)

    @property
    def in_burn_in(self) -> bool:
        """Whether all rows so far are still fitted together."""
        return self.burn_in is not None or not self.started

    def take_prior(self, prior: Prior) -> None:
        """Take a prior, unless there is one or learning has begun."""
        if not self.started and self.prior is None:
            self.prior = prior.with_phases()

    # ---------------------------------------------------------------- learning

    def learn(self, block: Design, change: Change | None = None, *, is_watcher: bool = True) -> Floats | None:
        """Predict, score, look for a change of speed, weigh, remember, solve; of rows that this set knows.

        One learner of a target looks for changes (``is_watcher``), and the others are told the ``change`` that it found
        in these rows. Returns log(y / prediction) by the published coefficients as they were before, (n,); None before
        the first fit.
        """
        z, self.change = _augmented(block), change
        log_ratio = self._score(block, z)
        if self.in_burn_in or log_ratio is None:
            self.burn_in = RowBlock.concatenate([block] if self.burn_in is None else [self.burn_in, block])
            self.fit_burn_in()
            return log_ratio
        if is_watcher and self._robust:
            self.change = self._watch(block, z, log_ratio)
        if self.change is not None:
            self._take_change(self.change)
        prediction = z[:, : self.p] @ self.beta
        weight, share = self._weigh(block, prediction)
        if is_watcher:
            self.drift.add(block, self._without_phases(block), weight)
        self.strata.learn(block, z, weight, share, prediction)
        self.solve()
        if is_watcher:
            self.drift.find_term(self.scale, self.shapes)
        return log_ratio

    def _score(self, block: Design, z: Floats) -> Floats | None:
        """Count rows z (n, q) and score their predictions: log(y / prediction), (n,); None before the first fit."""
        self.rows += len(block)
        self.by_pages &= bool((block.quality == Quality.METRICS).all())
        self.sums = self.sums * 2.0 ** -(float(block.steps @ block.weight) / HALF_LIFE_STEPS) + z.sum(axis=0)
        if not self.started:
            return None
        ratio = np.maximum(z[:, : self.p] @ self.beta, TINY_US) / block.elapsed_us
        log_ratio: Floats = -np.log(ratio)
        self.error.learn(np.abs(ratio - 1.0))
        if self.learns_intervals:
            self.intervals.learn(block, log_ratio)
        return log_ratio

    def _watch(self, block: Design, z: Floats, log_ratio: Floats) -> Change | None:
        """Look for a change of speed: shape factors follow it, or learn the rows where there is none."""
        shapes = self.shapes
        shapes.score(log_ratio, shapes.log_factors(block.cell, self.beta))
        change = self.drift.learn(block, log_ratio, shapes, self.beta)
        if change is None:
            shapes.learn(block.cell, z[:, : self.p], log_ratio, self.beta)
        else:
            shapes.follow_speed(change.log_time_ratio, prefill=change.prefill)
        return change

    def _take_change(self, change: Change) -> None:
        """Keep little of what was known, at the new speed."""
        self.strata.discount(ALARM_KEEP, change.time_ratio, prefill=change.prefill)
        if not change.prefill:
            self.sums *= ALARM_KEEP
            self.sums[-2] *= change.time_ratio
        self.solve()

    def _weigh(self, block: Design, prediction: Floats) -> tuple[Floats, Floats]:
        """Weight and Huber's share of rows by their prediction, (n,) each; scale and median follow."""
        if not self._robust:
            return block.weight / self.median_us**2, np.ones(len(block))
        steps = block.steps
        u, per_unit = relative_residuals(block.elapsed_us, steps, block.weight, prediction, self.median_us)
        share = huber(u, self.scale)
        self.scale = update_scale(self.scale, u)
        self.median_us = update_median(self.median_us, block.elapsed_us / steps)
        usual_us = steps * self.sums[-2] / self.sums[-1]
        reach = _REACH * np.maximum(np.sqrt(steps * block.weight) / per_unit, usual_us)
        return share * np.square(per_unit * reach / np.maximum(reach, prediction)), share

    def _without_phases(self, block: Design) -> Floats:
        return block.elapsed_us - block.phase @ self.beta[len(self.features) :]

    def fit_burn_in(self, *, last: bool = False) -> None:
        """Fit the rows of burn-in together, once there are enough, and make statistics of them.

        Burn-in ends when all its rows have come, or with ``last``; then the rows are released.
        """
        if self.burn_in is None or len(self.burn_in) < 3:  # noqa: PLR2004 -- the least that a median can defend
            return
        held = Design.of(self.features, self.burn_in)
        z = _augmented(held)
        weight, share, self.scale, self.median_us = weigh_first_rows(z, held.weight, self._solve, robust=self._robust)
        self.started = True
        prediction = z[:, : self.p] @ self.beta
        self.strata = self._no_statistics()
        self.strata.learn(held, z, weight, share, prediction)
        # With the rows that the first fit left out, errors of x beta F are 0.3 points larger on twelve recordings.
        usual = (share > 0.0) & (prediction > 0.0)
        log_ratio = np.log(held.elapsed_us[usual] / prediction[usual])
        self.shapes = ShapeFactors(self.p)
        self.shapes.learn(held.cell[usual], z[usual, : self.p], log_ratio, self.beta)
        is_long = bool(held.windows.all()) and held.end_ns[-1] - held.end_ns[0] >= START_NS
        if last or len(held) >= (START_WINDOWS if is_long else START_ROWS):
            self.solve()
            self.drift.add(held, self._without_phases(held), weight)
            self.burn_in = None

    def solve(self) -> None:
        """Solve the decayed statistics; drop a prior that they contradict."""
        g = self.strata.total()
        self._solve(g, self.scale)
        if self.prior is not None:
            own = solve(g[: self.p, : self.p], g[: self.p, self.p], self.free).beta
            if is_contradicted(_lack_of_fit(g, self.beta), _lack_of_fit(g, own)):
                self.prior = None
                self._solve(g, self.scale)

    def _solve(self, g: Floats, scale: float) -> Floats:
        """Solve statistics (q, q) for beta (p,), and keep it."""
        a, b, known, mean = g[: self.p, : self.p], g[: self.p, self.p], np.zeros(self.p), np.zeros(self.p)
        if self.prior is not None:
            known, mean = self.prior.precision(scale), self.prior.mean
        self.h, pruned = known, np.zeros(self.p, np.bool_)
        if self.features.name == _RELEVANCE_SET:
            columns = (*(column.formula for column in self.features.columns), *PHASES)
            always = self.free | np.array([each == INTERCEPT for each in columns], np.bool_)
            precision, pruned = relevance(a + np.diag(known), b + known * mean, scale**2, always, self.free)
            self.h = known + precision
        pull = np.divide(known * mean, self.h, out=np.zeros(self.p), where=self.h > 0.0)  # a relevance pulls to 0
        found = solve(a, b, self.free, prior_precision=self.h, prior_mean=pull)
        self.beta, self.passive, self.live = np.where(pruned, 0.0, found.beta), found.passive & ~pruned, found.live
        return self.beta

    # ---------------------------------------------------------------- reading

    def predict(self, block: Design) -> Floats:
        """By the published coefficients, phases left out: microseconds, (n,)."""
        return block.x @ self.beta[: len(self.features)]

    def log_factors(self, cell: Ints) -> Floats:
        """Log F of each row's batch shape, (n,); 0 where the shape was never seen, or while factors are left out."""
        return self.shapes.log_factors(cell, self.beta) if self.shapes.applied else np.zeros(len(cell))

    def normal_equations(self) -> tuple[Floats, Floats]:
        """A (p, p) and b (p,) of the columns behind the published coefficients; phases are taken out as estimated."""
        p, y, g = len(self.features), self.p, self.strata.total()
        return g[:p, :p], g[:p, y] - g[:p, p:y] @ self.beta[p:y]

    def infer(self) -> InferenceResult:
        """Error bars and status of the published coefficients; needs a first fit."""
        variance = self.scale**2
        if not self._robust:
            # The scale is a median's, which does not see the tail that a mean fit lives on.
            left = residual_squares(self.strata.total(), self.beta)
            variance = max(variance, left / max(self.strata.effective_rows(), 1.0))
        return diagnose(self, variance)

    def context_us_per_token(self) -> float | None:
        """What a token of decode context costs among steps of about one size; None where that is not sure."""
        names = self.features.names
        known = _CONTEXT_TOKENS in names
        return self.strata.slope_inside(names.index(_CONTEXT_TOKENS), self.scale) if known else None

    def half_lives(self) -> float:
        """Half-lives that its rows are worth."""
        return float(self.strata.clock.sum())

    def mean_us(self) -> float | None:
        """Mean time per step (per request) over the remembered rows; None before any."""
        return float(self.sums[-2] / self.sums[-1]) if self.rows else None

    def mean_factor(self) -> float | None:
        """Mean time per robustly predicted time over the remembered rows; None before the first fit."""
        predicted = float(self.sums[:-2] @ self.beta)
        return float(self.sums[-2]) / predicted if predicted > 0.0 else None

    def snapshot(self) -> ModelSnapshot | None:
        """The model as published; None before the first fit."""
        return as_published(self) if self.started else None
