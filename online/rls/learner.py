"""The ``rls`` learner of one feature set: recursive least squares in information form.

Rows become z = [x, phase, y, l], (n, q) with q = p + 2. Each block once, in this order:

    predict     y by the coefficients as they are: that is the prequential error
    change      look for a change of speed (online/change.py), or take what another learner of the target found
    weigh       by the prediction (online/rls/solve.py)
    remember    decayed statistics by stratum (online/rls/strata.py)
    solve       beta
    shapes      what a batch shape takes beside it (online/shapes.py)

At a confirmed change 2 % of the evidence is kept and multiplied by the gain: the rows since it began, which are in it,
are then few beside those that come. The first 256 rows are held and fitted together; until then every block refits all
of them.

Guarantee: reading changes nothing that is learned later.

**The fit.** Stratified statistics, and the published coefficients that solve them.

    G    = sum over strata of decayed w z z'                      z = [x, phase, y, l], G: (q, q) (online/rls/strata.py)
    beta = argmin over beta_j >= 0 where not free   beta' (A + H) beta - 2 (b + H beta0)' beta      A, b: blocks of G

H and beta0 are the prior's (online/rls/solve.py); a prior that the rows contradict is dropped, and their own fit is
published from then on. ``bsr_ard`` finds a precision for each column beside (the same).

Guarantee: beta is a function of the learned rows alone.
"""

from __future__ import annotations

import copy
import math

import msgspec
import numpy as np

from online.blocks import STRATA, Design
from online.change import ChangeMonitor, Speed, Verdict
from online.constants import ALARM_KEEP, HALF_LIFE_STEPS, START_ROWS, TINY, TINY_US
from online.errors import Intervals, PrequentialError
from online.features import INTERCEPT, FeatureSet
from online.rows import PHASES, Floats, Ints, Mask, Target
from online.shapes import ShapeFactors
from online.snapshot import ModelSnapshot
from online.state import StateError, Stateful, Tree

from .error_bars import Diagnosis, Meat, Shapes, diagnose, jackknife, model_snapshot, of_windows
from .solve import (
    FIRST_SCALE,
    Prior,
    Relevance,
    Start,
    contradicted,
    fit_start,
    huber,
    moved,
    moved_median,
    relative,
    solve,
)
from .strata import Means, Strata

_BY_POINT = ("portable", Target.STEP_TIME)
"""What is kept by operating point, too: columns that data sheets and other configurations say something of."""
_RELEVANCE_SETS = frozenset({"bsr_ard"})
"""Sets whose columns are pruned."""


