"""Changes of speed on machines that no linear form fits, and what is none: curves, mixes, bursts."""

import numpy as np
import pytest

from online import RowBlock
from online.change import ChangeTest
from tests.support.banks import STEP, features_of, learned, told
from tests.support.linear_steps import BETA, steps
from tests.support.uneven_steps import STEADY, of_columns, plain, ramp, since, uneven, work
from tests.support.watched import Watched

ONSET = 8000


def drift_after(rows):
    return told(learned(rows)).drift


@pytest.mark.parametrize("kind", STEADY)
def test_a_machine_that_does_not_change_reports_nothing(kind):
    assert drift_after(plain(kind, 904, 12_000)).count == 0


def test_context_that_jumps_in_the_same_batch_shape_is_no_change_of_speed():
    """Until then context hardly varied, so that nobody knows what it costs."""
    rng = np.random.default_rng(5)
    columns = work(rng, 6000, "iid")
    columns["decode_context_tokens"] = columns["requests"] * np.where(np.arange(6000) < 3000, 250.0, 1400.0)
    us = 12_000 + 30 * columns["prefill_tokens"] + 1500 * columns["requests"] + 0.6 * columns["decode_context_tokens"]
    assert drift_after(of_columns(columns, us * np.exp(rng.normal(0, 0.05, 6000)))).count == 0


@pytest.mark.parametrize(
    ("seed", "gain", "rows"),
    [(2, 1.38, 200), (508, 1.38, 200), (4, 1.38, 250), (4, 0.8, 400), (4, 1.15, 400)],
)
def test_an_uneven_machine_that_changes_its_speed_is_reported(seed, gain, rows):
    n = ONSET + rows
    drift = drift_after(uneven(seed, n, speed=since(n, ONSET, gain)))
    assert drift.count == 1
    assert drift.gain == pytest.approx(gain, rel=0.15)


@pytest.mark.parametrize("batch", [1, 32])
def test_a_change_on_a_machine_that_always_runs_the_same_batch_is_reported_with_its_gain(batch):
    rows = steps(3000, 8, batch=(batch, batch), prefill_share=0.0, noise=0.05, drift_at=2000, gain=1.38).rows
    drift = drift_after(rows)
    assert drift.count == 1
    assert drift.gain == pytest.approx(1.38, rel=0.1)


def is_load_balanced(*parts):
    """Rows of steps that take so many times as long as usual, term by term: (rows, times) each."""
    rows, end_ns = [], int(1.7e18)
    for seed, (n, times) in enumerate(parts):
        rows.append(steps(n, seed, noise=0.02, beta=BETA * times, start_ns=end_ns).rows)
        end_ns = int(rows[-1].end_ns[-1])
    return RowBlock.concatenate(rows)


@pytest.mark.parametrize("detector", ["adwin", "page_hinkley"])
def test_what_moved_is_compared_with_what_was_before_the_change_whoever_detects_it(detector):
    run = Watched(is_load_balanced((4000, 1.0), (3000, [1.5, 1.0, 1.0, 1.0])), detector)
    assert run.model.drift.term == "intercept"
    assert run.model.drift.added == pytest.approx(4500.0, rel=0.01)


def test_a_confirmed_change_is_published_with_the_time_at_which_it_began():
    rows = steps(3000, 11, drift_at=1500, gain=1.3).rows
    drift = drift_after(rows)
    late_ns = drift.last_unix_nano - int(rows.end_ns[1500])
    assert abs(late_ns) <= drift.last_within_s * 1e9 < rows.end_ns[1600] - rows.end_ns[1500]


def test_a_change_is_told_by_the_blocks_since_its_sum_was_the_larger_one():
    """Medians of schedule_time of a recording whose level wandered before it fell: both sums were not 0 for long."""
    wandered = [*(0.03, -0.03) * 32, -0.104, -0.049, -0.092, -0.039, 0.171, -0.008]
    fell = [-0.14, -0.089, -0.226, -0.258, -0.292, -0.316]
    e = np.array(wandered + fell)
    change = ChangeTest("cusum", 1).learn(e, np.ones(len(e)), np.arange(len(e)))
    assert change.log_time_ratio == pytest.approx(-0.242)
    assert change.began_ns == len(wandered)


@pytest.mark.parametrize(("log_gain", "is_told"), [(0.05, False), (0.1, True)])
def test_what_is_below_six_per_cent_is_no_change_also_where_the_detector_of_river_alarms(log_gain, is_told):
    e = np.repeat([0.0, log_gain], (64, 192))
    change = ChangeTest("page_hinkley", 1).learn(e, np.ones(len(e)), np.arange(len(e)))
    assert (change is not None) is is_told


@pytest.mark.parametrize(
    ("seed", "length", "slower", "spread"),
    [(2, 128, 1.42, 0.0), (12, 128, 1.42, 0.0), (4, 40, 1.45, 0.12), (4, 90, 1.45, 0.12)],
)
def test_a_slow_period_that_ends_is_no_change_of_speed(seed, length, slower, spread):
    """As even as all others, as a real recording has one; or as uneven as a busy neighbour makes it."""
    speed = np.ones(ONSET + 600)
    noise = np.random.default_rng(9).normal(0, spread, length)
    speed[ONSET : ONSET + length] = slower * np.exp(noise)
    assert drift_after(uneven(seed, len(speed), speed=speed)).count == 0


@pytest.mark.parametrize(("seed", "floors"), [(11, 1.5), (2, 1.7)])
def test_a_slow_ramp_is_learned_and_reported(seed, floors):
    n = ONSET + 6500
    run = Watched(plain("iid", seed, n, speed=ramp(n, ONSET, 4000, 1.3)))
    assert run.error(n - 500, 500) < floors * run.error(ONSET - 2000, 2000)
    assert 1 <= len(run.reports) <= 2


@pytest.mark.parametrize("seed", range(2))
def test_prefill_that_takes_twice_as_long_is_found_within_1500_rows_and_priced(seed):
    n = ONSET + 6000
    rows = plain("iid", 40 + seed, n, prefill_gain=since(n, ONSET, 2.0))
    bank = learned(rows.slice(0, ONSET + 1500))
    drift = told(bank).drift
    assert drift.count >= 1
    assert drift.gain > 1.2
    bank.learn("c", STEP, rows.slice(ONSET + 1500, n))
    prices = features_of(bank)
    assert prices["prefill_tokens"].coefficient == pytest.approx(50.0, rel=0.05)
    assert prices["intercept"].coefficient == pytest.approx(5000.0, rel=0.05)
