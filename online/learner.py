"""The ``rls`` learner: decayed statistics, robust relative weights, ridge and NNLS; a slow and a fast member.

    slow  what is published: stratified statistics, half-life max(4000 steps, 10 min) per stratum
    fast  for live prediction: one statistic, half-life 300 steps, prior = the slow member's beta, tau = 25 % of it

Both see every block once: predict (that is the prequential error), then weigh by their own prediction, then learn,
then solve. The first rows (256) are held and fitted together by four rounds of reweighting, because a robust weight
needs a prediction and the first prediction needs a robust fit; until then every block refits all of them.

The champion predicts live: the member with the lower decayed median error, replaced only by one 10 % better.
Guarantee: published coefficients do not depend on the fast member or on anything that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from online.blocks import Design
from online.drift import DriftMonitor, DriftSettings, Fit, Verdict
from online.errors import PrequentialError
from online.features import FeatureSet
from online.hac import Meat
from online.identify import Diagnosis, Evidence, Solved, diagnose
from online.intervals import Intervals
from online.robust import FLOOR, bisquare, irls_scale, middle, step_scale, weights
from online.rows import PHASES, Floats, Target
from online.snapshot import FeatureSnapshot, ModelSnapshot
from online.solve import Mask, solve
from online.strata import Strata

SLOW, FAST = 0, 1
_HUBER_PASSES, _IRLS_PASSES = 6, 9
_MIN_START_ROWS = 3
_TINY_US = 1e-9


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and rates of one ``rls`` learner (algorithms: the module's docstring)."""

    half_life_steps: float = 4000.0
    half_life_us: float = 600e6
    fast_half_life_steps: float = 300.0
    start_rows: int = 256
    fast_prior_share: float = 0.25
    fast_prior_floor: float = 0.01
    alarm_keep: float = 0.02
    drift: DriftSettings = DriftSettings()
    champion_rate: float = 0.08
    champion_advantage: float = 0.9


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of each coefficient, (p,), before any row; infinite = nothing known."""

    mean: Floats
    sd: Floats


class RlsLearner:
    """One feature set on one target of one configuration."""

    def __init__(self, features: FeatureSet, settings: LearnerSettings, prior: Prior | None = None) -> None:
        self.features = features
        self.settings = settings
        self.robust = features.target is not Target.POST_DECODE
        self.phases = len(PHASES) if features.target is Target.STEP_TIME else 0
        self.p = len(features) + self.phases
        columns = features.columns
        self._free: Mask = np.array([c.signed for c in columns] + [True] * self.phases)
        self.signed = any(c.signed for c in columns)
        self._shrink = np.array([c.shrink for c in columns] + [0.0] * self.phases)
        self.prior = prior
        self.slow = Strata(self.p + 2, settings.half_life_steps, settings.half_life_us)
        self.fast = np.zeros_like(self.slow.g[0])
        self.beta = np.zeros((self.p, 2))
        self.live: Mask = np.zeros(self.p, np.bool_)
        self.passive: Mask = np.zeros((self.p, 2), np.bool_)
        self.scale = np.full(2, 0.05)
        self.median_us = 0.0
        self.mean_weight = 0.0
        self.rows = 0
        self.start: list[Design] | None = []
        self.started = False
        self.error = PrequentialError()
        self.live_error = PrequentialError()
        self.recent = np.zeros(2)
        self.champion = SLOW
        self.sums = np.zeros(self.p + 2)
        self.meat = Meat(self.p)
        self.intervals = Intervals()
        self.drift = DriftMonitor(self.p, settings.drift)
        self.trial: Strata | None = None

    # ---------------------------------------------------------------- learning

    def learn(self, block: Design) -> None:
        """Predict, score, learn, solve; block.x has this set's columns only and is finite."""
        z = self._augment(block)
        if self.started:
            prediction = z[:, : self.p] @ self.beta
            self._score(block, prediction)
            if self.start is None and self.robust:
                prediction = self._watch(block, z, prediction)
        self.rows += len(block)
        self._sum_plainly(block, z)
        if self.start is not None:
            self._learn_start(block)
        else:
            self._learn_block(block, z, prediction)

    def _augment(self, block: Design) -> Floats:
        n, p = len(block), len(self.features)
        z = np.empty((n, self.p + 2))
        z[:, :p] = block.x
        if self.phases:
            z[:, p : self.p] = block.phase
        z[:, -2] = block.elapsed_us
        z[:, -1] = block.steps
        return z

    def _score(self, block: Design, prediction: Floats) -> None:
        y = block.elapsed_us[:, None]
        ape = np.abs(prediction - y) / y
        log_ratio = np.log(block.elapsed_us / np.maximum(prediction[:, self.champion], _TINY_US))
        self.intervals.learn(block, log_ratio)
        self.error.learn(ape[:, SLOW])
        self.live_error.learn(ape[:, self.champion])
        rate = self.settings.champion_rate * min(1.0, len(block) / 32.0)
        seen = np.minimum(middle(ape), 1.0)
        self.recent = seen if not self.recent.any() else self.recent + rate * (seen - self.recent)
        other = 1 - self.champion
        if self.trial is None and self.recent[other] < self.settings.champion_advantage * self.recent[self.champion]:
            self.champion = other

    def _watch(self, block: Design, z: Floats, prediction: Floats) -> Floats:
        """Look for a change of speed and act on it; the prediction to learn with."""
        beta, x = self.beta[:, SLOW], z[:, : self.p]
        log_ratio = np.log(block.elapsed_us / np.maximum(prediction[:, SLOW], _TINY_US))
        fit = Fit(beta, float(self.scale[SLOW]))
        verdict = self.drift.learn(block.cell, x, log_ratio, fit, int(block.end_ns[-1]))
        if verdict is Verdict.NOTHING:
            return prediction
        if verdict is Verdict.ALARM:
            self._suspect()
        else:
            self._settle(self.drift.gain if verdict is Verdict.CONFIRMED else 1.0)
        return x @ self.beta

    def _suspect(self) -> None:
        """The same work seems to take ``gain`` times as long: predict so, and learn on the side until it is sure."""
        if self.trial is not None:
            self._settle(1.0)
        self.trial = Strata(self.p + 2, self.settings.half_life_steps, self.settings.half_life_us)
        self.fast[:] = 0.0
        self.beta[:, FAST] = self.drift.gain * self.beta[:, SLOW]
        self.champion = FAST
        self.scale *= 2.0
        self.intervals.widen()

    def _settle(self, gain: float) -> None:
        """Join what was learned on the side; a confirmed gain first leaves little of what was known before."""
        assert self.trial is not None  # noqa: S101  only after a suspicion
        if gain != 1.0:
            keep = self.settings.alarm_keep
            self.slow.discount(keep, gain)
            self.meat.discount(keep)
            self.sums *= keep
            self.sums[-2] *= gain
        self.slow.decay(self.trial.clock)
        self.slow.add(self.trial)
        self.trial = None
        self.recent[:] = self.recent.min()
        self._solve_slow(self.slow.total())
        self._solve_fast()

    def _sum_plainly(self, block: Design, z: Floats) -> None:
        """Unweighted decayed sums of z: what the mean is, stalls and all."""
        spent = float(block.steps.sum()) / self.settings.half_life_steps
        self.sums = self.sums * 2.0**-spent + z.sum(axis=0)

    def _learn_start(self, block: Design) -> None:
        assert self.start is not None  # noqa: S101  the caller looked
        self.start.append(block)
        held = Design.concatenate(self.start)
        self.start = [held]
        if len(held) < _MIN_START_ROWS:
            return
        z = self._augment(held)
        weight, share = self._fit_start(held, z)
        if len(held) >= self.settings.start_rows:
            self.slow.learn(held, z, weight, share)
            self._learn_fast(held, z, weight)
            self._solve_fast()
            self.start = None

    def _fit_start(self, held: Design, z: Floats) -> tuple[Floats, Floats]:
        """Reweighted fits of all held rows; sets beta, scale and medians, returns the last weights."""
        y, root = held.elapsed_us[:, None], np.sqrt(held.steps)[:, None]
        self.median_us = float(np.median(held.elapsed_us / held.steps))
        self.mean_weight = 1.0 / self.median_us**2
        floor = FLOOR * self.median_us * held.steps[:, None]
        prediction, scale = y, np.array([1.0])
        share = np.ones(len(held))
        weight = self.mean_weight * held.weight
        for i in range(_IRLS_PASSES if self.robust else 1):
            if self.robust:
                u, h, w = weights(y, root, prediction, floor, scale)
                cut = bisquare(u[:, 0] / scale[0]) if i >= _HUBER_PASSES else 1.0
                weight, share = w[:, 0] * held.weight * cut, h[:, 0] * cut
            left = z * weight[:, None]
            self._solve_slow(left.T @ z)
            prediction = z[:, : self.p] @ self.beta[:, :1]
            u, _, _ = weights(y, root, prediction, floor, scale)
            scale = np.array([irls_scale(u[:, 0])])
        self.scale[:] = scale
        self.beta[:, FAST] = self.beta[:, SLOW]
        self.passive[:, FAST] = self.passive[:, SLOW]
        self.started = True
        return weight, share

    def _learn_block(self, block: Design, z: Floats, prediction: Floats) -> None:
        y = block.elapsed_us[:, None]
        steps = block.steps[:, None]
        root = np.sqrt(steps)
        if self.robust:
            u, h, w = weights(y, root, prediction, FLOOR * self.median_us * steps, self.scale)
            w *= block.weight[:, None]
            share = h[:, SLOW]
            self.scale = step_scale(self.scale, u)
        else:
            w = np.repeat(self.mean_weight * block.weight[:, None], 2, axis=1)
            share = np.ones(len(block))
        if self.trial is not None:
            # What the side learner sees, it judges by the suspected speed.
            self.trial.learn(block, z, w[:, FAST], h[:, FAST])
            self._learn_fast(block, z, w[:, FAST])
            self._solve_fast()
            return
        kept = self.slow.learn(block, z, w[:, SLOW], share)
        scores = z[:, : self.p] * (w[:, SLOW] * (block.elapsed_us - prediction[:, SLOW]))[:, None]
        groups = block.grouped()
        self.meat.learn(groups, kept, scores[groups.order])
        self._learn_fast(block, z, w[:, FAST])
        self._solve_slow(self.slow.total())
        self._solve_fast()
        rate = min(1.0, len(block) / 512.0)
        self.median_us += rate * (float(middle(block.elapsed_us / block.steps)) - self.median_us)

    def _learn_fast(self, block: Design, z: Floats, weight: Floats) -> None:
        age = np.cumsum(block.steps) / self.settings.fast_half_life_steps
        left = z * (weight * np.exp2(age - age[-1]))[:, None]
        new = left.T @ z
        self.fast = self.fast * 2.0 ** -min(float(age[-1]), 1000.0) + new[np.triu_indices(self.p + 2)]

    # ---------------------------------------------------------------- solving

    def _precision(self) -> tuple[Floats | None, Floats | None]:
        shrunk = self._shrink / max(self.median_us, 1e-9) ** 2 if self._shrink.any() else None
        if self.prior is None:
            return shrunk, None
        known = (self.scale[SLOW] / self.prior.sd) ** 2
        return known if shrunk is None else known + shrunk, self.prior.mean

    def _solve_slow(self, g: Floats) -> None:
        p = self.p
        precision, mean = self._precision()
        solution = solve(
            g[:p, :p],
            g[:p, p],
            self._free,
            self.passive[:, SLOW] | ~self.live,
            prior_precision=precision,
            prior_mean=mean,
        )
        self.beta[:, SLOW], self.passive[:, SLOW], self.live = solution.beta, solution.passive, solution.live

    def _solve_fast(self) -> None:
        p = self.p
        g = self.fast[self.slow._expand]  # noqa: SLF001  one layout, two statistics
        slow = self.beta[:, SLOW] * (self.drift.gain if self.trial is not None else 1.0)
        rms = np.sqrt(self.slow.total().diagonal()[:p] / max(float(self.slow.n1.sum()), 1.0))
        tau = self.settings.fast_prior_share * np.abs(slow) + self.settings.fast_prior_floor / np.maximum(rms, 1e-150)
        precision = (self.scale[SLOW] / tau) ** 2
        solution = solve(
            g[:p, :p], g[:p, p], self._free, self.passive[:, FAST], prior_precision=precision, prior_mean=slow
        )
        self.beta[:, FAST], self.passive[:, FAST] = solution.beta, solution.passive

    # ---------------------------------------------------------------- reading

    def predict(self, x: Floats, *, live: bool = True) -> Floats:
        """Microseconds for rows x (n, p) without phases: by the champion, or by what is published."""
        member = self.champion if live else SLOW
        return x @ self.beta[: len(self.features), member]

    def diagnose(self) -> Diagnosis:
        """Error bars and status of the slow member's coefficients."""
        p = self.p
        g = self._statistics()
        precision, _ = self._precision()
        known = np.zeros(p) if precision is None else precision
        meat, windows = self.meat.total()
        evidence = Evidence(
            a=g[:p, :p],
            precision=known,
            with_steps=g[:p, p + 1],
            steps=max(float(g[p + 1, p + 1]), 1e-300),
            variance=float(self.scale[SLOW]) ** 2,
            meat=meat,
            windows=windows,
        )
        return diagnose(evidence, Solved(self.beta[:, SLOW], self.passive[:, SLOW], self.live, known > 0.0))

    def _statistics(self) -> Floats:
        if self.start is None:
            return self.slow.total()
        held = Design.concatenate(self.start)
        z = self._augment(held)
        weight, _ = self._fit_start(held, z)
        return (z * weight[:, None]).T @ z

    def effective_rows(self) -> float:
        """Rows that the published coefficients rest on, after forgetting and down-weighting."""
        return self.slow.effective_rows() if self.start is None else float(self.rows)

    def mean_factor(self) -> float | None:
        """Mean time per robustly predicted time over the remembered rows; None before the first fit."""
        predicted = float(self.sums[: self.p] @ self.beta[:, SLOW])
        return float(self.sums[-2]) / predicted if self.started and predicted > 0.0 else None

    def mean_us(self) -> float | None:
        """Mean time per step (per request) over the remembered rows."""
        return float(self.sums[-2] / self.sums[-1]) if self.sums[-1] > 0.0 else None

    def snapshot(self) -> ModelSnapshot | None:
        """What is published; None before the first fit."""
        if not self.started:
            return None
        diagnosis = self.diagnose()
        features: list[FeatureSnapshot] = []
        for j, column in enumerate(self.features.columns):
            if not self.live[j] or self.signed:
                continue
            features.append(
                FeatureSnapshot(
                    name=column.name,
                    unit=column.unit,
                    coefficient=float(self.beta[j, SLOW]),
                    status=diagnosis.status[j],
                    stderr=float(diagnosis.stderr[j]),
                    live_coefficient=float(self.beta[j, self.champion]),
                    learned_share=float(diagnosis.share[j]),
                    excitation=_finite(diagnosis.excitation[j]),
                    vif=_finite(diagnosis.vif[j]),
                )
            )
        return ModelSnapshot(
            features=features,
            rows=self.rows,
            effective_rows=self.effective_rows(),
            condition_number=diagnosis.condition,
            error=self.error.snapshot(),
            live_error=self.live_error.snapshot(),
            scale=float(self.scale[SLOW]),
        )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
