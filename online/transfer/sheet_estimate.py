"""The step time of a configuration by its data sheet, by what others share, and by its own capped evidence.

    beta = base + M theta
    theta = argmin (theta' A theta - 2 b' theta) / 2 + sum_j (theta_j - mu_j)^2 / (2 s_j^2)           q among them
    V    = M (A + S^-2)^-1 M'   se_j = sqrt V_jj

It is there from the first second (A = 0). Later it takes over from the learner's own coefficients where those cannot
tell context from requests or prefill (vif > 10), and before there are 64 rows, unless the rows contradict the sheet:
where it misfits them twice as much as their own fit, and by 5 % and 1 / (2 sqrt(rows held)) more, the machine is not
what the sheet says, and the own fit stands. Fewer than 64 rows that are slower than expected contradict nothing.

Where telemetry hides prefix hits, prefill is left out of the evidence and its price is the sheet's: tokens are told
that were not computed. Fewer than 64 rows that tell all columns apart (vif <= 10) do price it, as their own fit would.

Status of a coefficient, by what the data alone say:

    prior_only   their sd, sqrt (A^-1)_jj, is more than half the prior's
    weak         it is less, but vif > 10, or the error is more than 20 %
    identified   it is less
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from online.blocks import Design
from online.features import Facts
from online.rls import MORE, RlsLearner, RowWeights, contradicted
from online.rows import Floats
from online.snapshot import FeatureSnapshot, IntervalSnapshot, ModelSnapshot, Reason

from .capped_evidence import COLUMNS, MISFIT, PREFILL, Evidence, evidence_of, evidence_of_held, weights_of_held
from .shared_overheads import Estimate, estimate
from .sheet_systems import systems_told
from .sheet_terms import Population, SheetTerms

_VIF_MAX, _KNOWN, _SURE = 10.0, 0.5, 0.2
_TOLD = [0, 2, 3]
_ENOUGH_ROWS = 64
_PASSES, _SCATTERS = 6, 4
_TYPICAL = np.array([1.0, 0.0, 32_000.0, 32.0])
_TENTH, _WIDE_MAX = 1.2816, 2.3
"""Normal deviates of the tenth; a factor of ten, above which an interval says nothing."""
_SINGULAR = 1e-12


class SheetEstimate(NamedTuple):
    """beta (4,), the covariance of its errors (4, 4), status and reason."""

    beta: Floats
    covariance: Floats
    status: tuple[str, ...]
    reason: tuple[Reason | None, ...]
    spread: float
    """Relative sd of a typical step: 32 requests of 1,000 tokens."""

    def model(self, learned: ModelSnapshot | None, columns: tuple[tuple[str, str], ...]) -> ModelSnapshot:
        """As published, in place of what was learned; ``columns``: names and units."""
        before = {} if learned is None else {feature.name: feature for feature in learned.features}
        features = []
        stderr = np.sqrt(np.maximum(self.covariance.diagonal(), 0.0)).tolist()
        for j, (name, unit) in enumerate(columns):
            told = FeatureSnapshot(
                name=name,
                unit=unit,
                coefficient=float(self.beta[j]),
                status=self.status[j],
                reason=self.reason[j],
                stderr=stderr[j],
            )
            if (own := before.get(name)) is not None:
                kept = {
                    "learned_share": own.learned_share,
                    "excitation": own.excitation,
                    "vif": own.vif,
                    "form_error": own.form_error,
                }
                told = msgspec.structs.replace(told, mean=own.mean, **kept)
            features.append(told)
        covariance = self.covariance.tolist()
        if learned is None:
            return ModelSnapshot(features=features, rows=0, effective_rows=0.0, covariance=covariance)
        return msgspec.structs.replace(learned, features=features, covariance=covariance)

    def interval(self) -> IntervalSnapshot:
        """Of observed / predicted, before a row said so."""
        wide = min(_TENTH * float(np.hypot(self.spread, MISFIT)), _WIDE_MAX)
        return IntervalSnapshot(p10=float(np.exp(-wide)), p50=1.0, p90=float(np.exp(wide)))


class SheetPrior:
    """Of one configuration: what its sheet, the population and states of the same configuration say."""

    def __init__(self, facts: Facts, terms: SheetTerms, population: Population, known: Evidence | None = None) -> None:
        self.terms = terms
        self._facts = facts
        self._mean, self._sd = population.mean_of_all(), population.sd_of_all()
        self._known = known

    def before(self) -> SheetEstimate:
        """Before its first row."""
        return self._told(None, np.ones(COLUMNS))

    def systems_before(self) -> dict[str, ModelSnapshot]:
        """Other systems of which the sheet says something, before the first row."""
        return systems_told(self._facts, self._mean, self._sd)

    def after(self, learner: RlsLearner) -> SheetEstimate | None:
        """What to publish in place of what was learned; None where that stands on its own."""
        if not learner.started:
            return self.before()
        vif, held = np.nan_to_num(learner.diagnosis().vif[:COLUMNS], nan=np.inf), learner.startup.held
        columns = _TOLD if self.terms.hides_hits else slice(None)
        if not vif[columns].max() > _VIF_MAX and (held is None or len(held) >= _ENOUGH_ROWS):
            return None
        found = evidence_of(learner)
        evidence = self._held(learner, vif) if found is None else self._seen(found)
        told = self._told(evidence, vif)
        if held is not None and len(held) < _ENOUGH_ROWS and evidence.ratio(told.beta) > 1.0:
            return told  # slower than expected: caches and kernels are cold, and a sheet is no bound to that
        own = evidence.misfit(learner.members.slow.beta[:COLUMNS])
        more = MORE if held is None else MORE + 0.5 / float(np.sqrt(len(held)))
        return None if contradicted(evidence.misfit(told.beta), own, more) else told

    def _told(self, evidence: Evidence | None, vif: Floats) -> SheetEstimate:
        """The estimate as it is published."""
        used = None if evidence is None else self._used(evidence)
        found = self._solved(used)
        beta, covariance = self.terms.beta(found.theta), self._covariance(found)
        stderr = np.sqrt(np.maximum(covariance.diagonal(), 0.0))
        sd = np.where(self.terms.has, self._sd, 0.0)
        known = _KNOWN * np.sqrt(self.terms.matrix**2 @ sd**2)
        alone = np.full(COLUMNS, np.inf) if used is None else _alone(used.a)
        status, reason = [], []
        for j, sure in enumerate((stderr < _SURE * beta).tolist()):
            prior = not alone[j] < known[j]
            weak = None if prior else Reason.COLLINEAR if vif[j] > _VIF_MAX else None if sure else Reason.WIDE
            status.append("prior_only" if prior else "weak" if weak else "identified")
            reason.append(weak)
        step = float(_TYPICAL @ beta)
        spread = float(np.sqrt(max(_TYPICAL @ covariance @ _TYPICAL, 0.0))) / step
        return SheetEstimate(beta, covariance, tuple(status), tuple(reason), spread)

    def _seen(self, evidence: Evidence) -> Evidence:
        return evidence.without_prefill() if self.terms.hides_hits else evidence

    def weights_of(self, held: Design) -> RowWeights | None:
        """How operating points weigh a server's first rows where hits are hidden; None where they are told.

        Against what is expected, prefill left out, as the same rows were weighed while they were held.
        """
        if not self.terms.hides_hits:
            return None
        seen = _without_prefill(held)
        found = self._estimate(self._held_evidence(seen))
        weight, share = weights_of_held(seen, self.terms.beta(found.theta), self._covariance(found))
        return RowWeights(weight * held.steps, share)

    def _held(self, learner: RlsLearner, vif: Floats) -> Evidence:
        """Rows without weights, weighed by what is expected, which they move."""
        held = learner.startup.held
        assert held is not None  # noqa: S101  rows are held until they have weights
        without = self.terms.hides_hits and not vif.max() <= _VIF_MAX
        return self._held_evidence(_without_prefill(held) if without else held)

    def _held_evidence(self, held: Design) -> Evidence:
        expected = estimate(self.terms, self._known, self._mean, self._sd)
        for _ in range(_PASSES):
            evidence = evidence_of_held(held, self.terms.beta(expected.theta), self._covariance(expected))
            expected = self._estimate(evidence)
        return evidence

    def _estimate(self, evidence: Evidence) -> Estimate:
        return self._solved(self._used(evidence))

    def _used(self, evidence: Evidence) -> Evidence:
        """As it counts: where prefill is left out, by the means of its points."""
        used = evidence
        for _ in range(_SCATTERS if self.terms.hides_hits and not evidence.tells_prefill else 0):
            used = evidence.by_means(self.terms.beta(self._solved(used).theta))
        return used

    def _solved(self, used: Evidence | None) -> Estimate:
        whole = self._known
        if used is not None:
            whole = used if whole is None else replace(used, a=used.a + whole.a, b=used.b + whole.b)
        return estimate(self.terms, whole, self._mean, self._sd)

    def _covariance(self, found: Estimate) -> Floats:
        covariance: Floats = self.terms.matrix @ found.covariance @ self.terms.matrix.T
        return covariance


def _without_prefill(held: Design) -> Design:
    x = held.x.copy()
    x[:, PREFILL] = 0.0
    return replace(held, x=x)


def _alone(a: Floats) -> Floats:
    """Standard errors by the rows alone, (4,); infinite where they say nothing."""
    scale = 1.0 / np.sqrt(np.where(a.diagonal() > 0.0, a.diagonal(), 1.0))
    inverse = np.linalg.inv(a * scale * scale[:, None] + _SINGULAR * np.eye(len(a)))
    alone: Floats = np.sqrt(inverse.diagonal()) * scale
    return np.where(a.diagonal() > 0.0, alone, np.inf)
