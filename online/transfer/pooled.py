"""Donors of one modelling system, and the prior that their pooled coefficients give a new configuration.

A donor d is the statistics (A_d, b_d) of one live set. With gamma (q,) the coefficients of the full system, constant
columns included, its live coefficients are linear in gamma, beta_d = M_d gamma, so donors pool exactly, without a row:

    gamma = argmin over gamma >= 0  sum_d (M_d gamma)' A_d (M_d gamma) - 2 b_d' M_d gamma

A new configuration c gets

    beta0 = M_c gamma      tau_j = max(spread_j, 0.15 beta0_j) + 0.01 y / x_rms_j

spread_j: root mean square of the donors' own coefficients about M_d gamma, each weighed by how well the donor knows it;
where M_d gamma is at its bound of 0 it is never less than theirs: that the pool has no use for a column is no knowledge
that it costs nothing. y / x_rms is a whole step's worth of the column. Rows weigh 1 / y^2, so a slow configuration
counts as much as a fast one.
Reference: Raina et al., Constructing informative priors using transfer learning (ICML 2006).

**What to measure next.** The configuration space of RECE.

    v(c) = (d/4096, L/32, Hkv/H, moe, E/8, F/1e15, B/3e12, memory/80, Nb/8192, Ns/256, 1/tp, chunked, prefix, offload)
    similarity(c, s) = cos(v_c, v_s)          weight_s = softmax over specialists of similarity / 0.5
    coverage(c)      = min over seen s of |v_c - v_s|_2 / sqrt(14)          0 = measured already

A specialist is a cluster of configurations whose statistics are pooled; its centre is the mean
of their vectors. A prediction is the weighted mean of the heaviest specialists; as each is linear in the coefficients,
their mean is one coefficient vector, computed once per configuration and not once per step.

Which configuration to measure next is greedy farthest point: what lies farthest from everything measured; at most twice
as far from optimal as any choice (Gonzalez, Theor. Comput. Sci. 1985). Reference: docs/systems.md, source 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from online.constants import DONOR_SHARE, TINY
from online.features import INTERCEPT, Facts, FeatureSet
from online.features.sheets import sheet_of
from online.features.systems import RESIDUAL, System, full
from online.rls import Prior, RlsLearner, solve
from online.rows import PHASES, Floats, Target

from .sheet import HIDES_HITS, Evidence, evidence_of

# Guess: the first is half of the floor of one donor (online/rls/solve.py).
_FLOOR, _POOLED_MISFIT = 0.01, 0.08
"""A pooled prior gives way to rows as if each were uncertain by so much: the first ones are all of one kind."""
# Guard: stands for 0.
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
    """A learner's statistics as a donor; None before it has any."""
    p, y, beta = len(learner.features), learner.fit.p, learner.fit.beta
    g, mean_us = learner.fit.strata.total(), learner.mean_us()
    if not g.any() or mean_us is None:
        return None
    b = g[:p, y] - g[:p, p:y] @ beta[p:y]  # phases belong to the stamps of that server, not to its work
    evidence = evidence_of(learner, hidden=facts.get(HIDES_HITS) is True)
    rows = learner.effective_rows()
    return Donor(config_id, dict(facts), learner.features, g[:p, :p], b, beta[:p], mean_us, rows, prior, evidence)


