"""Recursive least squares in information form is that of the textbook, in covariance form."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from online import STEP_FEATURES, RowBlock, Target
from online.blocks import Design
from online.constants import HALF_LIFE_STEPS
from online.features import portable
from online.rls.solve import RELATIVE_RIDGE, solve
from online.rls.strata import Strata
from tests.support.covariance_rls import CovarianceRLS


@given(
    seed=st.integers(0, 2**32 - 1),
    p=st.integers(1, 6),
    n=st.integers(1, 120),
    forgets=st.booleans(),
    cut=st.integers(0, 120),
)
def test_statistics_and_solve_equal_the_recursion_row_by_row(seed, p, n, forgets, cut):
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.1, 2.0, size=(n, p)) * rng.uniform(0.1, 10, p)
    y = np.abs(x @ rng.normal(size=p) + rng.normal(size=n)) + 0.1
    prior, half_lives = rng.uniform(0.1, 10.0, p), 1e-3 * forgets
    strata, z = Strata(p + 2), np.column_stack([x, y, np.ones(n)])
    for start, end in ((0, min(cut, n)), (min(cut, n), n)):
        if end > start:
            rows, one = slice(start, end), np.ones(end - start)
            lines = RowBlock.of_lines(np.ones((len(one), len(STEP_FEATURES))), one)
            block = dataclasses.replace(lines, weight=half_lives * HALF_LIFE_STEPS * one)
            strata.learn(Design.of(portable(Target.STEP_TIME), block), z[rows], one, one, one)
    g, free = strata.total(), np.ones(p, np.bool_)
    found = solve(g[:p, :p], g[:p, p], free, prior_precision=prior).beta

    # What is added at every solve has not decayed; the recursion's first penalty has.
    forgetting = 2.0**-half_lives
    added = prior + RELATIVE_RIDGE * (g.diagonal()[:p] + prior)
    textbook = CovarianceRLS(added / forgetting**n, forgetting)
    for row, value in zip(x, y, strict=True):
        textbook.learn(row, float(value))
    assert found == pytest.approx(textbook.theta, rel=1e-9, abs=1e-9)
