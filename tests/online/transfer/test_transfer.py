"""What one configuration learned serves another; statistics pool exactly."""

import numpy as np
import pytest

from online.features import build
from online.features.systems import HFD_TL, PHYSICS, RECE
from online.rls import RlsLearner
from online.rows import Target
from online.transfer import pooled as rece
from online.transfer import pooled as transfer
from tests.support.configurations import CONFIGS, rows_of
from tests.support.designs import design_of

STEP = Target.STEP_TIME


def _learner(system, name, n=1500, seed=0, prior=None):
    rows, beta = rows_of(PHYSICS, name, n, seed)
    features = build(system.name, STEP, CONFIGS[name])
    learner = RlsLearner(features, prior)
    design = design_of(rows, features)
    for start in range(0, n, 32):
        learner.learn(design.slice(start, min(start + 32, n)))
    return learner, rows, beta


def _donors(system, names):
    return [transfer.donor_of(name, CONFIGS[name], _learner(system, name, seed=i)[0]) for i, name in enumerate(names)]


def _mape(features, beta, rows):
    x = features.evaluate(rows)
    return float(np.mean(np.abs(x @ beta[: len(features)] - rows.elapsed_us) / rows.elapsed_us))


@pytest.mark.parametrize("target", list(CONFIGS))
def test_twenty_rows_and_donors_predict_what_no_donor_was(target):
    donors = _donors(PHYSICS, [name for name in CONFIGS if name != target])
    prior = transfer.pool(PHYSICS, STEP, donors).prior(CONFIGS[target])
    learner, _, _ = _learner(PHYSICS, target, n=20, seed=50, prior=prior)
    cold, _, _ = _learner(PHYSICS, target, n=20, seed=50)
    rows, _ = rows_of(PHYSICS, target, 800, seed=60)
    warm_error = _mape(learner.features, learner.fit.beta, rows)
    assert warm_error < 0.05
    assert warm_error < _mape(cold.features, cold.fit.beta, rows) + 0.005


def test_donors_pool_to_the_fit_of_their_summed_statistics():
    donors = _donors(PHYSICS, ["7b", "7b-a100", "70b"])
    pooled = transfer.pool(PHYSICS, STEP, donors)
    backwards = transfer.pool(PHYSICS, STEP, donors[::-1])
    found = dict(zip(backwards.names, backwards.gamma, strict=True))
    for name, value in zip(pooled.names, pooled.gamma, strict=True):
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-9)
    gradient = pooled.a @ pooled.gamma - pooled.b
    active = pooled.gamma > 0
    assert np.abs(gradient[active] / np.abs(pooled.b[active])).max() < 1e-4
    assert (gradient[~active] >= -1e-4 * np.abs(pooled.b[~active]) - 1e-12).all()


def test_a_donor_alone_gives_its_own_coefficients_back():
    learner, _, beta = _learner(PHYSICS, "7b")
    donor = transfer.donor_of("7b", CONFIGS["7b"], learner)
    prior = transfer.pool(PHYSICS, STEP, [donor]).prior(CONFIGS["7b"])
    rows, _ = rows_of(PHYSICS, "7b", 500, seed=9)
    assert _mape(learner.features, prior.mean, rows) < 0.012
    assert len(beta) == len(learner.features)


def test_a_pooled_zero_is_no_knowledge_where_donors_have_something():
    """The pool puts the cost of tokens into other columns, and none of its donors agrees that they cost nothing."""
    donors = _donors(PHYSICS, ["7b", "7b-a100", "70b"])
    pooled = transfer.pool(PHYSICS, STEP, donors)
    pooled.gamma[pooled.names.index("t_kv")] = 0.0
    prior = pooled.prior(CONFIGS["mixtral"])
    place = build("physics", STEP, CONFIGS["mixtral"]).names.index("t_kv")
    own = [donor.beta[donor.features.names.index("t_kv")] for donor in donors]
    assert prior.mean[place] == 0.0
    assert prior.sd[place] >= np.sqrt(np.mean(np.square(own)))


def test_a_prior_knows_nothing_of_phases_and_of_columns_no_donor_has():
    prior = transfer.pool(PHYSICS, STEP, _donors(PHYSICS, ["7b"])).prior(CONFIGS["mixtral"])
    names = build("physics", STEP, CONFIGS["mixtral"]).names
    assert np.isinf(prior.sd[-2:]).all()
    assert len(prior.mean) == len(names) + 2
    assert np.isfinite(prior.mean).all()


def test_a_learner_without_rows_is_no_donor():
    features = build("physics", STEP, CONFIGS["7b"])
    assert transfer.donor_of("x", CONFIGS["7b"], RlsLearner(features)) is None
    assert transfer.pool(PHYSICS, STEP, []) is None


def test_frozen_stage_two_moves_the_residual_only():
    donors = _donors(HFD_TL, ["7b", "7b-a100", "70b"])
    prior = transfer.pool(HFD_TL, STEP, donors).prior(CONFIGS["mixtral"])
    features = build("hfd_tl", STEP, CONFIGS["mixtral"])
    learner, _, _ = _learner(HFD_TL, "mixtral", n=300, prior=transfer.frozen(prior, features))
    for j, name in enumerate(features.names):
        moved = abs(learner.fit.beta[j] - prior.mean[j])
        if name in ("t_prefill", "t_decode_kv", "budget_share"):
            assert moved <= 0.01 * prior.mean[j] + 1e-9, name
    assert learner.fit.beta[0] != prior.mean[0]


def test_a_bias_and_a_scale_are_found():
    rng = np.random.default_rng(0)
    prediction = rng.uniform(5e3, 3e4, 400)
    bias, scale = transfer.bias_and_scale(prediction, 700 + 1.4 * prediction)
    assert (bias, scale) == (pytest.approx(700, rel=1e-3), pytest.approx(1.4, rel=1e-3))


def test_the_nearest_specialist_weighs_most():
    donors = _donors(RECE, list(CONFIGS))
    found = rece.specialists(RECE, STEP, donors)
    assert 2 <= len(found) <= len(donors)
    share = rece.specialist_weights(CONFIGS["7b"], found)
    assert share.sum() == pytest.approx(1.0)
    assert np.count_nonzero(share) <= rece.HEAVIEST
    near = [rece.similarity(rece.configuration_vector(CONFIGS["7b"]), s.centre) for s in found]
    assert int(np.argmax(share)) == int(np.argmax(near))


def test_an_ensemble_of_one_is_its_specialist():
    found = rece.specialists(RECE, STEP, _donors(RECE, ["7b"]))
    alone = rece.ensemble(CONFIGS["7b"], found)
    assert np.allclose(alone.mean, found[0].pooled.prior(CONFIGS["7b"]).mean)
    assert rece.ensemble(CONFIGS["7b"], []) is None
    assert rece.ensemble({}, found) is None


def test_coverage_is_zero_where_one_has_been_and_the_farthest_is_measured_next():
    vectors = {name: rece.configuration_vector(facts) for name, facts in CONFIGS.items()}
    assert rece.coverage(vectors["7b"], list(vectors.values())) == 0.0
    assert rece.coverage(vectors["7b"], []) == float("inf")
    order = rece.measure_next({k: v for k, v in vectors.items() if k != "7b"}, [vectors["7b"]], 4)
    scores = [score for _, score in order]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == max(rece.coverage(v, [vectors["7b"]]) for k, v in vectors.items() if k != "7b")
    assert rece.configuration_vector({}) is None
