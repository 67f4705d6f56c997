"""Error bars hold from the first minute, and what they cannot hold is not called identified."""

import dataclasses

import numpy as np
import pytest

from online import STEP_FEATURES, RowBlock, Target
from online.features import portable
from online.rls import Prior, RlsLearner
from online.rls.learner import MEAN_TARGETS
from tests.support.banks import STEP, features_of, learned, told
from tests.support.designs import learn
from tests.support.linear_steps import BETA, NAMES, steps
from tests.support.request_times import skewed_times

TRUTH = dict(zip(NAMES, BETA, strict=True))


def _covered(features, truth):
    return [abs(features[name].coefficient - value) < 1.96 * features[name].stderr for name, value in truth.items()]


def test_intervals_cover_from_320_rows_on_when_neighbours_err_together():
    ends = 320, 640, 1280
    hits = np.empty((12, len(ends), 4))
    for seed in range(len(hits)):
        rows, bank, start = steps(1280, 8100 + seed, noise=0.03, autocorrelation=0.9).rows, learned(), 0
        for k, end in enumerate(ends):
            bank.learn("c", STEP, rows.slice(start, end))
            hits[seed, k], start = _covered(features_of(bank), TRUTH), end
    assert (hits.mean(axis=(0, 2)) >= 0.85).all()


def test_nothing_is_identified_before_the_windows_carry_it():
    bank = learned(steps(288, 1).rows)
    assert {f.status for f in features_of(bank).values()} == {"weak"}
    bank.learn("c", STEP, steps(64, 2).rows)
    assert {f.status for f in features_of(bank).values()} == {"identified"}


def test_a_prior_without_data_keeps_its_standard_error():
    learner = RlsLearner(portable(STEP), Prior(np.array([9e3, 50.0, 0.12, 160.0]), 0.15 * BETA))
    learn(learner, steps(3000, 3, prefill_share=0.0).rows)
    prefill = {f.name: f for f in learner.snapshot().features}["prefill_tokens"]
    assert prefill.status == "prior_only"
    assert prefill.stderr == pytest.approx(0.15 * BETA[1], rel=0.02)


def test_chunks_of_one_size_do_not_say_what_a_token_costs():
    """Each has a cost of its own beside that of its tokens."""
    rows, noise = steps(2500, 4).rows, np.random.default_rng(4).standard_normal(2500)
    prefill = rows.raw[:, STEP_FEATURES.index("prefill_tokens")]
    prefill[:] = np.where(prefill > 0.0, 512.0, 0.0)
    exact = portable(STEP).evaluate(rows) @ (BETA - [0.0, 15.0, 0.0, 0.0]) + 5000.0 * (prefill > 0.0)
    bank = learned(RowBlock.of_lines(rows.raw, exact * np.exp(0.01 * noise), end_ns=rows.end_ns))
    found = features_of(bank)
    assert found["prefill_tokens"].status == "weak"
    assert found["intercept"].status == "identified"


def test_rows_that_overlap_count_by_their_weight():
    rows = steps(100, 5).rows
    copies = RowBlock.concatenate([rows.slice(k, k + 1) for k in np.repeat(np.arange(100), 32)])
    light = dataclasses.replace(copies, weight=np.full(3200, 1 / 32))
    assert told(learned(light)).models["portable"].effective_rows == pytest.approx(100, rel=0.1)


# -------------------------------------------------------------------- skewed times


@pytest.mark.parametrize("target", sorted(MEAN_TARGETS))
def test_what_adds_up_to_a_request_is_fitted_to_the_mean(target):
    rows = skewed_times(4000, 9, tokens="output_tokens" if target is Target.POST_DECODE else "prompt_tokens")
    features = features_of(learned(rows, target=target), target)
    predicted = sum(f.coefficient * f.mean for f in features.values())
    assert predicted == pytest.approx(float(rows.elapsed_us.mean()), rel=0.05)


def test_error_bars_of_skewed_times_cover_whenever_identified():
    hits = []
    for seed in range(30):
        bank, at = learned(), 0
        rows = skewed_times(1100, 500 + seed, sigma=1.2, fixed_us=2000.0)
        for end in (300, 700, 1100):
            bank.learn("c", Target.POST_DECODE, rows.slice(at, end))
            features, at = features_of(bank, Target.POST_DECODE), end
            truth = {"intercept": 2000.0, "output_tokens": 1.0}
            for hit, name in zip(_covered(features, truth), truth, strict=True):
                if features[name].status == "identified":
                    hits.append(hit)
    assert len(hits) > 20
    assert np.mean(hits) >= 0.85
