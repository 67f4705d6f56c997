"""Medians, beside numpy's own."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from online.drift.medians import median_of, medians_of

NUMBERS = st.floats(-1e12, 1e12)


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_a_median_is_that_of_numpy(values):
    assert median_of(values) == median_of(np.array(values)) == np.median(values)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=10))
def test_medians_of_groups_are_those_of_numpy(groups):
    values = np.array(groups, float).reshape(-1)
    assert medians_of(values, 4) == [np.median(group) for group in groups]


def test_nothing_has_no_median():
    assert math.isnan(median_of([]))
