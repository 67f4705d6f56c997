"""Transfer: what configurations learned, pooled into a prior for one that has learned nothing yet.

A donor d is the statistics (A_d, b_d) of one live set. With gamma: (q,) coefficients of the full system, constant
columns included, its live coefficients are linear in gamma, beta_d = M_d gamma, so donors pool exactly, without a row:

    minimise over gamma >= 0    sum_d  (M_d gamma)' A_d (M_d gamma) - 2 b_d' M_d gamma
    A = sum_d M_d' A_d M_d     b = sum_d M_d' b_d                                             A: (q, q)   b: (q,)

A new configuration c gets    beta0 = M_c gamma    tau_j = max(spread_j, 0.15 beta0_j) + 0.01 y / x_rms_j

spread_j is how far the donors' own coefficients lie from M_d gamma, relative to it and weighted by how well each donor
knows it; where M_d gamma is at its bound of 0, it is their root mean square: that the pool has no use for a column
is no knowledge that it costs nothing. y / x_rms is a whole step's worth of the column. Rows are weighted 1 / y^2, so a
slow configuration counts as much as a fast one.
Reference: Raina et al., Constructing informative priors using transfer learning (ICML 2006).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from online.features import INTERCEPT, Facts, FeatureSet
from online.features.systems import RESIDUAL, System, full
from online.rls import Prior, RlsLearner, solve
from online.rows import PHASES, Floats, Target

from .capped_evidence import Evidence, evidence_of

SHARE, FLOOR = 0.15, 0.01
MISFIT = 0.08
"""A pooled prior gives way to rows as if each were uncertain by so much: the first ones are all of one kind."""

FROZEN_SD = 1e-6
"""Relative standard deviation of a frozen coefficient: no data moves it by more than about as much."""


@dataclass(frozen=True, slots=True)
class Donor:
    """What one configuration learned of one target with one live set.

    Shapes: a (p, p), b (p,), without phases; ``mean_us`` the mean step, ``rows`` what it rests on. ``prior`` is what a
    configuration of the same model starts from: phases are in it. ``evidence``: by operating point, of ``portable``.
    """

    config_id: str
    facts: Facts
    features: FeatureSet
    a: Floats
    b: Floats
    beta: Floats
    mean_us: float
    rows: float
    prior: Prior | None = None
    evidence: Evidence | None = None


def donor_of(config_id: str, facts: Facts, learner: RlsLearner, prior: Prior | None = None) -> Donor | None:
    """A learner's slow statistics as a donor; None before it has any."""
    p, q = len(learner.features), learner.p
    slow = learner.members.slow
    g = slow.strata.total()
    mean_us = learner.mean_us()
    if not g.any() or mean_us is None:
        return None
    a, b = g[:p, :p], g[:p, q]
    if q > p:  # phases belong to the stamps of that server, not to its work: take their share out at their estimate
        b = b - g[:p, p:q] @ slow.beta[p:q]
    return Donor(
        config_id,
        dict(facts),
        learner.features,
        a,
        b,
        slow.beta[:p],
        mean_us,
        learner.effective_rows(),
        prior,
        evidence_of(learner),
    )


def donors_of(config_id: str, facts: Facts, learners: Iterable[RlsLearner]) -> list[Donor]:
    """What learners of one configuration know; rows that they hold become statistics."""
    donors: list[Donor] = []
    for learner in learners:
        prior = learner.donation()
        if learner.started:
            learner.refit(release=True)
        donor = donor_of(config_id, facts, learner, prior)
        donors += [] if donor is None else [donor]
    return donors


def matrix(system: System, target: Target, facts: Facts, names: Sequence[str]) -> tuple[tuple[str, ...], Floats] | None:
    """Names of the live columns (p) and M (p, q) for a configuration; None where the system does not apply.

    ``names`` are the full system's, from :func:`full_names`. A column that this configuration has not is not in M.
    """
    table, live = full(system, target, facts), system.live(target, facts)
    if table is None or live is None:
        return None
    constants = table[1]
    m = np.zeros((len(live.names), len(names)))
    for i, name in enumerate(live.names):
        m[i, names.index(name)] = 1.0
    for name, value in constants.items():
        m[live.names.index(INTERCEPT), names.index(name)] = value
    if system.ties is not None:
        system.ties(m, live.names, tuple(names), constants)
    return live.names, m


def full_names(system: System, target: Target, configs: Sequence[Facts]) -> tuple[str, ...]:
    """Columns of the full system that any of these configurations has, in a stable order."""
    names: dict[str, None] = {}
    for facts in configs:
        table, live = full(system, target, facts), system.live(target, facts)
        if table is not None and live is not None:
            names |= dict.fromkeys((*live.names, *table[1]))
    return tuple(names)


