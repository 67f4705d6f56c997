"""The ``rls`` learner of one feature set: recursive least squares in information form.

Rows become z = [x, phase, y, l], (n, q) with q = p + 2. Each block once, in this order:

    predict     y by the coefficients as they are: that is the prequential error
    change      look for a change of speed (online/change.py), or take what another learner of the target found
    weigh       by the prediction (online/rls/weights.py)
    remember    decayed statistics by stratum (online/rls/strata.py)
    solve       beta (online/rls/fit.py)
    shapes      what a batch shape takes beside it (online/shapes.py)

At a confirmed change 2 % of the evidence is kept and multiplied by the gain: the rows since it began, which are in it,
are then few beside those that come. The first 256 rows are held and fitted together; until then every block refits all
of them.

Guarantee: reading changes nothing that is learned later.
"""

from __future__ import annotations

import copy
import math
from typing import Self

import msgspec
import numpy as np

from online.blocks import CELLS, PREFILL_CELL, Design, cell_name, median_of
from online.change import ChangeMonitor, Speed, Verdict
from online.constants import HALF_LIFE_STEPS, START_ROWS, TINY_US
from online.errors import Intervals, PrequentialError
from online.features import FeatureSet
from online.rows import PHASES, Floats, Ints, Mask, Target
from online.shapes import ShapeFactors
from online.snapshot import ModelSnapshot, ShapeFactorSnapshot
from online.state import StateError, Stateful, Tree

from .error_bars import Shapes, jackknife
from .fit import Fit, residual_squares
from .identify import Diagnosis, model_snapshot, of_windows
from .prior import Prior
from .strata import Means, OperatingPoints
from .weights import Start, Weighing, fit_start

MEAN_TARGETS = frozenset({Target.API_QUEUEING, Target.POST_DECODE, Target.FIRST_RESPONSE})
"""Skewed times that add up to what a request sees: their mean is what adds up, and a robust fit is far off in it."""

