"""Residuals only grow, count every row that was predicted once, and are what a reader would have counted himself."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.config import Config
from online import Bank
from online.constants import NOISE_ROWS
from online.errors import RATIO_BOUNDS
from online.features import portable
from tests.support.banks import RLS, STEP, coefficients
from tests.support.linear_steps import steps

# Two published sets, so that the champion can change: one that knows what step time depends on, and one that is blind.
TWO = Config(learners=("rls",), feature_sets=("portable", "custom"), custom={"step_time": ("requests",)})


def _residuals(bank):
    found = bank.targets("c").get("step_time")
    return None if found is None else found.residuals


def _cumulative(residuals):
    return [] if residuals is None else [*np.cumsum(residuals.rows).tolist(), residuals.ratio_sum]


@settings(max_examples=settings.default.max_examples // 6)
@given(seed=st.integers(0, 500), drift=st.sampled_from([None, 500]), size=st.integers(20, 90))
def test_whoever_looks_sees_them_only_grow_whatever_the_machine_does(seed, drift, size):
    rows = steps(900, seed, stalls=0.02, warm_up=True, drift_at=drift, gain=1.6).rows
    bank, before = Bank(TWO), [0] * (len(RATIO_BOUNDS) + 2)
    for start in range(0, len(rows), size):
        bank.learn("c", STEP, rows.slice(start, min(len(rows), start + size)))
        now = _cumulative(_residuals(bank)) or before
        assert all(b >= a for a, b in zip(before, now, strict=True))
        before = now
    assert 900 - before[-2] <= 2 * NOISE_ROWS  # nobody could predict the first block, and the last one waits


def test_they_are_of_the_published_coefficients_before_the_row_was_learned():
    rows, bank, ratios = steps(700, 3, noise=0.15).rows, Bank(RLS), []
    for at in range(0, 672, NOISE_ROWS):
        block = rows.slice(at, at + NOISE_ROWS)
        if at:
            ratios.append(block.elapsed_us / (portable(STEP).evaluate(block) @ coefficients(bank)))
        bank.learn("c", STEP, block)
    expected = np.bincount(np.searchsorted(RATIO_BOUNDS, np.concatenate(ratios)), minlength=len(RATIO_BOUNDS) + 1)
    assert _residuals(bank).rows == expected.tolist()
