"""What the bench says of the space of configurations: specialists near one, and where nobody has been."""

import numpy as np
import pytest

from collector.evaluate import transfer
from online.features.systems import RECE
from online.rows import Target
from tests.support.configurations import CONFIGS, donors_among

STEP = Target.STEP_TIME


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