def donors_of(config_id: str, facts: Facts, learners: Iterable[RlsLearner]) -> list[Donor]:
    """Donors of one configuration, one per learner; rows that they hold become statistics."""
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

    ``names`` are the full system's. A column that this configuration has not is not in M.
    """
    table, live = full(system, target, facts), system.live(target, facts)
    if table is None or live is None:
        return None
    m = np.zeros((len(live.names), len(names)))
    m[np.arange(len(live.names)), [names.index(name) for name in live.names]] = 1.0
    for name, value in table[1].items():
        m[live.names.index(INTERCEPT), names.index(name)] = value
    if system.ties is not None:
        system.ties(m, live.names, tuple(names), table[1])
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
    """Donors of one system and target together: gamma (q,) by the names of the full system's columns, A (q, q), b."""

    system: System
    target: Target
    names: tuple[str, ...]
    gamma: Floats
    a: Floats
    b: Floats
    donors: tuple[Donor, ...]

    def prior(self, facts: Facts) -> Prior | None:
        """Prior of a configuration's live set; None where the system does not apply or nothing carries over."""
        known = len(self.names)
        names = tuple(dict.fromkeys((*self.names, *full_names(self.system, self.target, [facts]))))
        mapping = matrix(self.system, self.target, facts, names)
        if mapping is None or not self.gamma.any():
            return None
        live, m = mapping
        mean, unseen = m[:, :known] @ self.gamma, m[:, known:].any(axis=1) & ~m[:, :known].any(axis=1)
        spread, step_us = self._spread(live)
        sd = np.maximum(spread, DONOR_SHARE * mean) + _FLOOR * step_us
        sd[unseen | ~(sd > 0.0)] = np.inf
        return _with_phases(Prior(mean, sd, _POOLED_MISFIT), self.target)

    def _spread(self, live: Sequence[str]) -> tuple[Floats, Floats]:
        """Of each live column, how far the donors' own coefficients lie from the pooled one, and y / x_rms; (p,) each.

        The latter is the median over the donors that have the column, infinite where nobody has it.
        """
        squares, weight = np.zeros(len(live)), np.zeros(len(live))
        steps_us: list[list[float]] = [[] for _ in live]
        for donor in self.donors:
            mapping = matrix(self.system, self.target, donor.facts, self.names)
            here = [j for j, name in enumerate(donor.features.names) if name in live and donor.a[j, j] > 0.0]
            pooled = None if mapping is None or mapping[0] != donor.features.names else mapping[1] @ self.gamma
            for j in here:
                i = live.index(donor.features.names[j])
                steps_us[i].append(np.sqrt(max(donor.rows, 1.0) / donor.a[j, j]))  # A sums x^2 / y^2
                if pooled is not None:
                    squares[i] += (donor.beta[j] - pooled[j]) ** 2
                    weight[i] += 1.0
        spread = np.sqrt(squares / np.maximum(weight, TINY))
        return spread, np.array([np.median(each) if each else np.inf for each in steps_us])


def pool(system: System, target: Target, donors: Sequence[Donor]) -> Pooled | None:
    """All donors to which the system applies, pooled; None without any.

    Guarantee: the result does not depend on the order of the donors beyond rounding, and equals the solution of the
    summed statistics exactly.
    """
    used = tuple(d for d in donors if system.live(target, d.facts) is not None)
    if not used:
        return None
    names = full_names(system, target, [d.facts for d in used])
    a, b = np.zeros((len(names), len(names))), np.zeros(len(names))
    for donor in used:
        mapping = matrix(system, target, donor.facts, names)
        if mapping is not None and mapping[0] == donor.features.names:
            a += mapping[1].T @ donor.a @ mapping[1]
            b += mapping[1].T @ donor.b
    none = np.zeros(len(names), np.bool_)
    return Pooled(system, target, names, solve(a, b, none, ~none).beta, a, b, used)


def _with_phases(prior: Prior, target: Target) -> Prior:
    """The prior with nothing known of the phase columns that step times carry beside the set."""
    return prior if target is not Target.STEP_TIME else prior.sized(len(prior.mean) + len(PHASES))


def frozen(prior: Prior, features: FeatureSet) -> Prior:
    """HFD-TL's stage 2 as written: base and configuration stay until rows contradict them, the residual is free."""
    sd = np.full(len(prior.sd), np.inf)
    for j, name in enumerate(features.names):
        if name not in RESIDUAL:
            sd[j] = FROZEN_SD * max(float(prior.mean[j]), 1e-12)
    return Prior(prior.mean, sd)


def bias_and_scale(prediction_us: Floats, elapsed_us: Floats) -> tuple[float, float]:
    """BSR-ARD's transfer: y = bias + scale yhat, both >= 0, least relative squares over rows (n,)."""
    x = np.stack([np.ones_like(prediction_us), prediction_us], axis=1) / elapsed_us[:, None]
    none = np.zeros(2, np.bool_)
    bias, scale = solve(x.T @ x, x.sum(axis=0), none, ~none).beta
    return float(bias), float(scale)


# Guess.
TEMPERATURE = 0.5
# Guess: few specialists are like any one configuration.
HEAVIEST = 3
# Guess.
CLUSTER_RADIUS = 0.2
"""Configurations at most this far from a centre share its specialist."""


