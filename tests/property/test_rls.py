"""The textbook recursion keeps its textbook promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from online.rls.recursion import CovarianceRLS


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p=st.integers(1, 8),
    n=st.integers(1, 120),
    ridge=st.floats(1e-3, 10.0),
)
def test_equals_ridge_in_batch(seed, p, n, ridge):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) * rng.uniform(0.1, 10, p)
    y = x @ rng.normal(size=p) + rng.normal(size=n)
    rls = CovarianceRLS(p, ridge)
    for row, target in zip(x, y, strict=True):
        assert rls.learn(row, float(target))
    batch = np.linalg.solve(x.T @ x + ridge * np.eye(p), x.T @ y)
    assert np.linalg.norm(rls.theta - batch) < 1e-8 * max(1.0, np.linalg.norm(batch))


def test_a_row_that_would_make_it_non_finite_changes_nothing():
    rls = CovarianceRLS(2, 1.0)
    rls.learn(np.array([1.0, 2.0]), 3.0)
    before = rls.theta.copy()
    with np.errstate(all="ignore"):
        assert not rls.learn(np.array([np.nan, 1.0]), 1.0)
        assert not rls.learn(np.array([1e300, 1e300]), 1.0)
    assert np.array_equal(rls.theta, before)


def test_trace_is_bounded_when_nothing_excites():
    rls = CovarianceRLS(3, 1e-3, forgetting=0.9, trace_max=100.0)
    for _ in range(5000):
        rls.learn(np.array([1.0, 1.0, 1.0]), 3.0)
    assert np.trace(rls.covariance) <= 1.2 * 100.0 * 3 / 1e-3


@pytest.mark.parametrize("bad", [0.0, -1.0, 1.5, float("nan")])
def test_forgetting_outside_its_range_is_refused(bad):
    with pytest.raises(ValueError, match="forgetting"):
        CovarianceRLS(2, 1.0, forgetting=bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_ridge_outside_its_range_is_refused(bad):
    with pytest.raises(ValueError, match="ridge"):
        CovarianceRLS(2, bad)
