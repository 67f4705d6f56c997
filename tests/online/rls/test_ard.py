"""Relevance is determined by the data, and reversibly."""

import numpy as np
import pytest

from online.features import Column, FeatureSet
from online.rls import Prior, RlsLearner
from online.rows import STEP_FEATURES, Target
from tests.support.designs import learn
from tests.support.linear_steps import BETA, NAMES, steps

NOISE_COLUMNS = ("waiting", "kv_usage_ratio", "finished", "preempted")
SET = FeatureSet(
    "bsr_ard",
    Target.STEP_TIME,
    tuple(Column(name, "us", name) for name in (*NAMES, *NOISE_COLUMNS)),
)


def _rows(n, seed, used=None):
    rows = steps(n, seed, noise=0.02).rows
    rng = np.random.default_rng(seed)
    for name in NOISE_COLUMNS:
        rows.raw[:, STEP_FEATURES.index(name)] = rng.uniform(0, 10, n)
    if used is not None:
        rows.elapsed_us[:] += used * rows.raw[:, STEP_FEATURES.index("waiting")]
    return rows


def used(learner):
    """Names of the columns in use."""
    return [name for name, on in zip(SET.names, learner.passive, strict=False) if on]


def test_columns_that_say_nothing_are_pruned_and_the_others_are_found():
    learner = RlsLearner(SET)
    learn(learner, _rows(3000, 1))
    assert set(NAMES) <= set(used(learner))
    assert len(set(used(learner)) & set(NOISE_COLUMNS)) <= 1
    found = learner.beta[:4]
    assert np.allclose(found, BETA, rtol=0.03)
    pruned = [f for f in learner.snapshot().features if f.name not in used(learner)]
    assert len(pruned) >= 3
    assert {(f.coefficient, f.status) for f in pruned} == {(0.0, "at_bound")}, "nobody's prior"


def _donor_of(waiting, sd):
    """What a donor says: the truth, but for a column that costs nothing here."""
    mean = np.array([*BETA, waiting, 0.0, 0.0, 0.0])
    return Prior(mean, np.array([*(0.15 * BETA), sd, 1.0, 1.0, 1.0]))


@pytest.mark.parametrize("features", [SET, FeatureSet("portable", Target.STEP_TIME, SET.columns)])
def test_a_donor_that_is_wrong_about_a_column_is_overruled_by_the_rows(features):
    """Relevance pulls to 0: pulled to the donor's mean, a pruned column would stay there for ever."""
    learner = RlsLearner(features, _donor_of(waiting=2000.0, sd=1000.0))
    learn(learner, _rows(4000, 7))
    beta = learner.beta
    assert abs(beta[SET.names.index("waiting")]) < 20.0
    assert np.allclose(beta[:4], BETA, rtol=0.03)
    assert learner.snapshot().error.mape < 0.05
