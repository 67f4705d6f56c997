"""Residuals only grow, count every row that was predicted once, and are what a reader would have counted himself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.config.schema import Config
from online.bank import Bank, merge_states
from online.blocks import Cutter
from online.constants import NOISE_ROWS
from online.errors import RATIO_BOUNDS
from online.rls import RlsLearner
from online.rows import Target
from online.snapshot import ResidualSnapshot
from tests.support.linear_steps import steps

BOTH = Config(learners=("rls", "river:linear_model.PARegressor"))
# Two published sets, so that the champion can change: one that knows what step time depends on, and one that is blind.
TWO = Config(learners=("rls",), feature_sets=("portable", "custom"), custom={"step_time": ("requests",)})


def _residuals(bank, target="step_time"):
    found = bank.targets("c").get(target)
    return None if found is None else found.residuals


def _cumulative(residuals):
    return [] if residuals is None else [*np.cumsum(residuals.rows).tolist(), residuals.ratio_sum]


@settings(max_examples=5)
@given(seed=st.integers(0, 500), drift=st.sampled_from([None, 500]), size=st.integers(20, 90))
def test_whoever_looks_sees_them_only_grow_whatever_the_machine_does(seed, drift, size):
    rows = steps(900, seed, stalls=0.02, warm_up=True, drift_at=drift, gain=1.6).rows
    bank, before = Bank(TWO), [0] * (len(RATIO_BOUNDS) + 2)
    for start in range(0, len(rows), size):
        bank.learn("c", Target.STEP_TIME, rows.slice(start, min(len(rows), start + size)))
        now = _cumulative(_residuals(bank)) or before
        assert all(b >= a for a, b in zip(before, now, strict=True))
        before = now
    waiting = len(bank._configs["c"][Target.STEP_TIME].cutter)
    assert 900 - waiting - before[-2] <= NOISE_ROWS  # the first block is the only one that nobody could predict


def test_they_are_of_the_published_coefficients_before_the_row_was_learned():
    rows = steps(700, 3, stalls=0.01).rows
    bank = Bank(Config(learners=("rls",)))
    bank.learn("c", Target.STEP_TIME, rows)
    target = bank._configs["c"][Target.STEP_TIME]
    features = target.matrix.sets["portable"][0]
    alone = RlsLearner(features)
    ratios = []
    for block in Cutter(NOISE_ROWS, 10**9).push(target.matrix.evaluate(rows)[0]):
        if alone.started:
            ratios.append(block.elapsed_us / (block.x @ alone.fit.beta[: len(features)]))
        alone.learn(block)
    expected = np.bincount(np.searchsorted(RATIO_BOUNDS, np.concatenate(ratios)), minlength=len(RATIO_BOUNDS) + 1)
    assert target.residuals.rows.tolist() == expected.tolist()


def test_merging_adds_them():
    parts = []
    for seed in (1, 2):
        bank = Bank(BOTH)
        bank.learn("c", Target.STEP_TIME, steps(640, seed).rows)
        bank._configs["c"][Target.STEP_TIME].flush()
        parts.append(bank)
    merged = Bank(BOTH)
    merged.restore(merge_states([part.state() for part in parts], BOTH))
    a, b, both = map(_residuals, (*parts, merged))
    assert isinstance(both, ResidualSnapshot)
    assert both.rows == [x + y for x, y in zip(a.rows, b.rows, strict=True)]
    assert both.ratio_sum == pytest.approx(a.ratio_sum + b.ratio_sum, rel=1e-12)
