"""Ridge regression with non-negative coefficients, from sufficient statistics.

    minimise over beta, beta_j >= 0 where not free:   beta' (A + H) beta - 2 (b + H beta0)' beta

    A: (p, p) = sum w x x'    b: (p,) = sum w x y    H = diag(h), h: (p,) >= 0    beta0: (p,) the prior's mean

H is added at every solve and is not part of A, so it cannot be forgotten: that, and not the form of the recursion, is
what makes wind-up impossible. A relative ridge of 1e-6 on the scaled diagonal bounds the condition number by p * 1e6.

Scaling (Jacobi): C = D^-1/2 (A + H) D^-1/2 with D = diag(A + H); columns without data and without a prior have
D_j = 0, take no part, and get coefficient 0.

Active set: block principal pivoting with Murty's rule as the backup; C is positive definite, so the solution is unique
and the method ends. Warm start = the passive set of the last solve, right in all but a few blocks: one factorisation.
Reference: Kim and Park, Fast nonnegative matrix factorization: an active-set-like method (SIAM J. Sci. Comput. 2011);
Murty, Note on a Bard-type scheme (Opsearch 1974).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from online.rows import Floats, Mask

# Guard: bounds the condition number by p * 1e6.
RELATIVE_RIDGE = 1e-6
"""Added to the unit diagonal of the scaled system at every solve."""

# Guard: rounding of gradients.
_TOLERANCE = 1e-10
# Guard: below, scaling would overflow.
NOTHING = 1e-280
# Source: Kim and Park; three, then Murty's rule.
_FULL_EXCHANGES = 3


@dataclass(frozen=True, slots=True)
class Solution:
    """beta (p,), the passive set it rests on (p,), and which columns had anything to say (p,)."""

    beta: Floats
    passive: Mask
    live: Mask


def solve(
    a: Floats,
    b: Floats,
    free: Mask,
    warm: Mask,
    *,
    prior_precision: Floats | None = None,
    prior_mean: Floats | None = None,
) -> Solution:
    """Minimise the quadratic above; ``free`` columns may be negative, ``warm`` is the last passive set."""
    if prior_precision is None:
        diagonal, right = a.diagonal(), b
    else:
        diagonal = a.diagonal() + prior_precision
        right = b if prior_mean is None else b + prior_precision * prior_mean
    live = diagonal > NOTHING
    if not live.all():
        return _solve_live(a + np.diag(diagonal - a.diagonal()), right, free, warm)
    scale = 1.0 / np.sqrt(diagonal)
    c = a * scale
    c *= scale[:, None]
    # The prior adds to the diagonal only, and that is 1 after scaling by construction.
    c.flat[:: len(b) + 1] = 1.0 + RELATIVE_RIDGE
    passive = warm | free
    z, passive = _pivot(c, right * scale, free, passive if passive.any() else live)
    return Solution(z * scale, passive, live)


def _solve_live(a: Floats, right: Floats, free: Mask, warm: Mask) -> Solution:
    """The same on the columns that have something to say; the others get 0."""
    beta, passive = np.zeros(len(right)), np.zeros(len(right), np.bool_)
    live = a.diagonal() > NOTHING
    on = live.nonzero()[0]
    if len(on):
        solution = solve(a[on[:, None], on], right[on], free[on], warm[on])
        beta[on], passive[on] = solution.beta, solution.passive
    return Solution(beta, passive, live)


def _pivot(c: Floats, rhs: Floats, free: Mask, passive: Mask) -> tuple[Floats, Mask]:
    p = len(rhs)
    z: Floats = np.zeros(p)
    if passive.all():
        z = np.asarray(np.linalg.solve(c, rhs), np.float64)
        if ((z >= 0.0) | free).all():
            return z, passive
    best, backup = p + 1, _FULL_EXCHANGES
    tolerance = -_TOLERANCE * float(np.abs(rhs).max(initial=0.0))
    for _ in range(8 * p + 8):
        on = passive.nonzero()[0]
        z = np.zeros(p)
        if len(on):
            z[on] = np.linalg.solve(c[on[:, None], on], rhs[on])
        wrong = np.where(passive, (z < 0.0) & ~free, c @ z - rhs < tolerance)
        count = int(np.count_nonzero(wrong))
        if count == 0:
            return z, passive
        if count < best:
            best, backup = count, _FULL_EXCHANGES
            passive = passive ^ wrong
        elif backup > 0:
            backup -= 1
            passive = passive ^ wrong
        else:
            passive = passive.copy()
            last = int(wrong.nonzero()[0][-1])
            passive[last] = not passive[last]
    return np.where(free, z, np.maximum(z, 0.0)), passive
