"""The ``rls`` learner: decayed statistics, robust relative weights, ridge and NNLS.

Rows of one feature set become z = [x, phase, y, l], (n, q), and go to the statistics (online/rls/members.py). The first
256 are held and fitted together (online/rls/startup.py); until then every block refits all of them.

Guarantee: reading changes nothing that is learned later.
"""

from __future__ import annotations

import msgspec
import numpy as np

from online.blocks import Design, cell_name, median_of
from online.constants import TINY_US
from online.drift import Speed
from online.features import FeatureSet
from online.rows import PHASES, Floats, Ints
from online.snapshot import ModelSnapshot, ShapeFactorSnapshot
from online.state import StateError, Stateful, Tree

from .error_bars import jackknife
from .identify import Diagnosis, model_snapshot, of_windows
from .learner_settings import LearnerSettings
from .members import Members
from .operating_points import OperatingPoints
from .prior import Prior
from .size_slopes import slope_inside
from .slow_member import SlowMember
from .startup import Start, Startup, fit_start

_CONTEXT_TOKENS = "decode_context_tokens"


class RlsLearner(Stateful):
    """One feature set on one target of one configuration.

    Args:
        features: columns it reads.
        settings: bounds and rates.
        prior: what is known of the coefficients before the first row.
        slow_kind: what keeps and solves the published statistics.

    Attributes:
        phases: phase columns; they exist from the first row that starts or ends on another stamp than ts_start.
        rows: rows learned.
        startup: the rows held before the first statistics.
        members: the published statistics, with their weights, errors and monitor.
    """

    SAVED = ("rows", "startup", "members")

    publishes = True

    def __init__(
        self,
        features: FeatureSet,
        settings: LearnerSettings,
        prior: Prior | None = None,
        slow_kind: type[SlowMember] = SlowMember,
    ) -> None:
        self.features = features
        self.settings = settings
        self.phases = 0
        self.rows = 0
        self.startup = Startup(settings.start_rows)
        self.members = Members(features, settings, prior, slow_kind)

    @property
    def p(self) -> int:
        """The number of columns: features and phases."""
        return self.members.slow.p

    @property
    def started(self) -> bool:
        """Whether there was a first fit."""
        return self.startup.started

    def to_state(self) -> Tree:
        """See Stateful."""
        return super().to_state() | {"has_phases": self.phases > 0}

    def from_state(self, state: Tree) -> None:
        """See Stateful; phase columns make room for theirs first, and rows that are held have this one's columns."""
        if state["has_phases"] is True:
            self.open_phases()
        super().from_state(state)
        held = self.startup.held
        if held is not None and held.x.shape[1] != len(self.features):
            raise StateError(f"held rows of {held.x.shape[1]} columns, expected {len(self.features)}")

    def offer_prior(self, prior: Prior) -> None:
        """Take a prior, unless there is one or learning has begun."""
        if not self.started and self.members.slow.prior is None:
            self.members.slow.prior = prior.sized(self.p)

    def adopt_shapes(self, donor: RlsLearner) -> None:
        """Begin with the shape factors of a donor of the same columns, half believed, unless learning has begun."""
        if donor.started and not self.rows and donor.features.names == self.features.names:
            self.members.shapes.adopt(donor.members.shapes)

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
        self.members.means.learn(z, float(block.steps @ block.weight))
        if not self.startup.holding:
            return self.members.learn(block, z, speed)
        log_ratio = self.members.score(block, self.members.predict(z)) if self.started else None
        self.startup.hold(block)
        self.refit()
        return log_ratio

    def open_phases(self) -> None:
        """Make room for the phase columns, which are free of sign and not published."""
        if not self.phases:
            self.phases = len(PHASES)
            self.members.widen(self.phases)

    def _augment(self, block: Design) -> Floats:
        """Rows z, (n, q)."""
        n, p = len(block), len(self.features)
        z = np.empty((n, self.p + 2))
        z[:, :p] = block.x
        if self.phases:
            z[:, p : self.p] = block.phase
        z[:, -2] = block.elapsed_us
        z[:, -1] = block.steps
        return z

    # ---------------------------------------------------------------- the first fit

    def refit(self, *, release: bool = False) -> None:
        """Fit all held rows, if they are enough; once complete, or with ``release``, they become statistics."""
        held, members = self.startup.held, self.members
        if held is None or not (release or self.startup.fittable):
            return
        median_us = median_of(held.elapsed_us / held.steps)
        members.weighing.median_us = members.weighing.start_median_us = median_us
        z, start = self._fit(held)
        members.start(held, z, start.scale)
        self.startup.started = True
        if release or self.startup.complete:
            members.release(held, z, start)
            self.startup.end()

    def _fit(self, held: Design) -> tuple[Floats, Start]:
        """Held rows z (n, q) and their weights; beta solves them."""
        slow, weighing = self.members.slow, self.members.weighing
        z = self._augment(held)

        def solve_for(g: Floats, scale: float) -> Floats:
            return slow.solve(g, scale)

        return z, fit_start(z, held.weight, solve_for, robust=weighing.robust)

    # ---------------------------------------------------------------- reading

    def predict(self, block: Design) -> Floats:
        """By the published coefficients, phases left out: microseconds, (n,)."""
        return block.x @ self.members.slow.beta[: len(self.features)]

    def statistics(self) -> Floats:
        """Sum of w z z' behind the published coefficients, (q, q); held rows are fitted again, with the same result."""
        if (held := self.startup.held) is None:
            return self.members.slow.strata.total()
        z, start = self._fit(held)
        self.members.weighing.scale = start.scale
        return (z * start.weight[:, None]).T @ z

    def points(self) -> OperatingPoints | None:
        """Statistics by operating point behind the published coefficients; of held rows none."""
        return self.members.slow.strata.points

    def diagnosis(self) -> Diagnosis:
        """Error bars and status of the published coefficients; needs a first fit."""
        if (held := self.startup.held) is None:
            return self.members.diagnosis(self.statistics(), self.effective_rows())
        return self.members.diagnosis_of_held(held, *self._fit(held))

    def log_ratio(self, block: Design) -> Floats:
        """log(y / (x beta F)) of each row by the published coefficients and shape factors, (n,)."""
        slow, x = self.members.slow, self._augment(block) if self.phases else block.x
        prediction = np.maximum(x[:, : slow.p] @ slow.beta, TINY_US)
        return np.log(block.elapsed_us / prediction) - self.log_factors(block.cell)

    def log_factors(self, cell: Ints) -> Floats:
        """Log F of each row's batch shape, (n,); 0 where the shape was never seen."""
        return self.members.shapes.applied_factors(self.members.slow.beta)[cell]

    def shape_factors(self, beta: Floats | None = None) -> dict[str, ShapeFactorSnapshot]:
        """Factor of each batch shape that was seen, by name: of these coefficients (p,), else of its own."""
        shapes, own = self.members.shapes, self.members.slow.beta
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
        names, strata = self.features.names, self.members.slow.strata
        if _CONTEXT_TOKENS not in names:
            return None
        return slope_inside(strata.without_prefill(), names.index(_CONTEXT_TOKENS), self.members.weighing.scale)

    def effective_rows(self) -> float:
        """Rows that the published coefficients rest on, after forgetting and down-weighting."""
        held = self.startup.held
        return self.members.slow.strata.effective_rows() if held is None else float(held.weight.sum())

    def donation(self) -> Prior | None:
        """What another configuration may start from; None before the first fit."""
        slow = self.members.slow
        if not self.started:
            return None
        if self.startup.holding:
            per_row = self.statistics().diagonal()[: self.p] / max(1.0, self.effective_rows())
            return Prior.of_donor(slow.beta, per_row)
        return Prior.of_donor(slow.beta, slow.per_row)

    def mean_us(self) -> float | None:
        """Mean time per step (per request) over the remembered rows."""
        means = self.members.means.per_step()
        return None if means is None else float(means[-2])

    def mean_factor(self) -> float | None:
        """Mean time per robustly predicted time over the remembered rows; None before the first fit."""
        return self.members.means.factor(self.members.slow.beta) if self.started else None

    def snapshot(self) -> ModelSnapshot | None:
        """The model as published; None before the first fit."""
        if not self.started:
            return None
        members = self.members
        told = model_snapshot(self.features.columns, members.slow.beta, members.means.per_step(), self.diagnosis())
        return msgspec.structs.replace(
            told,
            rows=self.rows,
            effective_rows=self.effective_rows(),
            error=members.scores.error.snapshot(),
            scale=members.weighing.scale,
        )

    def of_windows(self, told: ModelSnapshot, rows: Design) -> ModelSnapshot:
        """The published model with the error bars of rows between two scrapes of a page; ``rows``: the last."""
        p, slow = len(self.features), self.members.slow
        covariance = jackknife(rows, slow.beta[:p], self.members.weighing.scale, slow.intercept[:p])
        if covariance is not None:
            published = [self.features.names.index(feature.name) for feature in told.features]
            covariance = covariance[np.ix_(published, published)]
        return of_windows(told, covariance)
