"""What must hold for any learner of decayed least squares, asked of the bank that serves: rows in, snapshots out."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from online import STEP_FEATURES, RowBlock
from tests.support import banks
from tests.support.banks import PORTABLE, coefficients, features_of, restarted, told
from tests.support.linear_steps import BETA, NAMES, steps
from tests.support.uneven_steps import of_columns

from .published import differences, essence

HALF_LIFE_STEPS = 4000


def learned(*blocks):
    return banks.learned(*blocks, settings=PORTABLE)


def seen(bank):
    """What a user compares, see :mod:`tests.wall.published`."""
    targets = json.loads(msgspec.json.encode(bank.targets("c")))
    return essence({"configs": [{"telemetry": "steps", "config_id": "c", "engines": [], "targets": targets}]})


def model(bank):
    return told(bank).models["portable"]


def errors(bank):
    """Standard errors of all columns, (4,)."""
    return np.array([feature.stderr for feature in features_of(bank).values()])


def changes(rows):
    """How many changes of speed are reported of them."""
    return told(learned(rows)).drift.count


def steady(n: int, seed: int) -> RowBlock:
    """Steps of one batch size without prefill: one operating point, whose weights all decay alike."""
    rng = np.random.default_rng(seed)
    requests, context = 4.0, 4.0 * rng.uniform(300, 900, n)
    columns = {"decode_requests": requests, "decode_tokens": requests, "requests": requests}
    us = (9000.0 + 0.1 * context) * np.exp(0.02 * rng.standard_normal(n))
    return of_columns({**columns, "decode_context_tokens": context}, us)


def test_a_restart_between_two_stretches_changes_nothing():
    rows = steps(3000, 1, stalls=0.01).rows
    whole, first = learned(rows), learned(rows.slice(0, 1400))
    again = restarted(first)
    again.learn("c", banks.STEP, rows.slice(1400, 3000))
    assert differences(seen(again), seen(whole)) == []


def test_streams_that_follow_each_other_merge_to_what_one_learner_knows():
    rows = steps(6000, 2).rows
    joint, early, late = learned(rows), learned(rows.slice(0, 3000)), learned(rows.slice(3000, 6000))
    early.merge(late)
    assert np.all(np.abs(coefficients(early) - coefficients(joint)) < 0.5 * errors(joint))
    assert errors(early) == pytest.approx(errors(joint), rel=0.3)
    assert model(early).rows == model(joint).rows
    assert model(early).effective_rows == pytest.approx(model(joint).effective_rows, rel=0.1)


def test_a_merge_forgets_what_the_later_stream_would_have_made_the_earlier_one_forget():
    """One operating point, two half-lives each: Kish's rows of the merge are those of one learner."""
    rows = steady(16_000, 16)
    joint, merged = learned(rows), learned(rows.slice(0, 8000))
    merged.merge(learned(rows.slice(8000, 16_000)))
    assert model(merged).effective_rows == pytest.approx(model(joint).effective_rows, rel=0.03)


def test_it_does_not_matter_who_is_merged_into_whom():
    one, other = steps(2000, 3).rows, steps(2000, 4, start_ns=1_700_000_900_000_000_000).rows
    forth, back = learned(one), learned(other)
    forth.merge(learned(other))
    back.merge(learned(one))
    assert coefficients(forth) == pytest.approx(coefficients(back), rel=1e-6)
    assert model(forth).effective_rows == pytest.approx(model(back).effective_rows, rel=1e-6)


@pytest.mark.parametrize("n", [1000, 4000, 16_000])
def test_effective_rows_are_those_of_exponentially_decayed_weights(n):
    """Kish: (sum w)^2 / sum w^2 of w = 2^(-age / half-life); single steps of one operating point."""
    weights = 2.0 ** (-np.arange(n) / HALF_LIFE_STEPS)
    kish = weights.sum() ** 2 / (weights**2).sum()
    assert model(learned(steady(n, 5))).effective_rows == pytest.approx(kish, rel=0.08)