# Guess: the least that a median can defend.
MIN_START_ROWS = 3
_EVERY_SHAPE: Mask = np.ones(CELLS, np.bool_)
_WITH_PREFILL: Mask = np.arange(CELLS) >= PREFILL_CELL
_CONTEXT_TOKENS = "decode_context_tokens"


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and rates: the half-life in steps, shares as ratios; a copy of what holds it copies the reference."""

    half_life_steps: float = HALF_LIFE_STEPS
    start_rows: int = START_ROWS
    alarm_keep: float = 0.02
    river_rows_per_s: float = 32.0
    detector: str = "cusum"

    def __deepcopy__(self, _memo: object) -> Self:
        return self


class RlsLearner(Stateful):
    """One feature set on one target of one configuration.

    Args:
        features: columns it reads.
        settings: bounds and rates.
        prior: what is known of the coefficients before the first row.
        kind: what keeps and solves the published statistics.

    Attributes:
        phases: phase columns; they exist from the first row that starts or ends on another stamp than ts_start.
        rows: rows learned.
        held: rows of the first fit; None before the first and after the last.
        holding: whether rows are still held.
        started: whether there was a first fit.
        fit: the published statistics and coefficients.
        error, intervals: of the coefficients alone, each row predicted before it was learned.
        learns_intervals: not where another prediction's are published (online/target/published_prediction.py).
        drift: watches the machine's speed.
        speed: what was found of it in the last block.
        means: plain means of the columns.
    """

    SAVED = ("rows", "holding", "started", "weighing", "fit", "error", "intervals", "shapes", "drift", "means")

    publishes = True

    def __init__(
        self, features: FeatureSet, settings: LearnerSettings, prior: Prior | None = None, kind: type[Fit] = Fit
    ) -> None:
        self.features, self.settings = features, settings
        self.phases = self.rows = 0
        self.held: Design | None = None
        self.holding, self.started = True, False
        self.weighing = Weighing(robust=features.target not in MEAN_TARGETS)
        self.fit = kind(features, settings.half_life_steps, prior)
        self.error, self.intervals, self.learns_intervals = PrequentialError(), Intervals(), True
        self.shapes = ShapeFactors(len(features))
        self.drift = ChangeMonitor(settings.detector, features.names)
        self.speed: Speed | None = None
        self.means = Means(len(features) + 2, settings.half_life_steps)

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
        if self.weighing.robust:
            self.speed = self._watch_speed(block, z, log_ratio) if speed is None else speed
            if self._act(self.speed, watches=speed is None):
                prediction = z[:, : self.fit.p] @ self.fit.beta
        share, weight = self.weighing.weigh(block, prediction)
        self.fit.learn(block, z, weight, share, prediction)
        self.solve()
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

    def _act(self, speed: Speed, *, watches: bool) -> bool:
        """Keep little of what was known, at the new speed; True if predictions are no longer what they were."""
        keep, gain = self.settings.alarm_keep, speed.gain
        if speed.verdict is Verdict.NOTHING:
            return False
        if speed.verdict is Verdict.PREFILL:
            self.fit.discount_prefill(keep, gain)
        else:
            self.fit.discount(keep, gain)
            self.means.discount(keep, gain)
        if watches:
            self.shapes.shift(_WITH_PREFILL if speed.verdict is Verdict.PREFILL else _EVERY_SHAPE, math.log(gain))
        self.solve()
        return True

    def solve(self) -> None:
        """Published coefficients from what is remembered."""
        self.fit.solve_strata(self.weighing.scale)

    # ---------------------------------------------------------------- the first fit

    @property
    def fittable(self) -> bool:
        """Whether the rows held are enough for a fit of all of them."""
        return self.held is not None and len(self.held) >= MIN_START_ROWS

    def refit(self, *, release: bool = False) -> None:
        """Fit all held rows, if they are enough; once complete, or with ``release``, they become statistics."""
        held = self.held
        if held is None or not (release or self.fittable):
            return
        median_us = median_of(held.elapsed_us / held.steps)
        self.weighing.median_us = self.weighing.start_median_us = median_us
        z, start = self._fit_held(held)
        prediction = np.maximum(z[:, : self.fit.p] @ self.fit.beta, TINY_US)
        self.shapes.settle(held.cell, np.log(held.elapsed_us / prediction), self.fit.beta)
        self.weighing.scale, self.started = start.scale, True
        if release or len(held) >= self.settings.start_rows:
            self.fit.learn_held(held, z, start.weight, start.share)
            self._open_shapes(self.shapes, held, z, start)
            self.solve()
            self.held, self.holding = None, False

    def _fit_held(self, held: Design) -> tuple[Floats, Start]:
        """Held rows z (n, q) and their weights; beta solves them."""
        z = self._augment(held)
        return z, fit_start(z, held.weight, self.fit.solve, robust=self.weighing.robust)

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

    def statistics(self) -> Floats:
        """Sum of w z z' behind the published coefficients, (q, q); held rows are fitted again, with the same result."""
        if self.held is None:
            return self.fit.strata.total()
        z, start = self._fit_held(self.held)
        self.weighing.scale = start.scale
        return (z * start.weight[:, None]).T @ z

    def normal_equations(self) -> tuple[Floats, Floats]:
        """A (p, p) and b (p,) of the columns behind the published coefficients; phases are taken out as estimated."""
        p, y, g = len(self.features), self.fit.p, self.statistics()
        return g[:p, :p], g[:p, y] - g[:p, p:y] @ self.fit.beta[p:y]

    def points(self) -> OperatingPoints | None:
        """Statistics by operating point behind the published coefficients; of held rows none."""
        return self.fit.strata.points

    def diagnosis(self) -> Diagnosis:
        """Error bars and status of the published coefficients; needs a first fit.

        Held rows count as if they were statistics: they err together and misfit as others do.
        """
        if (held := self.held) is None:
            return self._diagnosis(self.fit, self.shapes, self.fit.strata.total(), self.effective_rows())
        z, start = self._fit_held(held)
        shapes = self.shapes
        if self.features.target.vector == "beta":
            shapes = copy.deepcopy(shapes)
            self._open_shapes(shapes, held, z, start)
        fit = self.fit.with_held(held, z, start.weight, start.share)
        return self._diagnosis(fit, shapes, (z * start.weight[:, None]).T @ z, float(held.weight.sum()))

    def _diagnosis(self, fit: Fit, shapes: ShapeFactors, g: Floats, rows: float) -> Diagnosis:
        """By statistics g (q, q) of so many effective rows."""
        scale = self.weighing.scale
        variance = scale**2
        if not self.weighing.robust:
            # The scale is a median's, which does not see the tail that a mean fit lives on.
            variance = max(variance, residual_squares(g, fit.beta) / max(rows, 1.0))
        return fit.diagnosis(g, scale, variance, self._misfit_of(fit, shapes, rows))

    def _misfit_of(self, fit: Fit, shapes: ShapeFactors, rows: float) -> Shapes | None:
        """What the form misses by batch shape; None where this model's own references are not kept up."""
        visited = shapes.rows.nonzero()[0]
        seen_rows = shapes.rows[visited]
        total = float(seen_rows.sum())
        if self.features.target.vector != "beta" or not total or total < 0.5 * float(fit.strata.n1.sum()):
            return None
        usual, believed = shapes.usual(visited, fit.beta), shapes.believed(visited)
        rows_behind = seen_rows * (rows / total)
        return Shapes(shapes.x[visited], usual, believed, shapes.spread[visited], seen_rows, rows_behind)

    def log_ratio(self, block: Design) -> Floats:
        """log(y / (x beta F)) of each row by the published coefficients and shape factors, (n,)."""
        x = self._augment(block)[:, : self.fit.p]
        return np.log(block.elapsed_us / np.maximum(x @ self.fit.beta, TINY_US)) - self.log_factors(block.cell)

    def log_factors(self, cell: Ints) -> Floats:
        """Log F of each row's batch shape, (n,); 0 where the shape was never seen."""
        return self.shapes.applied_factors(self.fit.beta)[cell]

    def shape_factors(self, beta: Floats | None = None) -> dict[str, ShapeFactorSnapshot]:
        """Factor of each batch shape that was seen, by name: of these coefficients (p,), else of its own."""
        shapes, own = self.shapes, self.fit.beta
        of = own if beta is None else np.append(beta, own[len(beta) :])
        rows, factors = shapes.rows, np.exp(shapes.applied_factors(of))
        visited = np.flatnonzero(rows)
        # Usual times have the stalls of their shapes: where F leaves these out, ``mean_factor`` counts them.
        work = shapes.usual_work(visited, self.features.names) if shapes.applied else [None] * len(visited)
        return {
            cell_name(c): ShapeFactorSnapshot(factor=float(factors[c]), rows=float(rows[c]), usual=usual)
            for c, usual in zip(visited.tolist(), work, strict=True)
        }

    def context_us_per_token(self) -> float | None:
        """What a token of decode context costs among steps of about one size; None where that is not sure."""
        names = self.features.names
        if _CONTEXT_TOKENS not in names:
            return None
        return self.fit.strata.slope_inside(names.index(_CONTEXT_TOKENS), self.weighing.scale)

    def effective_rows(self) -> float:
        """Rows that the published coefficients rest on, after forgetting and down-weighting."""
        return self.fit.strata.effective_rows() if self.held is None else float(self.held.weight.sum())

    def donation(self) -> Prior | None:
        """What another configuration may start from; None before the first fit."""
        if not self.started:
            return None
        per_row = self.fit.per_row
        if self.holding:
            per_row = self.statistics().diagonal()[: self.fit.p] / max(1.0, self.effective_rows())
        return Prior.of_donor(self.fit.beta, per_row)

    def mean_us(self) -> float | None:
        """Mean time per step (per request) over the remembered rows."""
        means = self.means.per_step()
        return None if means is None else float(means[-2])

    def mean_factor(self) -> float | None:
        """Mean time per robustly predicted time over the remembered rows; None before the first fit."""
        return self.means.factor(self.fit.beta) if self.started else None

    def snapshot(self) -> ModelSnapshot | None:
        """The model as published; None before the first fit."""
        if not self.started:
            return None
        told = model_snapshot(self.features.columns, self.fit.beta, self.means.per_step(), self.diagnosis())
        return msgspec.structs.replace(
            told,
            rows=self.rows,
            effective_rows=self.effective_rows(),
            error=self.error.snapshot(),
            scale=self.weighing.scale,
        )

    def of_windows(self, told: ModelSnapshot, rows: Design) -> ModelSnapshot:
        """The published model with the error bars of rows between two scrapes of a page; ``rows``: the last."""
        p = len(self.features)
        covariance = jackknife(rows, self.fit.beta[:p], self.weighing.scale, self.fit.intercept[:p])
        if covariance is not None:
            published = [self.features.names.index(feature.name) for feature in told.features]
            covariance = covariance[np.ix_(published, published)]
        return of_windows(told, covariance)