class Fit(Stateful):
    """Statistics and solution of p columns.

    Attributes:
        p: features and phases.
        prior: of the coefficients, if there is one.
        free: columns that may be negative, (p,).
        intercept: the column of that name, (p,).
        beta: published coefficients and phases, (p,).
        passive: columns that are off their bound, (p,).
        live: columns with evidence or a prior, (p,).
        strata, meat: what is remembered, for the coefficients and for their error bars.
        relevance: of the columns, where they are pruned.
    """

    SAVED = ("beta", "passive", "live", "strata", "meat", "relevance")

    def __init__(self, features: FeatureSet, half_life_steps: float, prior: Prior | None = None) -> None:
        self.p = p = len(features)
        self.prior = None if prior is None else prior.sized(p)
        self.intercept: Mask = np.array([name == INTERCEPT for name in features.names], np.bool_)
        self.beta = np.zeros(p)
        self.free, self.passive, self.live = (np.zeros(p, np.bool_) for _ in range(3))
        self.strata = Strata(p + 2, half_life_steps, by_point=(features.name, features.target) == _BY_POINT)
        self.meat = Meat(p)
        always = np.array([column.formula == INTERCEPT for column in features.columns], np.bool_)
        self.relevance = Relevance(always) if features.name in _RELEVANCE_SETS else None

    def to_state(self) -> Tree:
        """See Stateful."""
        return super().to_state() | {"prior": None if self.prior is None else self.prior.to_state()}

    def from_state(self, state: Tree) -> None:
        """See Stateful; a prior is of its columns."""
        super().from_state(state)
        self.prior = None if state["prior"] is None else Prior.of_state(state["prior"])
        if self.prior is not None and len(self.prior.mean) != self.p:
            raise StateError(f"a prior of {len(self.prior.mean)} columns, expected {self.p}")

    def widen(self, more: int) -> None:
        """``more`` columns, free of sign, after its p."""
        self.strata.widen(self.p, more)
        self.meat.widen(more)
        self.p += more
        self.prior = None if self.prior is None else self.prior.sized(self.p)
        if self.relevance is not None:
            self.relevance.widen(more)
        for name in ("free", "intercept", "beta", "passive", "live"):
            setattr(self, name, np.pad(getattr(self, name), (0, more), constant_values=name == "free"))

    # ---------------------------------------------------------------- learning

    def learn(self, block: Design, z: Floats, weight: Floats, share: Floats, prediction: Floats) -> None:
        """Add rows z (n, q) of weight, Huber's share and prediction (n,)."""
        kept, left = self.strata.learn(block, z, weight, share)
        self.meat.learn(block, kept, z[:, : self.p] * (left * weight * (block.elapsed_us - prediction))[:, None])

    def learn_held(self, held: Design, z: Floats, weight: Floats, share: Floats) -> None:
        """The rows of the first fit become statistics; their scores count whole."""
        self.strata.learn(held, z, weight, share)
        residual = held.elapsed_us - z[:, : self.p] @ self.beta
        self.meat.learn(held, np.ones(len(held.grouped().ids)), z[:, : self.p] * (weight * residual)[:, None])

    def with_held(self, held: Design, z: Floats, weight: Floats, share: Floats) -> Fit:
        """A copy as if the rows of the first fit were statistics; only what error bars ask for is made."""
        fit = copy.copy(self)
        fit.strata, fit.meat = Strata(self.p + 2, self.strata.half_life_steps), Meat(self.p)
        fit.learn_held(held, z, weight, share)
        return fit

    def discount(self, keep: float, gain: float, *, prefill: bool) -> None:
        """Keep so much of what was known, at a new speed; of steps with ``prefill`` alone, or of all."""
        self.strata.discount(keep, gain, slice(STRATA // 2, None) if prefill else slice(None))
        if not prefill:
            self.meat.discount(keep)

    def decay(self, spent: Floats) -> None:
        """Forget as if rows worth ``spent`` (32,) half-lives had been learned in each stratum."""
        self.strata.decay(spent)
        self.meat.decay(spent)

    def add(self, other: Fit) -> None:
        """Statistics of both; see Strata.add."""
        self.strata.add(other.strata)
        self.meat.add(other.meat)

    # ---------------------------------------------------------------- solving

    def precision(self, scale: float) -> Floats:
        """Diagonal of H without the solver's relative ridge, (p,)."""
        known = np.zeros(self.p) if self.prior is None else self.prior.precision(scale)
        return known if self.relevance is None else known + self.relevance.precision(scale)

    def solve(self, g: Floats, scale: float) -> Floats:
        """Solve statistics (q, q) for beta (p,), and keep it."""
        a, b, known, mean = g[: self.p, : self.p], g[: self.p, self.p], np.zeros(self.p), np.zeros(self.p)
        if self.prior is not None:
            known, mean = self.prior.precision(scale), self.prior.mean
        if self.relevance is not None:
            self.relevance.learn(a + np.diag(known), b + known * mean, scale**2, self.free)
        h = self.precision(scale)
        pull = np.divide(known * mean, h, out=np.zeros(self.p), where=h > 0.0)  # a relevance pulls to 0
        found = solve(a, b, self.free, self.passive | ~self.live, prior_precision=h, prior_mean=pull)
        self.beta, self.passive, self.live = found.beta, found.passive, found.live
        if self.relevance is not None:
            pruned = ~self.relevance.used
            self.beta[pruned], self.passive[pruned] = 0.0, False
        return self.beta

    def solve_strata(self, scale: float) -> None:
        """Solve what is remembered; a prior that it contradicts is dropped."""
        p, g = self.p, self.strata.total()
        self.solve(g, scale)
        if self.prior is not None:
            own = solve(g[:p, :p], g[:p, p], self.free, self.passive).beta
            if contradicted(_misfit(g, self.beta), _misfit(g, own)):
                self.prior = None
                self.solve(g, scale)


def residual_squares(g: Floats, beta: Floats) -> float:
    """Weighted sum of squares that coefficients (p,) leave of y in statistics G (q, q), y behind the p columns."""
    p = len(beta)
    return float(beta @ g[:p, :p] @ beta - 2.0 * (g[p, :p] @ beta) + g[p, p])


def _misfit(g: Floats, beta: Floats) -> float:
    """Root mean square of what coefficients (p,) leave of y, relative to y."""
    return math.sqrt(max(residual_squares(g, beta), 0.0) / max(float(g[len(beta), len(beta)]), TINY))


MEAN_TARGETS = frozenset({Target.API_QUEUEING, Target.POST_DECODE, Target.FIRST_RESPONSE})
"""Skewed times that add up to what a request sees: their mean is what adds up, and a robust fit is far off in it."""

# Guess: the least that a median can defend.
_MIN_START_ROWS = 3
_CONTEXT_TOKENS = "decode_context_tokens"


class RlsLearner(Stateful):
    """One feature set on one target of one configuration.

    Args:
        features: columns it reads.
        prior: what is known of the coefficients before the first row.
        detector: of changes of speed (online/change.py).
        half_life_steps: steps after which a row counts half.
        start_rows: rows of the first fit.

    Attributes:
        phases: phase columns; they exist from the first row that starts or ends on another stamp than ts_start.
        rows: rows learned.
        held: rows of the first fit; None before the first and after the last.
        holding: whether rows are still held.
        started: whether there was a first fit.
        scale, median_us: s and m of online/rls/solve.py.
        fit: the published statistics and coefficients.
        error, intervals: of the coefficients alone, each row predicted before it was learned.
        learns_intervals: not where another prediction's are published (online/target/published_prediction.py).
        drift: watches the machine's speed.
        speed: what was found of it in the last block.
        means: plain means of the columns.
    """

    SAVED = (
        *("rows", "holding", "started", "scale", "median_us"),
        *("fit", "error", "intervals", "shapes", "drift", "means"),
    )

    def __init__(
        self,
        features: FeatureSet,
        prior: Prior | None = None,
        *,
        detector: str = "cusum",
        half_life_steps: float = HALF_LIFE_STEPS,
        start_rows: int = START_ROWS,
    ) -> None:
        self.features, self._start_rows = features, start_rows
        self._robust = features.target not in MEAN_TARGETS
        self.phases = self.rows = 0
        self.held: Design | None = None
        self.holding, self.started = True, False
        self.scale, self.median_us = FIRST_SCALE, 0.0
        self.fit = Fit(features, half_life_steps, prior)
        self.error, self.intervals, self.learns_intervals = PrequentialError(), Intervals(), True
        self.shapes = ShapeFactors(len(features))
        self.drift = ChangeMonitor(detector, features.names)
        self.speed: Speed | None = None
        self.means = Means(len(features) + 2, half_life_steps)

    def to_state(self) -> Tree:
        """See Stateful."""
        held = None if self.held is None else self.held.to_state()
        return super().to_state() | {"has_phases": self.phases > 0, "held": held}

    def from_state(self, state: Tree) -> None:
        """See Stateful; phase columns make room for theirs first, and rows that are held have this one's columns."""
        if state["has_phases"] is True:
            self.open_phases()
        super().from_state(state)
        self.held = None if state["held"] is None else Design.of_state(state["held"])
        if self.held is not None and self.held.x.shape[1] != len(self.features):
            raise StateError(f"held rows of {self.held.x.shape[1]} columns, expected {len(self.features)}")

    def offer_prior(self, prior: Prior) -> None:
        """Take a prior, unless there is one or learning has begun."""
        if not self.started and self.fit.prior is None:
            self.fit.prior = prior.sized(self.fit.p)

    def adopt_shapes(self, donor: RlsLearner) -> None:
        """Begin with the shape factors of a donor of the same columns, half believed, unless learning has begun."""
        if donor.started and not self.rows and donor.features.names == self.features.names:
            self.shapes.adopt(donor.shapes)

    # ---------------------------------------------------------------- learning

    def learn(self, block: Design, speed: Speed | None = None) -> Floats | None:
        """Predict, score, learn, solve; block.x has this set's columns only and is finite.

        Args:
            block: the rows.
            speed: what another learner of the target, which watches, found in these rows; None = watch alone.

        Returns:
            log(y / prediction) by the published coefficients as they were before, (n,); None before the first fit.
        """
        if not self.phases and block.phase.any():
            self.open_phases()
        z = self._augment(block)
        self.rows += len(block)
        self.means.learn(z, float(block.steps @ block.weight))
        prediction = z[:, : self.fit.p] @ self.fit.beta
        log_ratio = self._score(block, prediction) if self.started else None
        if self.holding or log_ratio is None:
            self.held = block if self.held is None else Design.concatenate([self.held, block])
            self.refit()
            return log_ratio
        if not self._robust:
            self.fit.learn(block, z, block.weight / self.median_us**2, np.ones(len(block)), prediction)
        else:
            self.speed = self._watch_speed(block, z, log_ratio) if speed is None else speed
            if self.speed.verdict is not Verdict.NOTHING:
                self._change_speed(self.speed, watches=speed is None)
                prediction = z[:, : self.fit.p] @ self.fit.beta
            u, per_unit = relative(block.elapsed_us, block.steps, block.weight, prediction, self.median_us)
            share = huber(u, self.scale)
            self.scale = moved(self.scale, u)
            self.median_us = moved_median(self.median_us, block.elapsed_us / block.steps)
            weight = share * per_unit * per_unit
            if speed is None:
                phases_us = z[:, len(self.features) : -2] @ self.fit.beta[len(self.features) :]
                self.drift.engines.add(block, block.elapsed_us - phases_us, weight)
            self.fit.learn(block, z, weight, share, prediction)
        self.fit.solve_strata(self.scale)
        if self.drift.asks_for_term:
            self.drift.attribute(*self.normal_equations())
        return log_ratio

    def open_phases(self) -> None:
        """Make room for the phase columns, which are free of sign and not published."""
        if not self.phases:
            self.phases, p = len(PHASES), self.fit.p
            self.means.sums = np.insert(self.means.sums, p, np.zeros(self.phases))
            self.fit.widen(self.phases)
            self.shapes.widen(self.phases)

    def _augment(self, block: Design) -> Floats:
        """Rows z, (n, q)."""
        z, p = np.empty((len(block), self.fit.p + 2)), len(self.features)  # by rows, whatever order x is in
        z[:, :p], z[:, -2], z[:, -1] = block.x, block.elapsed_us, block.steps
        if self.phases:
            z[:, p:-2] = block.phase
        return z

    def _score(self, block: Design, prediction: Floats) -> Floats:
        """Count the errors of predictions (n,); log(y / prediction), (n,)."""
        ratio = np.maximum(prediction, TINY_US) / block.elapsed_us
        log_ratio: Floats = -np.log(ratio)
        self.error.learn(np.abs(ratio - 1.0))
        if self.learns_intervals:
            self.intervals.learn(block, log_ratio)
        return log_ratio

    def _watch_speed(self, block: Design, z: Floats, log_ratio: Floats) -> Speed:
        """Look for a change of speed; shape factors follow unless one was found."""
        shapes, beta = self.shapes, self.fit.beta
        log_factor = shapes.log_factors(beta)[block.cell]
        shapes.score(log_ratio, log_factor)
        speed = self.drift.learn(block, log_ratio - log_factor, shapes, beta)
        if speed.verdict is Verdict.NOTHING:
            shapes.learn(block.cell, z[:, : self.fit.p], log_ratio, beta)
        return speed

    def _change_speed(self, speed: Speed, *, watches: bool) -> None:
        """Keep little of what was known, at the new speed."""
        prefill = speed.verdict is Verdict.PREFILL
        self.fit.discount(ALARM_KEEP, speed.gain, prefill=prefill)
        if not prefill:
            self.means.discount(ALARM_KEEP, speed.gain)
        if watches:
            self.shapes.shift(math.log(speed.gain), prefill=prefill)
        self.fit.solve_strata(self.scale)

    # ---------------------------------------------------------------- the first fit

    def refit(self, *, release: bool = False) -> None:
        """Fit all held rows, if they are enough; once complete, or with ``release``, they become statistics."""
        held = self.held
        if held is None or not (release or len(held) >= _MIN_START_ROWS):
            return
        z, start = self._fit_held(held)
        self.scale, self.median_us, self.started = start.scale, start.median_us, True
        prediction = np.maximum(z[:, : self.fit.p] @ self.fit.beta, TINY_US)
        self.shapes.settle(held.cell, np.log(held.elapsed_us / prediction), self.fit.beta)
        if release or len(held) >= self._start_rows:
            self.fit.learn_held(held, z, start.weight, start.share)
            self._open_shapes(self.shapes, held, z, start)
            self.fit.solve_strata(self.scale)
            self.held, self.holding = None, False

    def release(self) -> None:
        """Let held rows become statistics, if they are enough for a fit of all of them."""
        if self.held is not None and len(self.held) >= _MIN_START_ROWS:
            self.refit(release=True)

    def _fit_held(self, held: Design) -> tuple[Floats, Start]:
        """Held rows z (n, q) and their weights; beta solves them."""
        z = self._augment(held)
        return z, fit_start(z, held.weight, self.fit.solve, robust=self._robust)

    def _open_shapes(self, shapes: ShapeFactors, held: Design, z: Floats, start: Start) -> None:
        """References of the held rows' batch shapes, without the rows that the first fit left out."""
        prediction = z[:, : self.fit.p] @ self.fit.beta
        usual = (start.share > 0.0) & (prediction > 0.0)
        log_ratio = np.log(held.elapsed_us[usual] / prediction[usual])
        shapes.learn(held.cell[usual], z[usual, : self.fit.p], log_ratio, self.fit.beta)

    # ---------------------------------------------------------------- reading

    def predict(self, block: Design) -> Floats:
        """By the published coefficients, phases left out: microseconds, (n,)."""
        return block.x @ self.fit.beta[: len(self.features)]

    def log_factors(self, cell: Ints) -> Floats:
        """Log F of each row's batch shape, (n,); 0 where the shape was never seen."""
        return self.shapes.applied_factors(self.fit.beta)[cell]

    def statistics(self) -> tuple[Floats, float]:
        """Sum of w z z' behind the published coefficients, (q, q), and of how many rows in Huber's shares.

        Held rows are fitted again, with the same result.
        """
        if self.held is None:
            return self.fit.strata.total(), float(self.fit.strata.n1.sum())
        z, start = self._fit_held(self.held)
        return (z * start.weight[:, None]).T @ z, float(self.held.weight.sum())

    def normal_equations(self) -> tuple[Floats, Floats]:
        """A (p, p) and b (p,) of the columns behind the published coefficients; phases are taken out as estimated."""
        p, y, (g, _) = len(self.features), self.fit.p, self.statistics()
        return g[:p, :p], g[:p, y] - g[:p, p:y] @ self.fit.beta[p:y]

    def diagnosis(self) -> Diagnosis:
        """Error bars and status of the published coefficients; needs a first fit.

        Held rows count as if they were statistics: they err together and misfit as others do.
        """
        if (held := self.held) is None:
            fit, shapes, g, rows = self.fit, self.shapes, self.fit.strata.total(), self.effective_rows()
        else:
            z, start = self._fit_held(held)
            fit, shapes = self.fit.with_held(held, z, start.weight, start.share), copy.deepcopy(self.shapes)
            g, rows = (z * start.weight[:, None]).T @ z, float(held.weight.sum())
            if self.features.target.vector == "beta":
                self._open_shapes(shapes, held, z, start)
        variance = self.scale**2
        if not self._robust:
            # The scale is a median's, which does not see the tail that a mean fit lives on.
            variance = max(variance, residual_squares(g, fit.beta) / max(rows, 1.0))
        return diagnose(fit, g, self.scale, variance, self._misfit_of(fit, shapes, rows))

    def _misfit_of(self, fit: Fit, shapes: ShapeFactors, rows: float) -> Shapes | None:
        """What the form misses by batch shape; None where this model's own references are not kept up."""
        visited = shapes.rows.nonzero()[0]
        seen_rows = shapes.rows[visited]
        total = float(seen_rows.sum())
        if self.features.target.vector != "beta" or not total or total < 0.5 * float(fit.strata.n1.sum()):
            return None
        log_factor = shapes.log_factors(fit.beta)[visited]
        return Shapes(shapes.x[visited], log_factor, shapes.spread[visited], seen_rows, seen_rows * (rows / total))

    def context_us_per_token(self) -> float | None:
        """What a token of decode context costs among steps of about one size; None where that is not sure."""
        names = self.features.names
        if _CONTEXT_TOKENS not in names:
            return None
        return self.fit.strata.slope_inside(names.index(_CONTEXT_TOKENS), self.scale)

    def effective_rows(self) -> float:
        """Rows that the published coefficients rest on, after forgetting and down-weighting."""
        return self.fit.strata.effective_rows() if self.held is None else float(self.held.weight.sum())

    def donation(self) -> Prior | None:
        """What another configuration may start from; None before the first fit."""
        if not self.started:
            return None
        g, rows = self.statistics()
        return Prior.of_donor(self.fit.beta, g.diagonal()[: self.fit.p] / max(rows, 1.0))

    def mean_us(self) -> float | None:
        """Mean time per step (per request) over the remembered rows."""
        means = self.means.per_step()
        return None if means is None else float(means[-2])

    def mean_factor(self) -> float | None:
        """Mean time per robustly predicted time over the remembered rows; None before the first fit."""
        return self.means.factor(self.fit.beta) if self.started else None

    def snapshot(self, windows: Design | None = None) -> ModelSnapshot | None:
        """The model as published; None before the first fit.

        ``windows``: the last rows, where all are of times between two scrapes of a page: error bars are of these.
        """
        if not self.started:
            return None
        model = msgspec.structs.replace(
            model_snapshot(self.features.columns, self.fit.beta, self.means.per_step(), self.diagnosis()),
            rows=self.rows,
            effective_rows=self.effective_rows(),
            error=self.error.snapshot(),
            scale=self.scale,
        )
        if windows is None:
            return model
        p = len(self.features)
        covariance = jackknife(windows, self.fit.beta[:p], self.scale, self.fit.intercept[:p])
        if covariance is not None:
            published = [self.features.names.index(feature.name) for feature in model.features]
            covariance = covariance[np.ix_(published, published)]
        return of_windows(model, covariance)
