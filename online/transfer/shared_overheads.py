"""Overheads that models share, from what configurations know: a population of theta, odd ones without a vote.

    theta_m = argmin (theta' A_m theta - 2 b_m' theta) / 2 + sum_j w_mj (theta_j - mu_j)^2 / (2 tau_j^2),   theta >= 0
    V_m     = diag (A_m + W_m / tau^2)^-1            w_mj = 4 / (3 + ((theta_mj - mu_j)^2 + V_mj) / tau_j^2)
    mu_j    = precision mean of theta_mj, w_mj / tau_j^2 each, and the hyper-prior
    tau_j^2 = (sum_m w_mj ((theta_mj - mu_j)^2 + V_mj) + (s0_j / 2)^2) / (k_j + 1),   tau_j >= 10 % of mu_j
    s_j^2   = tau_j^2 + var mu_j

A Student-t population with 3 degrees of freedom, by expectation and maximisation from tau_j = max(s0_j, lower median
of 0 and the donors' |own theta_j - mu0_j|); A_m, b_m are the capped evidence of a donor in theta
(online/transfer/capped_evidence.py). A donor farther than 3 robust sd, at least max(10 % of the median, s0 / 4), from
the median of three or more does not vote for that overhead, and none votes for one that it does not have.
Reference: Lange, Little and Taylor, Robust statistical modeling using the t distribution (JASA 1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from online.rls import middle, solve
from online.rows import Floats, Mask

from .capped_evidence import Evidence
from .sheet_terms import HYPER_MEAN, HYPER_SD, PREFILL_SD, SHARED, Population, SheetTerms, nobody

_ROUNDS, _FREEDOM = 40, 3.0
_OPEN = 1e3
_FLOOR, _VOTERS_MIN, _FAR = 0.1, 3, 3.0


class Voter(NamedTuple):
    """What one configuration knows, and of what."""

    terms: SheetTerms
    evidence: Evidence


class Estimate(NamedTuple):
    """theta and q, (6,), and their covariance (6, 6)."""

    theta: Floats
    covariance: Floats


def estimate(terms: SheetTerms, evidence: Evidence | None, mean: Floats, sd: Floats) -> Estimate:
    """Theta and q of a configuration by its evidence and a prior, (6,) each; without evidence the prior itself."""
    has = terms.has
    precision = np.where(has, 1.0 / sd**2, 1.0)
    if evidence is None:
        return Estimate(np.where(has, mean, 0.0), np.diag(np.where(has, sd**2, 0.0)))
    m = terms.matrix
    a, b = m.T @ evidence.a @ m, m.T @ (evidence.b - evidence.a @ terms.base)
    free, warm = np.zeros(len(has), np.bool_), np.ones(len(has), np.bool_)
    theta = solve(a, b, free, warm, prior_precision=precision, prior_mean=np.where(has, mean, 0.0)).beta
    covariance = np.linalg.inv(a + np.diag(precision)) * np.outer(has, has)
    return Estimate(theta, covariance)


def shared_overheads(voters: Sequence[Voter]) -> Population:
    """What one more model's overheads are like; the hyper-prior where nobody votes."""
    if not voters:
        return nobody()
    has = np.array([voter.terms.has[:SHARED] for voter in voters])
    mu, tau = HYPER_MEAN.copy(), _first_tau(voters)
    weight, vote = np.ones(has.shape), has
    for _ in range(_ROUNDS):
        theta, variance = _expected(voters, mu, tau, weight)
        vote = has & ~_odd(theta, has)
        told = np.where(vote, weight / tau**2, 0.0)
        mu = ((told * theta).sum(axis=0) + HYPER_MEAN / HYPER_SD**2) / (told.sum(axis=0) + HYPER_SD**-2.0)
        apart = np.where(vote, weight * ((theta - mu) ** 2 + variance), 0.0).sum(axis=0)
        tau = np.maximum(np.sqrt((apart + (HYPER_SD / 2.0) ** 2) / (vote.sum(axis=0) + 1)), _FLOOR * mu)
    told = np.where(vote, weight / tau**2, 0.0)
    return Population(mu, np.sqrt(tau**2 + 1.0 / (told.sum(axis=0) + HYPER_SD**-2.0)), len(voters))


def _first_tau(voters: Sequence[Voter]) -> Floats:
    """Where the rounds begin, (5,): donors that agree on something else must not all be taken for odd ones."""
    sd = np.append(_OPEN * HYPER_SD, PREFILL_SD)
    told = np.array([estimate(each.terms, each.evidence, np.append(HYPER_MEAN, 1.0), sd).theta for each in voters])
    off = np.where([each.terms.has for each in voters], told, np.append(HYPER_MEAN, 1.0))[:, :SHARED] - HYPER_MEAN
    off = np.vstack([np.zeros(SHARED), np.abs(off)])
    tau: Floats = np.maximum(HYPER_SD, np.quantile(off, 0.5, axis=0, method="lower"))
    return tau


def _expected(voters: Sequence[Voter], mu: Floats, tau: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Theta and its variance of each donor, (m, 5) each; weights are changed in place."""
    theta, variance = np.zeros(weight.shape), np.zeros(weight.shape)
    for i, voter in enumerate(voters):
        for _ in range(2):
            sd = np.append(tau / np.sqrt(weight[i]), PREFILL_SD)
            found = estimate(voter.terms, voter.evidence, np.append(mu, 1.0), sd)
            theta[i], variance[i] = found.theta[:SHARED], found.covariance.diagonal()[:SHARED]
            weight[i] = (_FREEDOM + 1.0) / (_FREEDOM + ((theta[i] - mu) ** 2 + variance[i]) / tau**2)
    return theta, variance


def _odd(theta: Floats, has: Mask) -> Mask:
    """Whose value lies too far from what the others say, (m, 5)."""
    odd: Mask = np.zeros(has.shape, np.bool_)
    for j in range(SHARED):
        own = has[:, j]
        if np.count_nonzero(own) >= _VOTERS_MIN:
            center = middle(theta[own, j])
            spread = 1.4826 * middle(np.abs(theta[own, j] - center))
            odd[own, j] = np.abs(theta[own, j] - center) > _FAR * max(spread, _FLOOR * center, HYPER_SD[j] / 4.0)
    return odd
