"""Decayed sufficient statistics, one set per stratum, each on a sample clock of its own.

A row of a block, z = [x, phase, y, l] of shape (q,), weight w, covers l steps and takes y microseconds. Per stratum s

    G_s <- 2^(-sum e_i) G_s + sum_i 2^(-age_i) w_i z_i z_i'        G: (32, q (q + 1) / 2), upper triangles
    e_i = l_i / half-life * weight_i                     age_i = sum of e over the later rows of s

so a stratum forgets by what happens in it: what is not visited is not forgotten (Kulhavy's directional forgetting,
with accuracy equal to it and with merging still exact). The half-life is 4,000 steps. The blocks of sum_s G_s are
A (p, p), b (p,), y'Wy, the sums over l (for excitation), and

    n1_s = sum 2^(-age) h v    n2_s = sum 2^(-2 age) h^2 v    h: Huber's share, v: the row's weight; n1^2 / n2 =
    effective rows: k rows of weight 1 / k that see the same are one

Guarantees: adding statistics equals learning the rows together, to rounding
(tests/property/test_state.py::test_merge_equals_one_learner_fed_the_same_rows_when_nothing_is_forgotten); nothing here
divides, so nothing here can become non-finite from finite rows.
Reference: Kulhavy, Restricted exponential forgetting in real-time identification (Automatica 1987).
"""

from __future__ import annotations

import numpy as np

from online.blocks import STRATA, Design
from online.rows import Floats
from online.state import Stateful

from .grouped_sums import decays_of, kept_of, products_of
from .operating_points import OperatingPoints


class Strata(Stateful):
    """Statistics of q augmented columns in 32 strata.

    Args:
        q: p features and phases, the target, the steps.
        half_life_steps: steps after which a row counts half.
        by_point: whether the same is kept by operating point, beside.
    """

    SAVED = ("g", "n1", "n2", "clock", "points")

    __slots__ = ("_expand", "_left", "_right", "_triangle", "clock", "g", "half_life_steps", "n1", "n2", "points", "q")

    def __init__(self, q: int, half_life_steps: float, *, by_point: bool = False) -> None:
        self.q = q
        self.points = OperatingPoints(q) if by_point else None
        self.half_life_steps = half_life_steps
        self._left, self._right = np.triu_indices(q)
        self._triangle = self._left * q + self._right
        expand = np.zeros((q, q), np.int64)
        expand[self._left, self._right] = np.arange(len(self._left))
        self._expand = np.maximum(expand, expand.T)
        self.g = np.zeros((STRATA, len(self._left)))
        self.n1 = np.zeros(STRATA)
        self.n2 = np.zeros(STRATA)
        self.clock = np.zeros(STRATA)

    def learn(self, block: Design, z: Floats, weight: Floats, share: Floats) -> tuple[Floats, Floats]:
        """Add rows: z (n, q), weight (n,), share of Huber (n,).

        Returns what each group kept of its past, (g,), and what later rows of the block left of each row, (n,).
        """
        groups = block.grouped()
        order, starts, ids = groups.order, groups.starts, groups.ids
        e = (block.steps * block.weight / self.half_life_steps).take(order)
        decay, spent = decays_of(groups, e)
        zo = z.take(order, axis=0)
        new = products_of(groups, zo * (weight.take(order) * decay)[:, None], zo).take(self._triangle, axis=1)
        kept = kept_of(spent)
        self.g[ids] = self.g[ids] * kept[:, None] + new
        h = share.take(order) * decay
        counted = h * block.weight.take(order)
        self.n1[ids] = self.n1[ids] * kept + np.add.reduceat(counted, starts)
        self.n2[ids] = self.n2[ids] * (kept * kept) + np.add.reduceat(counted * h, starts)
        self.clock[ids] += spent
        left_of = np.empty_like(decay)
        left_of[order] = decay
        if self.points is not None:
            spent_by_row = np.empty_like(e)
            spent_by_row[order] = e
            self.points.learn(z, block.end_ns, weight, share * block.weight, spent_by_row)
        return kept, left_of

    def total(self) -> Floats:
        """Sum over the strata as a full symmetric matrix (q, q)."""
        matrix: Floats = self.g.sum(axis=0)[self._expand]
        return matrix

    def without_prefill(self) -> Floats:
        """Of each stratum without prefill a full symmetric matrix, (16, q, q)."""
        matrices: Floats = self.g[: STRATA // 2][:, self._expand]
        return matrices

    def effective_rows(self) -> float:
        """n1^2 / n2 over all strata."""
        squares = float(self.n2.sum())
        return float(self.n1.sum()) ** 2 / squares if squares > 0.0 else 0.0

    def squared_share(self) -> float:
        """n2 / n1: how much less squared weights amount to, as in the variance of a weighted mean, than weights."""
        rows = float(self.n1.sum())
        return float(self.n2.sum()) / rows if rows > 0.0 else 1.0

    def spread(self) -> Floats:
        """How far each feature varies beyond so much per step where it is not 0, (p,): cv over the strata that have it.

        In strata with prefill every row has some: that none of the others has any tells what a chunk costs, and only
        chunks of several sizes tell what a token costs.
        """
        p = self.q - 2
        squares = self.g[:, self._expand.diagonal()[:p]]
        visited = squares > 0.0
        steps = (visited * self.g[:, self._expand[-1, -1], None]).sum(axis=0)
        crossed = self.g[:, self._expand[:p, -1]].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(crossed > 0.0, squares.sum(axis=0) * steps / crossed**2, np.inf)
        return np.sqrt(np.maximum(ratio - 1.0, 0.0))

    def discount(self, keep: float, gain: float, strata: slice = slice(None)) -> None:
        """Keep this share of all evidence and say that the same work now takes ``gain`` times as long.

        y becomes gain y and the weight l / yhat^2 becomes w / gain^2, as if the rows had been seen after the change.
        """
        target = self.q - 2
        power = (self._left == target).astype(np.float64) + (self._right == target)
        self.g[strata] *= keep * gain ** (power - 2.0)
        self.n1[strata] *= keep
        self.n2[strata] *= keep
        if self.points is not None and strata == slice(None):
            self.points.discount(keep, gain)

    def decay(self, spent: Floats) -> None:
        """Forget as if rows worth ``spent`` (32,) half-lives had been learned in each stratum."""
        kept = kept_of(spent)
        self.g *= kept[:, None]
        self.n1 *= kept
        self.n2 *= kept * kept
        if self.points is not None:
            self.points.decay(spent)

    def add(self, other: Strata) -> None:
        """Statistics of both; the caller has brought them to the same clock."""
        self.g += other.g
        self.n1 += other.n1
        self.n2 += other.n2
        self.clock += other.clock
        if self.points is not None and other.points is not None:
            self.points.add(other.points)

    def widened(self, at: int, more: int) -> Strata:
        """The same statistics with ``more`` columns, never seen, before column ``at``."""
        wide = Strata(self.q + more, self.half_life_steps)
        place = np.arange(self.q) + more * (np.arange(self.q) >= at)
        wide.g[:, wide._expand[place[self._left], place[self._right]]] = self.g
        wide.n1, wide.n2, wide.clock = self.n1, self.n2, self.clock
        wide.points = None if self.points is None else self.points.widened(at, more)
        return wide
