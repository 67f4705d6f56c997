"""Engines whose states were merged, each held against the others.

A replica is the statistics of one engine at the merge: A, b, and N, the variance of its scores; before there are
2 p + 2 windows, 64 s^2 A stands in: neighbouring rows may share that much of their noise. Phases belong to the stamps
of a server and are taken out at their estimate. Statistics stay as they were at the merge.

    beta_i = the fit of what all others know together, without those that differ
    r_i    = log (beta_i' b_i / beta_i' A_i beta_i)            0 = as fast as the others; exp r_i is its ratio
    v_i    = beta_i' N beta_i / (beta_i' A beta_i)^2           summed over A, N of its own rows and of the others'
    se_i   = max (sqrt v_i, 1.4826 MAD of r over those that do not differ)

A replica differs where |r_i| > 5 % and > 3 se_i. Those furthest off are set apart and the rest is looked at again, as
long as two are left: one that is slow makes no other fast. The scatter of the others counts because engines with other
loads differ by what the form misses.

Shapes: A, N (p, p), b, beta (p,).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from online.blocks import median_of
from online.constants import MAD_TO_SD
from online.rows import Floats, Mask
from online.snapshot import ReplicaSnapshot
from online.state import Stateful, Tree

from .rls_learner import RlsLearner
from .solve import solve

# Guard: memory.
REPLICAS_MAX = 4096

# Guess: a bound of what neighbouring rows share.
_SHARED_NOISE = 64.0
# Guess: 5 % is worth telling; three standard errors are sure.
_DIFFERENCE, _SURE = math.log1p(0.05), 3.0
# Guard: cost. Guess: those within a tenth of the furthest go with it.
_ROUNDS, _ALIKE = 16, 0.9


@dataclass(slots=True)
class Replica(Stateful):
    """What one engine's state knew when it was merged: A, b, N and how many rows."""

    SAVED = ("engine", "rows", "a", "b", "noise")

    engine: str
    rows: int
    a: Floats
    b: Floats
    noise: Floats

    @staticmethod
    def of_state(state: Tree, p: int) -> Replica:
        """One of p columns from the state file; StateError if it does not fit."""
        replica = Replica("", 0, np.zeros((p, p)), np.zeros(p), np.zeros((p, p)))
        replica.from_state(state)
        return replica

    def plus(self, other: Replica) -> Replica:
        """Both, as one engine's."""
        rows, noise = self.rows + other.rows, self.noise + other.noise
        return Replica(self.engine, rows, self.a + other.a, self.b + other.b, noise)

    def minus(self, other: Replica) -> Replica:
        """The rest without a part of it."""
        rows, noise = self.rows - other.rows, self.noise - other.noise
        return Replica("", rows, self.a - other.a, self.b - other.b, noise)


def replica_of(learner: RlsLearner, engine: str) -> Replica | None:
    """What a learner knows, as one of several; None before its first fit."""
    if not learner.started:
        return None
    p, slow = len(learner.features), learner.members.slow
    g = learner.statistics()
    a, y = g[:p, :p], slow.p
    b = g[:p, y] - g[:p, p:y] @ slow.beta[p:y]
    meat = slow.meat.of_scores(slow.p)
    noise = _SHARED_NOISE * learner.members.weighing.scale**2 * a if meat is None else meat[:p, :p]
    return Replica(engine, learner.rows, a, b, noise)


def joined(mine: Sequence[Replica], theirs: Sequence[Replica]) -> list[Replica]:
    """Replicas of both, those of one engine together; beyond the bound the ones with the fewest rows go."""
    by_engine: dict[str, Replica] = {}
    unnamed = []
    for replica in (*mine, *theirs):
        if not replica.engine:
            unnamed.append(replica)
        elif replica.engine in by_engine:
            by_engine[replica.engine] = by_engine[replica.engine].plus(replica)
        else:
            by_engine[replica.engine] = replica
    every = sorted((*by_engine.values(), *unnamed), key=lambda replica: (replica.engine, replica.rows))
    return every if len(every) <= REPLICAS_MAX else sorted(every, key=lambda replica: -replica.rows)[:REPLICAS_MAX]


class Comparison(NamedTuple):
    """Replicas, those that differ and are furthest from the others first, and how far apart the engines are.

    ``spread``: root mean square over the rows of how far engines that differ are from all, in logs; 0 where none does.
    """

    replicas: list[ReplicaSnapshot]
    spread: float


def compared(replicas: Sequence[Replica], learned_rows: int) -> Comparison:
    """Each replica against the others.

    Nothing where there are no others, or where of ``learned_rows`` by now most came after the merge. A replica on whose
    work the others predict nothing has no ratio.
    """
    rows = np.array([replica.rows for replica in replicas], np.float64)
    if len(replicas) < 2 or learned_rows > 2 * rows.sum():  # noqa: PLR2004
        return Comparison([], 0.0)
    usual: Mask = np.ones(len(replicas), np.bool_)
    for _ in range(_ROUNDS):
        log_ratio, by_rows = _against_others(replicas, usual)
        off = np.abs(log_ratio)
        odd = usual & (off > np.maximum(_DIFFERENCE, _SURE * by_rows))  # of NaN it is False
        further = odd & (off >= _ALIKE * off[odd].max(initial=0.0))
        if not odd.any() or np.count_nonzero(usual & ~further) < 2:  # noqa: PLR2004
            break
        usual &= ~further
    calm = log_ratio[usual & ~odd & np.isfinite(log_ratio)]
    scatter = MAD_TO_SD * median_of(np.abs(calm - median_of(calm))) if len(calm) else 0.0
    stderr = np.maximum(by_rows, scatter)
    differs = off > np.maximum(_DIFFERENCE, _SURE * stderr)
    snapshots = [
        ReplicaSnapshot(engine=replica.engine, rows=replica.rows, differs=False)
        if math.isnan(r)
        else ReplicaSnapshot(
            engine=replica.engine, rows=replica.rows, differs=bool(odd), ratio=math.exp(r), stderr=math.exp(r) * error
        )
        for replica, r, error, odd in zip(replicas, log_ratio.tolist(), stderr.tolist(), differs, strict=True)
    ]
    snapshots.sort(key=lambda s: (not s.differs, -abs(math.log(s.ratio)) if s.ratio else 0.0, s.engine))
    apart = np.where(differs, log_ratio, 0.0) * (1.0 - rows / rows.sum())  # from all together, itself included
    return Comparison(snapshots, math.sqrt(float(rows @ apart**2) / float(rows.sum())))


def _against_others(replicas: Sequence[Replica], usual: Mask) -> tuple[Floats, Floats]:
    """R and sqrt v of each, (k,), against the others that are ``usual``; NaN and 0 where those predict nothing."""
    log_ratio, by_rows = np.full(len(replicas), np.nan), np.zeros(len(replicas))
    together = reduce(Replica.plus, (replica for replica, counts in zip(replicas, usual, strict=True) if counts))
    for index, replica in enumerate(replicas):
        others = together.minus(replica) if usual[index] else together
        none = np.zeros(len(replica.b), np.bool_)
        beta = solve(others.a, others.b, none, ~none).beta
        forecasts = [float(beta @ each.a @ beta) for each in (replica, others)]
        observed = float(beta @ replica.b)
        if min(*forecasts, observed) > 0.0:
            log_ratio[index] = math.log(observed / forecasts[0])
            noises = [max(float(beta @ each.noise @ beta), 0.0) for each in (replica, others)]
            by_rows[index] = math.sqrt(sum(n / forecast**2 for n, forecast in zip(noises, forecasts, strict=True)))
    return log_ratio, by_rows
