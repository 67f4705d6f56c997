"""The fast member: one decayed statistic that follows the machine, pulled toward the slow member.

    F    <- 2^(-sum l_i / 300) F + sum_i 2^(-age_i / 300) w_i z_i z_i'          z = [x, phase, y, l], F: (q, q)
    beta  = argmin over beta_j >= 0 of  beta' F_xx beta - 2 F_xy' beta + sum_j (s / tau_j)^2 (beta_j - m_j)^2
    m     = beta of the slow member (times the gain on trial)       tau_j = 25 % of |m_j| + 1 % of ybar / rms x_j

For live prediction only. A half-life of 300 steps follows a change in seconds and is up to 66 % wrong on a workload
seen minutes ago (its own directions decay): that is why it is never published, and why the slow member is its prior.
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats, Mask
from online.state import saved

from .solve import solve

_TINY = 1e-150


class FastMember:
    """Statistics and solution of p columns.

    Args:
        p: features and phases.
        half_life_steps: of everything it knows.
        prior_share, prior_floor: tau, see the equations.
    """

    STATE = saved("fast_member", f=Floats, beta=Floats, passive=Mask)

    __slots__ = ("beta", "f", "half_life_steps", "p", "passive", "prior_floor", "prior_share")

    def __init__(self, p: int, half_life_steps: float, prior_share: float, prior_floor: float) -> None:
        self.p = p
        self.half_life_steps = half_life_steps
        self.prior_share = prior_share
        self.prior_floor = prior_floor
        self.f = np.zeros((p + 2, p + 2))
        self.beta = np.zeros(p)
        self.passive: Mask = np.zeros(p, np.bool_)

    def learn(self, steps: Floats, z: Floats, weight: Floats) -> None:
        """Add rows z (n, q) of weight (n,)."""
        age = np.cumsum(steps) / self.half_life_steps
        left = z * (weight * np.exp2(age - age[-1]))[:, None]
        self.f *= 2.0 ** -min(float(age[-1]), 1000.0)
        self.f += left.T @ z

    def solve(self, mean: Floats, per_row: Floats, scale: float, free: Mask) -> None:
        """Solve around the mean (p,); per_row (p,) = A_jj of the slow member per effective row = (rms x_j / ybar)^2."""
        p = self.p
        tau = self.prior_share * np.abs(mean) + self.prior_floor / np.sqrt(np.maximum(per_row, _TINY))
        solution = solve(
            self.f[:p, :p],
            self.f[:p, p],
            free,
            self.passive,
            prior_precision=(scale / tau) ** 2,
            prior_mean=mean,
        )
        self.beta, self.passive = solution.beta, solution.passive

    def reset(self, beta: Floats) -> None:
        """Forget everything and start from beta."""
        self.f[:] = 0.0
        self.beta = beta.copy()

    def widened(self, more: int) -> FastMember:
        """The same member with ``more`` columns, never seen, after its p."""
        p = self.p
        wide = FastMember(p + more, self.half_life_steps, self.prior_share, self.prior_floor)
        old = np.r_[0:p, p + more, p + more + 1]
        wide.f[old[:, None], old] = self.f
        wide.beta[:p], wide.passive[:p] = self.beta, self.passive
        return wide
