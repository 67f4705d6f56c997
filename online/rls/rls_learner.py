"""The ``rls`` learner: decayed statistics, robust relative weights, ridge and NNLS; a slow and a fast member.

    slow  what is published: stratified statistics, half-life max(4000 steps, 10 min) per stratum (online/rls/strata.py)
    fast  for live prediction: half-life 300 steps around the slow member (online/rls/fast_member.py)

Both see every block once: predict (that is the prequential error), weigh by their own prediction, learn, solve. The
first 256 rows are held and fitted together (online/rls/startup.py); until then every block refits all of them.

The champion predicts live: the member with the lower decayed median error, replaced only by one 10 % better.

A suspected change of speed (online/drift) is predicted at once, by the fast member, and believed later: until it is
confirmed the slow member's rows go to statistics on the side. Confirmed, what was known before is kept at 2 % and
multiplied by the gain, and the rows on the side join it; refuted, they are forgotten and nothing has happened.

Guarantee: published coefficients are a function of the published lane's rows alone, not of the fast member, the quick
lane or the intervals.
"""

from __future__ import annotations

import msgspec
import numpy as np

from online.blocks import Design
from online.drift import DriftMonitor, DriftSettings, Fit, Verdict
from online.features import FeatureSet
from online.prediction import Intervals, PrequentialError, binned
from online.rows import PHASES, Floats, Mask, Target
from online.snapshot import ModelSnapshot

from .fast_member import FAST, SLOW, FastMember
from .hac import Meat
from .learner_report import model_snapshot
from .prior import Prior
from .robust import FLOOR, middle, step_scale, weights
from .solve import solve
from .startup import fit_start
from .strata import Strata

