"""Statistics by operating point: what one learner saw, apart by octaves of batch and of context per request.

A row z = [x, phase, y, l] of weight w belongs to the point (floor(log2 n), floor(log2 c)): n requests per step on the
mean, of c tokens of context each; below 1,024 is one octave. Per point, beside what :mod:`online.rls.strata` sums:

    G <- 2^(-sum e_i) G + sum_i 2^(-age_i) w_i v_i v_i'        v = [x, phase, y, l t], t: seconds since the first row
    n <- 2^(-sum e_i) n + sum_i 2^(-age_i) h_i                 h: Huber's share times the row's weight

A linear form is right to a per cent or two at any one point, however many rows say so; who weighs a point by its rows
believes its misfit. Hence points are kept apart, and each is one observation (online/transfer). ``l t`` tells whether
the same work takes longer than it did; l itself is the first column, the intercept.

Guarantee: adding equals learning together, to rounding. Points that were never visited cost nothing.
"""

from __future__ import annotations

import numpy as np

from online.blocks import Groups
from online.rows import Floats, Ints
from online.state import Array, StateError, saved

from .grouped_sums import decays_of, kept_of, products_of

_F8, _I4 = np.dtype(np.float64), np.dtype(np.int32)
_BATCHES, _CONTEXTS, _SHORT = 16, 9, 9
"""Octaves; what is shorter than 2^10 tokens is one: it costs a step little beside its weights."""
CONTEXT, REQUESTS = 2, 3
"""Places of the two columns in ``portable``."""


class OperatingPoints:
    """Of a learner of ``portable`` with q augmented columns.

    Attributes:
        ids: 9 * octave of batch + octave of context per request, of each point visited, (k,).
        g: upper triangles over [x, phase, y, l t], (k, q (q + 1) / 2).
        rows: n, (k,).
        origin_ns: when t is 0; 0 before any row.
    """

    STATE = saved("operating_points", ids=Array(_I4), g=Array(_F8, columns=-1), rows=Array(_F8), origin_ns=int)

    __slots__ = ("_expand", "_left", "_right", "_triangle", "g", "ids", "origin_ns", "q", "rows")

    def __init__(self, q: int) -> None:
        self.q = q
        self._left, self._right = np.triu_indices(q)
        self._triangle = self._left * q + self._right
        expand = np.zeros((q, q), np.int64)
        expand[self._left, self._right] = np.arange(len(self._left))
        self._expand = np.maximum(expand, expand.T)
        self.ids = np.empty(0, np.int32)
        self.g = np.empty((0, len(self._left)))
        self.rows = np.empty(0)
        self.origin_ns = 0

    def restored(self) -> None:
        """Each point has its statistics."""
        if self.g.shape != (len(self.ids), len(self._left)) or len(self.rows) != len(self.ids):
            raise StateError("points without statistics")
        if len(np.unique(self.ids)) != len(self.ids) or ((self.ids < 0) | (self.ids >= _BATCHES * _CONTEXTS)).any():
            raise StateError("points that are none")

    def learn(self, z: Floats, end_ns: Ints, weight: Floats, counted: Floats, spent: Floats) -> None:
        """Add rows z (n, q) of weight (n,), counted as rows (n,), each worth so many half-lives (n,)."""
        self.origin_ns = self.origin_ns or int(end_ns[0])
        groups = Groups.of(points_of(z))
        order, starts = groups.order, groups.starts
        decay, whole = decays_of(groups, spent.take(order))
        rows = z.take(order, axis=0)
        rows[:, -1] *= (end_ns.take(order) - self.origin_ns) * 1e-9
        left = rows * (weight.take(order) * decay)[:, None]
        new = products_of(groups, left, rows).take(self._triangle, axis=1)
        at = self._places(groups.ids)
        kept = kept_of(whole)
        self.g[at] = self.g[at] * kept[:, None] + new
        self.rows[at] = self.rows[at] * kept + np.add.reduceat(counted.take(order) * decay, starts)

    def _places(self, ids: Ints) -> Ints:
        """Where the points are, (g,); those that are new get a place."""
        places = np.full(_BATCHES * _CONTEXTS, -1)
        places[self.ids] = np.arange(len(self.ids))
        new = ids[places[ids] < 0]
        if len(new):
            places[new] = np.arange(len(self.ids), len(self.ids) + len(new))
            self.ids = np.concatenate([self.ids, new.astype(np.int32)])
            self.g = np.concatenate([self.g, np.zeros((len(new), self.g.shape[1]))])
            self.rows = np.concatenate([self.rows, np.zeros(len(new))])
        return places[ids]

    def matrices(self) -> Floats:
        """G of each point as a full matrix, (k, q, q)."""
        full: Floats = self.g[:, self._expand]
        return full

    def decay(self, spent: Floats) -> None:
        """Forget as if rows worth ``spent`` (32,) half-lives had been learned in each stratum."""
        by_batch = spent.reshape(-1, _BATCHES).max(axis=0)
        kept = kept_of(by_batch[self.ids // _CONTEXTS])
        self.g *= kept[:, None]
        self.rows *= kept

    def discount(self, keep: float, gain: float) -> None:
        """Keep this share, and say that the same work now takes ``gain`` times as long."""
        target = self.q - 2
        power = (self._left == target).astype(np.float64) + (self._right == target)
        self.g *= keep * gain ** (power - 2.0)
        self.rows *= keep

    def add(self, other: OperatingPoints) -> None:
        """Statistics of both."""
        if not len(other.ids):
            return
        self.origin_ns = self.origin_ns or other.origin_ns
        at = self._places(other.ids.astype(np.int64))
        self.g[at] += other._since(self.origin_ns)
        self.rows[at] += other.rows

    def _since(self, origin_ns: int) -> Floats:
        """G with t counted from another moment: l t becomes l (t + shift)."""
        later = np.eye(self.q)
        later[-1, 0] = (self.origin_ns - origin_ns) * 1e-9
        moved: Floats = (later @ self.matrices() @ later.T)[:, self._left, self._right]
        return moved

    def widened(self, at: int, more: int) -> OperatingPoints:
        """The same statistics with ``more`` columns, never seen, before column ``at``."""
        wide = OperatingPoints(self.q + more)
        place = np.arange(self.q) + more * (np.arange(self.q) >= at)
        wide.g = np.zeros((len(self.ids), len(wide._left)))
        wide.g[:, wide._expand[place[self._left], place[self._right]]] = self.g
        wide.ids, wide.rows, wide.origin_ns = self.ids, self.rows, self.origin_ns
        return wide


def points_of(z: Floats) -> Ints:
    """Operating point of each row, (n,)."""
    requests = np.maximum(z[:, REQUESTS], 1e-9)
    batch = np.minimum(np.maximum(np.frexp(requests / z[:, -1])[1] - 1, 0), _BATCHES - 1)
    context = np.minimum(np.maximum(np.frexp(z[:, CONTEXT] / requests)[1] - 1 - _SHORT, 0), _CONTEXTS - 1)
    points: Ints = (batch * _CONTEXTS + context).astype(np.int64)
    return points
