"""Statistics by operating point: what one learner saw, apart by octaves of batch and of context per request.

A row z = [x, phase, y, l] of weight w belongs to the point (floor(log2 n), floor(log2 c)): n requests per step on the
mean, of c tokens of context each; below 1,024 is one octave. Per point, beside what :mod:`online.rls.strata` sums:

    G <- 2^(-sum e_i) G + sum_i 2^(-age_i) w_i v_i v_i'        v = [x, phase, y, l t], t: seconds since the first row
    n <- 2^(-sum e_i) n + sum_i 2^(-age_i) h_i                 h: Huber's share times the row's weight

A linear form is right to a per cent or two at any one point, however many rows say so; who weighs a point by its rows
believes its misfit. Hence points are kept apart, and each is one observation (online/transfer/evidence.py). ``l t``
tells when a point was visited; l itself is the first column, the intercept.

Guarantee: adding equals learning together, to rounding. Points that were never visited cost nothing.
"""

from __future__ import annotations

import numpy as np

from online.blocks import Groups
from online.features import portable
from online.rows import Floats, Ints, Target
from online.state import StateError, Stateful

from .grouped_sums import decays_of, kept_of, products_of

# Guard: batches of 2^15 requests and contexts of 2^18 tokens and more share the last octave. Guess: 2^10.
_BATCHES, _CONTEXTS, _SHORT = 16, 9, 9
"""Octaves; what is shorter than 2^10 tokens is one: it costs a step little beside its weights."""
_COLUMNS = [column.name for column in portable(Target.STEP_TIME).columns]
_CONTEXT, _REQUESTS = _COLUMNS.index("decode_context_tokens"), _COLUMNS.index("requests")


class OperatingPoints(Stateful):
    """Of a learner of ``portable`` with q augmented columns.

    Attributes:
        ids: 9 * octave of batch + octave of context per request, of each point visited, (k,).
        g: sums over [x, phase, y, l t], flat, (k, q * q).
        rows: n, (k,).
        origin_ns: when t is 0; 0 before any row.
    """

    SAVED = ("ids", "g", "rows", "origin_ns")

    __slots__ = ("g", "ids", "origin_ns", "q", "rows")

    def __init__(self, q: int) -> None:
        self.q = q
        self.ids = np.empty(0, np.int32)
        self.g = np.empty((0, q * q))
        self.rows = np.empty(0)
        self.origin_ns = 0

    def restored(self) -> None:
        """Each point has its statistics."""
        if self.g.shape != (len(self.ids), self.q**2) or len(self.rows) != len(self.ids):
            raise StateError("points without statistics")
        if len(np.unique(self.ids)) != len(self.ids) or ((self.ids < 0) | (self.ids >= _BATCHES * _CONTEXTS)).any():
            raise StateError("points that are none")

    def learn(self, z: Floats, end_ns: Ints, weight: Floats, counted: Floats, spent: Floats) -> None:
        """Add rows z (n, q) of weight (n,), counted as rows (n,), each worth so many half-lives (n,)."""
        self.origin_ns = self.origin_ns or int(end_ns[0])
        groups = Groups.of(points_of(z))
        order = groups.order
        decay, whole = decays_of(groups, spent.take(order))
        rows = z.take(order, axis=0)
        rows[:, -1] *= (end_ns.take(order) - self.origin_ns) * 1e-9
        at, kept = self._places(groups.ids), kept_of(whole)
        new = products_of(groups, rows * (weight.take(order) * decay)[:, None], rows)
        self.g[at] = self.g[at] * kept[:, None] + new
        self.rows[at] = self.rows[at] * kept + np.add.reduceat(counted.take(order) * decay, groups.starts)

    def _places(self, ids: Ints) -> Ints:
        """Indices of points, (g,); those that are new get a place."""
        new = np.setdiff1d(ids, self.ids)
        self.ids = np.concatenate([self.ids, new.astype(np.int32)])
        self.g = np.pad(self.g, ((0, len(new)), (0, 0)))
        self.rows = np.pad(self.rows, (0, len(new)))
        places = np.zeros(_BATCHES * _CONTEXTS, np.int64)
        places[self.ids] = np.arange(len(self.ids))
        return places[ids]

    def matrices(self) -> Floats:
        """G of each point as a matrix, (k, q, q)."""
        return self.g.reshape(-1, self.q, self.q)

    def decay(self, spent: Floats) -> None:
        """Forget as if rows worth ``spent`` (32,) half-lives had been learned in each stratum."""
        kept = kept_of(spent.reshape(-1, _BATCHES).max(axis=0)[self.ids // _CONTEXTS])
        self.g *= kept[:, None]
        self.rows *= kept

    def discount(self, keep: float, gain: float) -> None:
        """Keep this share, and say that the same work now takes ``gain`` times as long."""
        scale = np.full(self.q, 1.0 / gain)
        scale[-2] = 1.0
        self.g *= keep * np.outer(scale, scale).ravel()
        self.rows *= keep

    def add(self, other: OperatingPoints) -> None:
        """Statistics of both."""
        if not len(other.ids):
            return
        self.origin_ns = self.origin_ns or other.origin_ns
        at = self._places(other.ids.astype(np.int64))
        moved = np.eye(self.q)  # t counts from another moment there: l t becomes l (t + shift)
        moved[-1, 0] = (other.origin_ns - self.origin_ns) * 1e-9
        self.g[at] += (moved @ other.matrices() @ moved.T).reshape(len(at), -1)
        self.rows[at] += other.rows

    def widened(self, at: int, more: int) -> OperatingPoints:
        """The same statistics with ``more`` columns, never seen, before column ``at``."""
        wide = OperatingPoints(self.q + more)
        place = np.arange(self.q) + more * (np.arange(self.q) >= at)
        g = np.zeros((len(self.ids), wide.q, wide.q))
        g[:, place[:, None], place] = self.matrices()
        wide.ids, wide.g, wide.rows, wide.origin_ns = self.ids, g.reshape(len(g), wide.q**2), self.rows, self.origin_ns
        return wide


def points_of(z: Floats) -> Ints:
    """Operating point of each row, (n,)."""
    requests = np.maximum(z[:, _REQUESTS], 1e-9)
    batch = np.minimum(np.maximum(np.frexp(requests / z[:, -1])[1] - 1, 0), _BATCHES - 1)
    context = np.minimum(np.maximum(np.frexp(z[:, _CONTEXT] / requests)[1] - 1 - _SHORT, 0), _CONTEXTS - 1)
    points: Ints = (batch * _CONTEXTS + context).astype(np.int64)
    return points