MIN_START_ROWS = 3
_TINY_US = 1e-9
_BLOCK = 32.0


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and rates of one ``rls`` learner (algorithms: the module's docstring)."""

    half_life_steps: float = 4000.0
    half_life_us: float = 600e6
    fast_half_life_steps: float = 300.0
    start_rows: int = 256
    fast_prior_share: float = 0.25
    fast_prior_floor: float = 0.01
    champion_rate: float = 0.08
    champion_advantage: float = 0.9
    alarm_keep: float = 0.02
    drift: DriftSettings = DriftSettings()


class RlsLearner:
    """One feature set on one target of one configuration.

    Attributes:
        beta: published coefficients and phases, (p,).
        live: columns with evidence or a prior, (p,).
        scale: robust relative scale of the slow and the fast member, (2,).
        start: held rows, until there are enough; then None.
        trial: statistics on the side while a change of speed is suspected.
    """

    extra: tuple[str, ...] = ()
    """Names of attributes that a subclass adds to the state."""

    def __init__(self, features: FeatureSet, settings: LearnerSettings, prior: Prior | None = None) -> None:
        columns = features.columns
        self.features = features
        self.settings = settings
        # A robust fit of a skewed time is far off in the mean, and the mean of post_decode is what adds up to E2E.
        self.robust = features.target is not Target.POST_DECODE
        # Phase columns exist from the first row that starts or ends on another stamp than ts_start.
        self.phases = 0
        self.p = len(features)
        self.signed = any(c.signed for c in columns)
        self.free: Mask = np.array([c.signed for c in columns])
        self.shrink = np.array([c.shrink for c in columns])
        self.shrunk = bool(self.shrink.any())
        self.prior = None if prior is None else prior.sized(self.p)
        self.beta = np.zeros(self.p)
        self.live: Mask = np.zeros(self.p, np.bool_)
        self.passive: Mask = np.zeros(self.p, np.bool_)
        self.per_row = np.zeros(self.p)
        self.evidence, self.slow_rows = np.zeros((self.p, self.p)), 1.0
        self.scale = np.full(2, 0.05)
        self.median_us = self.start_median_us = 0.0
        self.rows = 0
        self.champion = SLOW
        self.quick = False
        self.recent = np.zeros(2)
        self.sums = np.zeros(self.p + 2)
        self.started = False
        self.start: Design | None = None
        self.holding = True
        self.trial: Strata | None = None
        self.slow = self.new_strata()
        self.fast = FastMember(
            self.p, settings.fast_half_life_steps, settings.fast_prior_share, settings.fast_prior_floor
        )
        self.meat = Meat(self.p)
        self.error, self.live_error = PrequentialError(), PrequentialError()
        self.intervals = Intervals()
        self.drift = DriftMonitor(self.p, settings.drift)

    def new_strata(self) -> Strata:
        """Empty statistics of this learner's layout."""
        return Strata(self.p + 2, self.settings.half_life_steps, self.settings.half_life_us)

    def open_phases(self) -> None:
        """Make room for the phase columns, which are free of sign and not published."""
        if self.phases:
            return
        p, more = self.p, len(PHASES)
        self.phases, self.p = more, p + more
        self.slow = self.slow.widened(p, more)
        self.trial = None if self.trial is None else self.trial.widened(p, more)
        self.fast = self.fast.widened(more)
        self.meat = self.meat.widened(more)
        self.drift.cells.widen(more)
        self.prior = None if self.prior is None else self.prior.sized(self.p)
        self.free = np.concatenate([self.free, np.ones(more, np.bool_)])
        for name in ("shrink", "beta", "live", "passive", "per_row"):
            value = getattr(self, name)
            setattr(self, name, np.concatenate([value, np.zeros(more, value.dtype)]))
        self.sums = np.concatenate([self.sums[:p], np.zeros(more), self.sums[p:]])
        self.evidence = np.pad(self.evidence, (0, more))

    # ---------------------------------------------------------------- learning

    def learn(self, block: Design) -> Floats | None:
        """Predict, score, learn, solve; block.x has this set's columns only and is finite.

        Returns:
            log(y / prediction) by the published coefficients as they were before, (n,); None before the first fit.
        """
        if not self.phases and block.phase.any():
            self.open_phases()
        z = self._augment(block)
        self.rows += len(block)
        spent = float(block.steps @ block.weight) / self.settings.half_life_steps
        self.sums = self.sums * 2.0**-spent + z.sum(axis=0)
        if self.holding:
            scored = self._score(block, z[:, : self.p] @ self._both()) if self.started else None
            self._learn_start(block)
            return scored
        x = z[:, : self.p]
        prediction = x @ self._both()
        log_ratio = self._score(block, prediction)
        if self.robust and self._watch(block, x, log_ratio):
            prediction = x @ self._both()
        self._learn_block(block, z, prediction)
        return log_ratio

    def learn_quick(self, block: Design) -> None:
        """Rows of the quick lane: they move the fast member and its scores, never what is published."""
        if self.holding:
            return
        if not self.phases and block.phase.any():
            self.open_phases()
        self.quick = True
        z = self._augment(block)
        prediction = z[:, : self.p] @ self._both()
        ratio = np.maximum(prediction.T, _TINY_US) / block.elapsed_us
        ape = np.abs(ratio - 1.0)
        self._score_live(block, ape, -np.log(ratio), binned(ape[self.champion]))
        _, w = self._weigh(block, prediction, self.scale[FAST:])
        self.fast.learn(block.steps, z, w[:, FAST])
        self._solve_fast()

    def _augment(self, block: Design) -> Floats:
        n, p = len(block), len(self.features)
        z = np.empty((n, self.p + 2))
        z[:, :p] = block.x
        if self.phases:
            z[:, p : self.p] = block.phase
        z[:, -2] = block.elapsed_us
        z[:, -1] = block.steps
        return z

    def _both(self) -> Floats:
        both = np.empty((self.p, 2))
        both[:, SLOW], both[:, FAST] = self.beta, self.fast.beta
        return both

    def _score(self, block: Design, prediction: Floats) -> Floats:
        """Prequential errors of both members; log(y / prediction) of the slow one, (n,)."""
        ratio = np.maximum(prediction.T, _TINY_US) / block.elapsed_us
        ape = np.abs(ratio - 1.0)
        log_ratio = -np.log(ratio)
        counted = binned(ape[SLOW])
        self.error.add_counts(*counted)
        if not self.quick:
            self._score_live(block, ape, log_ratio, counted if self.champion == SLOW else binned(ape[FAST]))
        slow: Floats = log_ratio[SLOW]
        return slow

    def _score_live(self, block: Design, ape: Floats, log_ratio: Floats, counted: tuple[Floats, float, int]) -> None:
        self.live_error.add_counts(*counted)
        self.intervals.learn(block, log_ratio[self.champion])
        rate = self.settings.champion_rate * min(1.0, len(block) / _BLOCK)
        seen = np.minimum(middle(ape), 1.0)
        self.recent = self.recent + rate * (seen - self.recent) if self.recent.any() else seen
        other = 1 - self.champion
        if self.trial is None and self.recent[other] < self.settings.champion_advantage * self.recent[self.champion]:
            self.champion = other

    def _learn_start(self, block: Design) -> None:
        self.start = block if self.start is None else Design.concatenate([self.start, block])
        if len(self.start) >= MIN_START_ROWS:
            self.refit(release=len(self.start) >= self.settings.start_rows)

    def refit(self, *, release: bool) -> None:
        """Fit all held rows; ``release`` turns them into statistics."""
        held = self.start
        assert held is not None  # noqa: S101  only called while rows are held
        self.median_us = float(np.median(held.elapsed_us / held.steps))
        z = self._augment(held)
        start = fit_start(z, held.weight, self._solve_for, robust=self.robust)
        self.scale[:] = start.scale
        self.start_median_us = self.median_us
        self.fast.reset(self.beta)
        self.fast.passive = self.passive.copy()
        self.started = True
        if release:
            self.slow.learn(held, z, start.weight, start.share)
            self.fast.learn(held.steps, z, start.weight)
            self._solve_slow()
            self._solve_fast()
            self.start, self.holding = None, False

    def _solve_for(self, g: Floats, scale: float) -> Floats:
        self.scale[SLOW] = scale
        self._solve(g)
        return self.beta

    def _weigh(self, block: Design, prediction: Floats, scale: Floats) -> tuple[Floats, Floats]:
        """Huber's shares and weights, (n, 2); their residuals also move the scales given."""
        y, steps = block.elapsed_us[:, None], block.steps[:, None]
        if not self.robust:
            flat = np.repeat(block.weight[:, None] / self.start_median_us**2, 2, axis=1)
            return np.ones_like(flat), flat
        # Rows that overlap (weight < 1) tell of the same steps; this one alone tells of weight * steps.
        root = np.sqrt(steps * block.weight[:, None])
        u, share, w = weights(y, root, prediction, FLOOR * self.median_us * steps, self.scale)
        scale[:] = step_scale(self.scale, u)[-len(scale) :]
        return share, w

    def _learn_block(self, block: Design, z: Floats, prediction: Floats) -> None:
        if self.trial is not None:
            # What is learned on the side is judged by the suspected speed.
            prediction[:, SLOW] *= self.drift.gain
        share, w = self._weigh(block, prediction, self.scale)
        slow = self.slow if self.trial is None else self.trial
        kept = slow.learn(block, z, w[:, SLOW], share[:, SLOW])
        if self.trial is None:
            groups = block.grouped()
            scores = z[:, : self.p] * (w[:, SLOW] * (block.elapsed_us - prediction[:, SLOW]))[:, None]
            self.meat.learn(groups, kept, scores[groups.order])
            self._solve_slow()
        if not self.quick:
            self.fast.learn(block.steps, z, w[:, FAST])
            self._solve_fast()
        rate = min(1.0, len(block) / 512.0)
        self.median_us += rate * (float(middle(block.elapsed_us / block.steps)) - self.median_us)

    # ---------------------------------------------------------------- change of speed

    def _watch(self, block: Design, x: Floats, log_ratio: Floats) -> bool:
        """Look for a change of speed and act on it; True if predictions are no longer what they were."""
        fit = Fit(self.beta, float(self.scale[SLOW]), self.evidence, self.slow_rows)
        verdict = self.drift.learn(block.cell, x, log_ratio, fit, int(block.end_ns[-1]))
        if verdict is Verdict.NOTHING:
            return False
        if verdict is Verdict.ALARM:
            self._suspect()
        elif verdict is Verdict.CONFIRMED:
            self._believe(self.drift.gain)
        else:
            self.stop_trial()
        return True

    def _suspect(self) -> None:
        self.stop_trial()
        self.trial = self.new_strata()
        self.fast.reset(self.drift.gain * self.beta)
        self.champion = FAST
        self.scale *= 2.0
        self.intervals.widen()

    def release(self) -> None:
        """Turn held rows into statistics, although there are few."""
        if self.start is not None:
            self.refit(release=True)

    def stop_trial(self) -> None:
        """Give up a suspicion. Its rows were judged by a speed that was none, and are forgotten with it."""
        if self.trial is not None:
            self.trial = None
            self.recent[:] = self.recent.min()
            self._solve_fast()

    def restart_live(self) -> None:
        """Fast member and detector start over from the published coefficients, as after a merge."""
        if not self.holding:
            self._solve_slow()
        self.drift = DriftMonitor(self.p, self.settings.drift)
        self.fast.reset(self.beta)
        self.champion = SLOW
        self.recent = np.zeros(2)
        self.trial = None

    def _believe(self, gain: float) -> None:
        """Keep little of what was known, at the new speed, and join what was learned on the side."""
        assert self.trial is not None  # noqa: S101  only after a suspicion
        keep = self.settings.alarm_keep
        self.slow.discount(keep, gain)
        self.meat.discount(keep)
        self.sums *= keep
        self.sums[-2] *= gain
        self.slow.decay(self.trial.clock)
        self.slow.add(self.trial)
        self.trial = None
        self.recent[:] = self.recent.min()
        self._solve_slow()
        self._solve_fast()

    # ---------------------------------------------------------------- solving

    def precision(self) -> Floats | None:
        """H's diagonal without the solver's relative ridge, (p,); None = no prior of any kind."""
        shrunk = self.shrink / max(self.median_us, _TINY_US) ** 2 if self.shrunk else None
        if self.prior is None:
            return shrunk
        known = self.prior.precision(float(self.scale[SLOW]))
        return known if shrunk is None else known + shrunk

    def _solve(self, g: Floats) -> None:
        p = self.p
        mean = None if self.prior is None else self.prior.mean
        warm = self.passive | ~self.live
        found = solve(g[:p, :p], g[:p, p], self.free, warm, prior_precision=self.precision(), prior_mean=mean)
        self.beta, self.passive, self.live = found.beta, found.passive, found.live

    def _solve_slow(self) -> None:
        g = self.slow.total()
        self.evidence, self.slow_rows = g[: self.p, : self.p], max(float(self.slow.n1.sum()), 1.0)
        self.per_row = g.diagonal()[: self.p] / self.slow_rows
        self._solve(g)

    def _solve_fast(self) -> None:
        mean = self.beta if self.trial is None else self.drift.gain * self.beta
        self.fast.solve(mean, self.per_row, float(self.scale[SLOW]), self.free)

    # ---------------------------------------------------------------- reading

    def predict(self, x: Floats, *, live: bool = True) -> Floats:
        """Microseconds for rows x (n, p) without phases: by the champion, or by what is published."""
        beta = self.fast.beta if live and self.champion == FAST else self.beta
        return x @ beta[: len(self.features)]

    def statistics(self) -> Floats:
        """Sum of w z z' behind the published coefficients, (q, q)."""
        if self.start is None:
            return self.slow.total()
        z = self._augment(self.start)
        start = fit_start(z, self.start.weight, self._solve_for, robust=self.robust)
        self.scale[SLOW] = start.scale
        return (z * start.weight[:, None]).T @ z

    def snapshot(self) -> ModelSnapshot | None:
        """The model as published; None before the first fit."""
        return model_snapshot(self)

    def effective_rows(self) -> float:
        """Rows that the published coefficients rest on, after forgetting and down-weighting."""
        return float(len(self.start)) if self.start is not None else self.slow.effective_rows()

    def mean_factor(self) -> float | None:
        """Mean time per robustly predicted time over the remembered rows; None before the first fit."""
        predicted = float(self.sums[: self.p] @ self.beta)
        return float(self.sums[-2]) / predicted if self.started and predicted > 0.0 else None

    def mean_us(self) -> float | None:
        """Mean time per step (per request) over the remembered rows."""
        return float(self.sums[-2] / self.sums[-1]) if self.sums[-1] > 0.0 else None