def test_what_an_operating_point_knows_is_not_forgotten_while_others_are_served():
    """A batch of 64 was seen once; 20,000 steps of small batches later it is still predicted."""
    wide = steps(2000, 6, batch=(40, 64))
    dull = steps(20_000, 7, batch=(1, 2), start_ns=1_700_000_900_000_000_000).rows
    x = np.array([1.0, 0.0, 60 * 700.0, 60.0])
    assert x @ coefficients(learned(wide.rows, dull)) == pytest.approx(x @ BETA, rel=0.05)


def test_standard_errors_hold_the_truth_as_often_as_they_say():
    several = [learned(steps(1500, seed, noise=0.05).rows) for seed in range(24)]
    inside = [np.abs(coefficients(bank) - BETA) < 1.96 * errors(bank) for bank in several]
    assert 0.88 <= np.mean(inside) <= 1.0


def test_four_times_the_rows_halve_the_standard_errors():
    few, many = (
        np.mean([errors(learned(steps(n, s, noise=0.05).rows)) for s in range(6)], axis=0) for n in (600, 2400)
    )
    assert np.all(few / many > 1.35)
    assert np.all(few / many < 2.8)


def test_stalls_in_the_first_rows_do_not_move_the_coefficients():
    """Every twentieth step takes several times as long, from the first row on."""
    calm, stalled = steps(400, 8, noise=0.02).rows, steps(400, 8, noise=0.02, stalls=0.05).rows
    x = np.array([1.0, 50.0, 16 * 700.0, 16.0])
    assert x @ coefficients(learned(stalled)) == pytest.approx(x @ coefficients(learned(calm)), rel=0.02)


def test_four_of_five_rows_fall_into_the_published_band():
    bank, fresh = learned(steps(4000, 9, noise=0.05).rows), steps(4000, 10, noise=0.05)
    x = np.stack([np.ones(4000), *(fresh.rows.raw[:, STEP_FEATURES.index(name)] for name in NAMES[1:])], axis=1)
    ratio, band = fresh.rows.elapsed_us / (x @ coefficients(bank)), told(bank).interval
    assert 0.76 <= np.mean((ratio >= band.p10) & (ratio <= band.p90)) <= 0.86


# ------------------------------------------------------------------- changes of speed


@pytest.mark.parametrize("gain", [1.4, 0.7])
def test_a_change_of_speed_is_reported_once_and_followed(gain):
    bank = learned(steps(3000, 11, noise=0.03, drift_at=2000, gain=gain).rows)
    drift = told(bank).drift
    assert drift.count == 1
    assert drift.gain == pytest.approx(gain, rel=0.03)
    x = np.array([1.0, 0.0, 16 * 700.0, 16.0])
    assert x @ coefficients(bank) == pytest.approx(gain * (x @ BETA), rel=0.03)
    assert np.all(errors(bank) > 0)


def test_after_a_change_the_old_speed_counts_for_little():
    before, after = (learned(steps(n, 12, noise=0.03, drift_at=4000, gain=1.4).rows) for n in (3990, 4600))
    assert model(after).effective_rows < 0.5 * model(before).effective_rows


@pytest.mark.parametrize("lasting", [40, 80])
def test_a_short_burst_is_no_change_of_speed(lasting):
    rows = steps(4000, 13, noise=0.03).rows
    rows.elapsed_us[2000 : 2000 + lasting] *= 1.4
    assert changes(rows) == 0


def test_a_short_burst_of_slow_prefills_is_no_change_of_speed_and_a_long_one_is_one_of_prefill():
    rows = steps(4000, 17, noise=0.03).rows
    with_prefill = np.flatnonzero(rows.raw[:, STEP_FEATURES.index("prefill_tokens")] > 0)
    slow = with_prefill[with_prefill > 2000]
    rows.elapsed_us[slow[:72]] *= 1.6
    assert changes(rows) == 0
    rows.elapsed_us[slow[72:]] *= 1.6
    drift = told(learned(rows)).drift
    assert (drift.count, drift.term) == (1, "prefill_tokens")


def test_another_mix_is_no_change_of_speed():
    small = steps(3000, 14, batch=(1, 8)).rows
    large = steps(3000, 15, batch=(30, 60), start_ns=1_700_000_900_000_000_000).rows
    assert changes(RowBlock.concatenate([small, large])) == 0


def test_calm_streams_report_nothing():
    assert [changes(steps(6000, seed, noise=0.05, stalls=0.01).rows) for seed in range(20, 26)] == [0] * 6
