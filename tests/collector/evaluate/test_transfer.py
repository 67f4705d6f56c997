"""Variants of the sources that only the bench has: a frozen base, a bias and a scale, specialists, coverage."""

import numpy as np
import pytest

from collector.evaluate import transfer
from online.features import build
from online.features.systems import HFD_TL, RECE
from online.rows import Target
from online.transfer import pool
from tests.support.configurations import CONFIGS, donors_among, learner_of

STEP = Target.STEP_TIME


def test_frozen_stage_two_moves_the_residual_only():
    prior = pool(HFD_TL, STEP, donors_among(HFD_TL, ["7b", "70b"])).prior(CONFIGS["mixtral"])
    features = build("hfd_tl", STEP, CONFIGS["mixtral"])
    learner = learner_of(HFD_TL, "mixtral", n=300, prior=transfer.frozen(prior, features))
    beta, mean = learner.fit.beta[: len(features)], prior.mean[: len(features)]
    moved = {name for name, far in zip(features.names, abs(beta - mean) > 0.01 * mean + 1e-9, strict=True) if far}
    assert "intercept" in moved <= transfer.RESIDUAL


def test_a_bias_and_a_scale_are_found():
    prediction = np.random.default_rng(0).uniform(5e3, 3e4, 400)
    assert transfer.bias_and_scale(prediction, 700 + 1.4 * prediction) == pytest.approx((700, 1.4), rel=1e-3)


def test_the_nearest_specialist_weighs_most_and_one_alone_is_the_ensemble():
    donors = donors_among(RECE, ["7b", "70b", "mixtral"])
    found = transfer.specialists(RECE, STEP, donors)
    assert len(found) >= 2
    share, v = transfer.specialist_weights(CONFIGS["7b"], found), transfer.configuration_vector(CONFIGS["7b"])
    assert share.sum() == pytest.approx(1.0)
    assert np.count_nonzero(share) <= transfer.HEAVIEST
    cosines = [v @ s.centre / np.linalg.norm(v) / np.linalg.norm(s.centre) for s in found]
    assert int(np.argmax(share)) == int(np.argmax(cosines))
    alone = transfer.specialists(RECE, STEP, donors[:1])
    assert np.allclose(transfer.ensemble(CONFIGS["7b"], alone).mean, alone[0].pooled.prior(CONFIGS["7b"]).mean)
    assert transfer.ensemble(CONFIGS["7b"], []) is transfer.ensemble({}, found) is None


def test_coverage_is_zero_where_one_has_been_and_the_farthest_is_measured_next():
    own, *others = (transfer.configuration_vector(facts) for facts in CONFIGS.values())
    assert transfer.coverage(own, [*others, own]) == 0.0
    assert transfer.coverage(own, []) == float("inf")
    scores = [score for _, score in transfer.measure_next(dict(enumerate(others)), [own], 4)]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == max(transfer.coverage(each, [own]) for each in others)
    assert transfer.configuration_vector({}) is None
