"""What each of the engines knew whose states were merged, so that one can be held against the others (outliers.py).

A replica is the statistics of one engine at the merge: A, b, y'Wy, and N, the HAC's M with its corrections; before
there are 2 p + 2 windows, 64 s^2 A stands in: neighbouring rows may share that much of their noise. Phases belong to
the stamps of a server and are taken out at their estimate. Statistics stay as they were at the merge: nothing decays
them, rows that are learned later are not in them.

Shapes: A, N (p, p), b, beta (p,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from online.rows import Floats
from online.state import Array, Count, Finite, StateError, saved

from .rls_learner import RlsLearner
from .solve import RELATIVE_RIDGE, solve

REPLICAS_MAX = 4096

_SHARED_NOISE = 64.0
_F8 = np.dtype(np.float64)


@dataclass(frozen=True, slots=True)
class Replica:
    """What one engine's state knew when it was merged: A, b, y'Wy, N and how many rows."""

    STATE = saved(
        "replica",
        engine=str,
        rows=Count,
        squares=Finite,
        a=Array(_F8, columns=-1),
        b=Array(_F8),
        noise=Array(_F8, columns=-1),
    )

    engine: str
    rows: int
    squares: float
    a: Floats
    b: Floats
    noise: Floats

    def restored(self) -> None:
        """Everything is of as many columns."""
        p = len(self.b)
        if self.a.shape != (p, p) or self.noise.shape != (p, p):
            raise StateError(f"a replica of {self.a.shape}, {p} and {self.noise.shape} columns")

    def plus(self, other: Replica) -> Replica:
        """Both, as one engine's."""
        return Replica(
            self.engine,
            self.rows + other.rows,
            self.squares + other.squares,
            self.a + other.a,
            self.b + other.b,
            self.noise + other.noise,
        )

    def minus(self, other: Replica) -> Replica:
        """What this is without a part of it."""
        rest = (self.squares - other.squares, self.a - other.a, self.b - other.b, self.noise - other.noise)
        return Replica("", self.rows - other.rows, *rest)

    def beta(self) -> Floats:
        """Its own coefficients, (p,)."""
        none = np.zeros(len(self.b), np.bool_)
        return solve(self.a, self.b, none, ~none).beta

    def covariance(self) -> Floats:
        """V = C N C of its coefficients, (p, p)."""
        live = self.a.diagonal() > 0.0
        scale = 1.0 / np.sqrt(np.where(live, self.a.diagonal(), 1.0))
        inverse = np.linalg.inv(self.a * scale * scale[:, None] + np.diag(np.where(live, RELATIVE_RIDGE, 1.0)))
        inverse *= scale * scale[:, None] * np.outer(live, live)
        covariance: Floats = inverse @ self.noise @ inverse
        return covariance


def replica_of(learner: RlsLearner, engine: str) -> Replica | None:
    """What a learner knows, as one of several; None before its first fit."""
    if not learner.started:
        return None
    p, slow = len(learner.features), learner.members.slow
    g = learner.statistics()
    a, y = g[:p, :p], slow.p
    b = g[:p, y] - g[:p, p:y] @ slow.beta[p:y]
    meat = slow.meat.of_scores(slow.p)
    noise = _SHARED_NOISE * learner.members.weighing.scale**2 * a
    if meat is not None:
        noise = meat[:p, :p]
    return Replica(engine, learner.rows, float(g[y, y]), a, b, noise)


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
