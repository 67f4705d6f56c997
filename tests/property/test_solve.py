"""The solver finds the minimum."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from online.rls.solve import solve


def _by_enumeration(a, b, free):
    """Every active set, the best feasible one."""
    p = len(b)
    best, value = np.zeros(p), 0.0
    for on in itertools.product([False, True], repeat=p):
        mask = np.array(on) | free
        if not mask.any():
            continue
        z = np.zeros(p)
        z[mask] = np.linalg.solve(a[np.ix_(mask, mask)], b[mask])
        if (z[~free] < 0).any():
            continue
        objective = z @ a @ z - 2 * b @ z
        if objective < value - 1e-15:
            best, value = z, objective
    return best


@given(seed=st.integers(0, 2**32 - 1), p=st.integers(1, 6), free=st.integers(0, 2), correlation=st.floats(0, 0.99))
def test_equals_the_best_of_all_active_sets(seed, p, free, correlation):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, p)) * np.sqrt(1 - correlation) + rng.normal(size=(40, 1)) * np.sqrt(correlation)
    x *= 10.0 ** rng.uniform(-4, 4, p)
    y = x @ (rng.normal(size=p) / np.abs(x).mean(axis=0))
    a, b = x.T @ x, x.T @ y
    mask = np.arange(p) >= p - free
    ridged = a + 1e-6 * np.diag(a.diagonal())
    found = solve(a, b, mask)
    scale = np.sqrt(a.diagonal())
    expected = _by_enumeration(ridged / np.outer(scale, scale), b / scale, mask) / scale
    assert np.allclose(found.beta * scale, expected * scale, rtol=1e-7, atol=1e-7 * np.abs(expected * scale).max())
    assert (found.beta[~mask] >= 0).all()
