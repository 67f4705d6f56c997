"""What one configuration learned serves another; statistics pool exactly."""

import numpy as np
import pytest

from online.features import build
from online.features.systems import PHYSICS
from online.rls import RlsLearner
from online.rows import Target
from online.transfer import donor_of, pool
from tests.support.configurations import CONFIGS, donors_among, learner_of, rows_of

STEP = Target.STEP_TIME


def _mape(features, beta, rows):
    x = features.evaluate(rows)
    return float(np.mean(np.abs(x @ beta[: len(features)] - rows.elapsed_us) / rows.elapsed_us))


@pytest.mark.parametrize("target", list(CONFIGS))
def test_twenty_rows_and_donors_predict_what_no_donor_was(target):
    donors = donors_among(PHYSICS, [name for name in CONFIGS if name != target])
    prior = pool(PHYSICS, STEP, donors).prior(CONFIGS[target])
    learner, cold = (learner_of(PHYSICS, target, n=20, seed=50, prior=each) for each in (prior, None))
    rows, _ = rows_of(PHYSICS, target, 800, seed=60)
    warm_error = _mape(learner.features, learner.beta, rows)
    assert warm_error < 0.05
    assert warm_error < _mape(cold.features, cold.beta, rows) + 0.005


def test_donors_pool_to_the_fit_of_their_summed_statistics():
    donors = donors_among(PHYSICS, ["7b", "7b-a100", "70b"])
    pooled, backwards = (pool(PHYSICS, STEP, each) for each in (donors, donors[::-1]))
    found = dict(zip(backwards.names, backwards.gamma, strict=True))
    for name, value in zip(pooled.names, pooled.gamma, strict=True):
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-9)
    b = sum(m.T @ donor.b for donor, m in pooled.donors)
    gradient = sum(m.T @ donor.a @ m for donor, m in pooled.donors) @ pooled.gamma - b
    active = pooled.gamma > 0
    assert np.abs(gradient[active] / np.abs(b[active])).max() < 1e-4
    assert (gradient[~active] >= -1e-4 * np.abs(b[~active]) - 1e-12).all()


def test_what_is_constant_in_each_configuration_is_told_by_several():
    """Two GPUs share the weights that one reads: the intercept follows, though no donor has a column for it."""
    donors = donors_among(PHYSICS, ["7b", "7b-a100", "70b"])
    pooled = pool(PHYSICS, STEP, donors)
    told = [pooled.prior(CONFIGS["70b"] | {"tensor_parallel_size": gpus}).mean[0] for gpus in (4, 8)]
    saved_us = pooled.gamma[pooled.names.index("t_weight")] * PHYSICS.table(STEP, CONFIGS["70b"])[-1].constant / 2
    assert told[0] - told[1] == pytest.approx(saved_us)
    assert saved_us > 1000.0


def test_a_prior_knows_nothing_of_columns_no_donor_has():
    prior = pool(PHYSICS, STEP, donors_among(PHYSICS, ["7b"])).prior(CONFIGS["mixtral"])
    names = build("physics", STEP, CONFIGS["mixtral"]).names
    assert np.isinf(prior.sd[names.index("t_experts")])
    assert len(prior.mean) == len(names)
    assert np.isfinite(prior.mean).all()


def test_a_learner_without_rows_is_no_donor():
    """As the nearest one, it would keep others from being asked."""
    assert donor_of("x", CONFIGS["7b"], RlsLearner(build("physics", STEP, CONFIGS["7b"]))) is None