@dataclass(frozen=True, slots=True)
class Pooled:
    """Donors of one system and target, together."""

    system: System
    target: Target
    names: tuple[str, ...]
    gamma: Floats
    a: Floats
    b: Floats
    donors: tuple[Donor, ...]

    def prior(self, facts: Facts) -> Prior | None:
        """Prior of a configuration's live set; None where the system does not apply or nothing carries over."""
        names = full_names(self.system, self.target, [facts])
        known = tuple(dict.fromkeys((*self.names, *names)))
        mapping = matrix(self.system, self.target, facts, known)
        if mapping is None or not self.gamma.any():
            return None
        live, m = mapping
        gamma = np.zeros(len(known))
        gamma[: len(self.names)] = self.gamma
        mean = m @ gamma
        unseen = m[:, len(self.names) :].any(axis=1) & ~(m[:, : len(self.names)] @ np.ones(len(self.names))).astype(
            bool
        )
        unit = self._unit(live)
        relative, at_bound = self._spreads(live)
        sd = np.maximum.reduce([relative * mean, SHARE * mean, at_bound]) + FLOOR * unit
        sd[unseen | ~(sd > 0.0)] = np.inf
        return with_phases(Prior(mean, sd, MISFIT), self.target)

    def _unit(self, live: Sequence[str]) -> Floats:
        """A whole step's worth of each live column, from the donors that have it: y / x_rms."""
        out = np.full(len(live), np.nan)
        for i, name in enumerate(live):
            worth = [
                1.0 / np.sqrt(d.a[j, j] / max(d.rows, 1.0))  # A sums x^2 / y^2
                for d in self.donors
                if name in d.features.names and d.a[j := d.features.names.index(name), j] > 0.0
            ]
            if worth:
                out[i] = float(np.median(worth))
        return np.where(np.isnan(out), np.inf, out)

    def _spreads(self, live: Sequence[str]) -> tuple[Floats, Floats]:
        """How far the donors' own coefficients lie from the pooled ones: relative to these, and where these are 0."""
        total, weight = np.zeros((2, len(live))), np.zeros((2, len(live)))
        for d in self.donors:
            mapping = matrix(self.system, self.target, d.facts, self.names)
            if mapping is None or mapping[0] != d.features.names:
                continue
            pooled = mapping[1] @ self.gamma
            known = d.a.diagonal() / np.maximum(np.linalg.eigvalsh(d.a).max(), 1e-300)
            for j, name in enumerate(d.features.names):
                if name not in live or known[j] <= 0.0:
                    continue
                at_bound = int(pooled[j] <= 0.0)
                off, counted = (d.beta[j], 1.0) if at_bound else (d.beta[j] / pooled[j] - 1.0, known[j])
                total[at_bound, live.index(name)] += counted * off**2
                weight[at_bound, live.index(name)] += counted
        spreads: Floats = np.sqrt(np.divide(total, weight, out=np.zeros_like(total), where=weight > 0.0))
        return spreads[0], spreads[1]


def pool(system: System, target: Target, donors: Sequence[Donor]) -> Pooled | None:
    """All donors to which the system applies, pooled; None without any.

    Guarantee: the result does not depend on the order of the donors beyond rounding, and equals the solution of the
    summed statistics exactly.
    """
    used = tuple(d for d in donors if system.live(target, d.facts) is not None)
    if not used:
        return None
    names = full_names(system, target, [d.facts for d in used])
    q = len(names)
    a, b = np.zeros((q, q)), np.zeros(q)
    for donor in used:
        mapping = matrix(system, target, donor.facts, names)
        if mapping is None or mapping[0] != donor.features.names:
            continue
        m = mapping[1]
        a += m.T @ donor.a @ m
        b += m.T @ donor.b
    free, warm = np.zeros(q, np.bool_), np.ones(q, np.bool_)
    return Pooled(system, target, names, solve(a, b, free, warm).beta, a, b, used)


def with_phases(prior: Prior, target: Target) -> Prior:
    """The prior with nothing known of the phase columns that step times carry beside the set."""
    if target is not Target.STEP_TIME:
        return prior
    k = len(PHASES)
    sd = np.concatenate([prior.sd, np.full(k, np.inf)])
    return Prior(np.concatenate([prior.mean, np.zeros(k)]), sd, prior.misfit)


def frozen(prior: Prior, features: FeatureSet) -> Prior:
    """HFD-TL's stage 2 as written: base and configuration stay until rows contradict them, the residual is free."""
    sd = prior.sd.copy()
    for j, name in enumerate(features.names):
        sd[j] = np.inf if name in RESIDUAL else FROZEN_SD * max(float(prior.mean[j]), 1e-12)
    return Prior(prior.mean, sd)


def bias_and_scale(prediction_us: Floats, elapsed_us: Floats) -> tuple[float, float]:
    """BSR-ARD's transfer: y = bias + scale yhat, both >= 0, least relative squares over rows (n,)."""
    x = np.stack([np.ones_like(prediction_us), prediction_us], axis=1) / elapsed_us[:, None]
    none, both = np.zeros(2, np.bool_), np.ones(2, np.bool_)
    bias, scale = solve(x.T @ x, x.sum(axis=0), none, both).beta
    return float(bias), float(scale)
