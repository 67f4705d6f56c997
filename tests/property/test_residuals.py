"""Residuals only grow, count every row that was predicted once, and are what a reader would have counted himself."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.config.schema import Config
from online.bank import Bank, merge_states
from online.blocks import Cutter
from online.prediction.residuals import RATIO_BOUNDS, Residuals
from online.rls import LearnerSettings, RlsLearner
from online.rows import Target
from online.snapshot import ResidualSnapshot
from online.target import make_learner
from online.target.target_state import YOUNG_BLOCK_ROWS
from tests.support.linear_steps import steps

BOTH = Config(learners=("rls", "river:linear"))
# Two published sets, so that the champion can change: one that knows what step time depends on, and one that is blind.
TWO = Config(learners=("rls",), feature_sets=("portable", "custom"), custom={"step_time": ("requests",)})


def _residuals(bank, target="step_time"):
    found = bank.targets("c").get(target)
    return None if found is None else found.residuals


def _cumulative(residuals):
    return [] if residuals is None else [*np.cumsum(residuals.rows).tolist(), residuals.ratio_sum]


@settings(deadline=None)
@given(st.lists(st.floats(-700, 700), min_size=1, max_size=50))
def test_counts_are_those_of_the_ratios_and_the_sum_is_bounded(log_ratios):
    residuals = Residuals()
    with np.errstate(over="ignore"):
        residuals.learn(np.array(log_ratios))
    exact = np.array([sum(r <= np.log(b) for r in log_ratios) for b in (*RATIO_BOUNDS, np.inf)])
    assert np.cumsum(residuals.rows).tolist() == exact.tolist()
    assert residuals.ratio_sum == pytest.approx(sum(np.exp(min(r, np.log(10.0))) for r in log_ratios))
    assert 0.0 <= residuals.ratio_sum <= 10.0 * len(log_ratios) * (1 + 1e-12)


def test_a_ratio_of_a_bound_belongs_to_the_class_below_it_as_prometheus_has_it():
    residuals = Residuals()
    residuals.learn(np.log(np.array(RATIO_BOUNDS)))
    assert residuals.rows.tolist() == [1] * len(RATIO_BOUNDS) + [0]


@settings(max_examples=8, deadline=None)
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
    assert 900 - waiting - before[-2] <= YOUNG_BLOCK_ROWS  # the first block is the only one that nobody could predict


def test_they_are_of_the_published_coefficients_before_the_row_was_learned():
    rows = steps(700, 3, stalls=0.01).rows
    bank = Bank(Config(learners=("rls",)))
    bank.learn("c", Target.STEP_TIME, rows)
    target = bank._configs["c"][Target.STEP_TIME]
    features = target.matrix.sets["portable"][0]
    alone = make_learner("rls", features, LearnerSettings())
    assert isinstance(alone, RlsLearner)
    ratios = []
    for block in Cutter(YOUNG_BLOCK_ROWS, 10**9).push(target.matrix.evaluate(rows)[0]):
        if alone.started:
            ratios.append(block.elapsed_us / (block.x @ alone.members.slow.beta[: len(features)]))
        alone.learn(block)
    expected = np.bincount(np.searchsorted(RATIO_BOUNDS, np.concatenate(ratios)), minlength=len(RATIO_BOUNDS) + 1)
    assert target.residuals.rows.tolist() == expected.tolist()


def test_the_champion_is_the_one_that_is_counted():
    bank = Bank(TWO)
    bank.learn("c", Target.STEP_TIME, steps(3000, 5).rows)
    target = bank.targets("c")["step_time"]
    assert target.champion == "portable"
    near = sum(target.residuals.rows[3:7])  # 0.9 to 1.1
    assert near > 0.98 * sum(target.residuals.rows)
    assert target.models["custom"].error.median_ape > 0.1


def test_a_bank_without_rls_has_none():
    bank = Bank(Config(learners=("river:linear",)))
    bank.learn("c", Target.STEP_TIME, steps(300, 1).rows)
    assert "residuals" not in msgspec.to_builtins(bank.targets("c")["step_time"])


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