def configuration_vector(facts: Facts) -> Floats | None:
    """The configuration as a point, shape (14,); None without the sheets."""
    sheet, _ = sheet_of(facts)
    if sheet is None:
        return None
    model = sheet.model
    return np.array(
        [
            model.hidden / 4096,
            model.layers / 32,
            model.kv_heads / model.heads,
            float(model.moe),
            model.experts / 8,
            sheet.flops_per_us * 1e6 / 1e15,
            sheet.bytes_per_us * 1e6 / 3e12,
            (sheet.memory_gb or 80.0) / 80,
            (sheet.max_batched_tokens or 8192.0) / 8192,
            (sheet.max_seqs or 256.0) / 256,
            1.0 / sheet.tp,
            float(sheet.chunked),
            float(sheet.prefix),
            float(sheet.offload),
        ]
    )


def similarity(a: Floats, b: Floats) -> float:
    """Cosine of the angle between two configurations."""
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), TINY))


def coverage(candidate: Floats, measured: Sequence[Floats]) -> float:
    """Distance to the nearest configuration seen; infinite when none was."""
    return min((float(np.linalg.norm(candidate - s)) / np.sqrt(len(candidate)) for s in measured), default=float("inf"))


def measure_next(candidates: Mapping[str, Floats], measured: Sequence[Floats], count: int) -> list[tuple[str, float]]:
    """The ``count`` candidates to measure, farthest first, with their coverage when their turn comes."""
    left, known = dict(candidates), list(measured)
    out: list[tuple[str, float]] = []
    while left and len(out) < count:
        scores = {name: coverage(v, known) for name, v in left.items()}
        name = max(sorted(scores), key=scores.__getitem__)
        out.append((name, scores[name]))
        known.append(left.pop(name))
    return out


@dataclass(frozen=True, slots=True)
class Specialist:
    """A cluster of donors: its centre (14,) and what they know together."""

    centre: Floats
    pooled: Pooled


def specialists(system: System, target: Target, donors: Sequence[Donor]) -> list[Specialist]:
    """Clusters of donors by greedy covering in the order given, each pooled."""
    clusters: list[tuple[list[Floats], list[Donor]]] = []
    for donor in donors:
        v = configuration_vector(donor.facts)
        if v is None:
            continue
        near = [(coverage(v, [np.mean(points, axis=0)]), points, members) for points, members in clusters]
        best = min(near, key=lambda item: item[0], default=None)
        if best is not None and best[0] <= CLUSTER_RADIUS:
            best[1].append(v)
            best[2].append(donor)
        else:
            clusters.append(([v], [donor]))
    pooled_clusters = [(np.mean(points, axis=0), pool(system, target, members)) for points, members in clusters]
    return [Specialist(centre, pooled) for centre, pooled in pooled_clusters if pooled is not None]


def specialist_weights(facts: Facts, known: Sequence[Specialist]) -> Floats:
    """Softmax weights of the heaviest specialists for a configuration, shape (len(known),); the others 0."""
    v = configuration_vector(facts)
    if v is None or not known:
        return np.zeros(len(known))
    close = np.array([similarity(v, s.centre) for s in known]) / TEMPERATURE
    weight = np.exp(close - close.max())
    weight[np.argsort(-weight)[HEAVIEST:]] = 0.0
    return np.asarray(weight / weight.sum())


def ensemble(facts: Facts, known: Sequence[Specialist]) -> Prior | None:
    """The weighted specialists as one coefficient vector and its spread; None where none applies."""
    share = specialist_weights(facts, known)
    priors = [(w, s.pooled.prior(facts)) for w, s in zip(share, known, strict=True) if w > 0.0]
    usable = [(w, p) for w, p in priors if p is not None]
    total = sum(w for w, _ in usable)
    if not usable or total <= 0.0:
        return None
    mean = np.asarray(sum((w / total * p.mean for w, p in usable), np.zeros_like(usable[0][1].mean)))
    apart = np.sqrt(sum((w / total * (p.mean - mean) ** 2 for w, p in usable), np.zeros_like(mean)))
    sd = np.min([p.sd for _, p in usable], axis=0)
    return Prior(mean, np.maximum(sd, apart), usable[0][1].misfit)
