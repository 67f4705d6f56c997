"""Medians, beside numpy's own."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from online.blocks import median_of

NUMBERS = st.floats(-1e12, 1e12)


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_a_median_is_that_of_numpy(values):
    assert median_of(values) == median_of(np.array(values)) == np.median(values)


def test_nothing_has_no_median():
    assert math.isnan(median_of([]))
