"""Changes of speed on machines that no linear form fits, and what is none: curves, mixes, bursts."""

import numpy as np
import pytest

from collector.config import Config
from online.bank import Bank
from online.features import portable
from online.rows import Target
from online.target import TargetState
from tests.support.uneven_steps import STEADY, of_columns, plain, ramp, since, uneven, work

N, ONSET = 14_000, 8000


def state_of():
    state = TargetState(Target.STEP_TIME, Config(learners=("rls",)))
    state.offer(portable(Target.STEP_TIME))
    return state


def drift_after(rows):
    state = state_of()
    state.learn(rows)
    return state.snapshot().drift


def error_at_the_end(rows, last):
    """Mean relative error of the published prediction over the last rows, %, predicted before learned."""
    state = state_of()
    model, errors = state.models["portable"], []
    for block in state.cutter.push(state.matrix.evaluate(rows)[0]):
        if model.started:
            predicted = block.x @ model.fit.beta[:4] * np.exp(model.log_factors(block.cell))
            errors.append(np.abs(predicted / block.elapsed_us - 1))
        state._learn_block(block)
    return 100 * np.concatenate(errors)[-last:].mean()


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


@pytest.mark.parametrize(("gain", "rows"), [(1.38, 250), (0.8, 400), (1.15, 400)])
def test_an_uneven_machine_that_changes_its_speed_is_reported(gain, rows):
    before = drift_after(uneven(4, ONSET))
    after = drift_after(uneven(4, ONSET + rows, speed=since(ONSET + rows, ONSET, gain)))
    assert before.count == 0
    assert after.count == 1
    assert after.gain == pytest.approx(gain, rel=0.1)


@pytest.mark.parametrize("seed", [2, 5, 508, 510])
def test_half_as_slow_again_is_reported_within_200_rows(seed):
    rows = 200
    assert drift_after(uneven(seed, ONSET + rows, speed=since(ONSET + rows, ONSET, 1.38))).count == 1


def test_shorter_contexts_that_are_a_fifth_of_the_time_hide_a_slow_down_for_a_thousand_rows_at_most():
    n = ONSET + 1000
    columns, rng = work(np.random.default_rng(6), n, "iid"), np.random.default_rng(7)
    columns["decode_context_tokens"] *= np.where(np.arange(n) < ONSET - 100, 2.0, 0.9)
    us = 9000 + 30 * columns["prefill_tokens"] + 1500 * columns["requests"] + columns["decode_context_tokens"]
    drift = drift_after(of_columns(columns, us * since(n, ONSET, 1.2) * np.exp(rng.normal(0, 0.01, n))))
    assert drift.count == 1
    assert drift.gain == pytest.approx(1.2, rel=0.05)


@pytest.mark.parametrize("batch", [1, 32])
def test_a_change_on_a_machine_that_always_runs_the_same_batch_is_reported_with_its_gain(batch):
    n = 3000
    rng = np.random.default_rng(8)
    columns = work(rng, n, "iid") | {"prefill_tokens": np.zeros(n), "requests": np.full(n, float(batch))}
    columns["decode_context_tokens"] = columns["requests"] * 600.0 * np.exp(rng.normal(0, 0.2, n))
    us = 5000 + 60 * columns["requests"] + 0.05 * columns["decode_context_tokens"]
    drift = drift_after(of_columns(columns, us * since(n, 2000, 1.38) * np.exp(rng.normal(0, 0.05, n))))
    assert drift.count == 1
    assert drift.gain == pytest.approx(1.38, rel=0.1)


@pytest.mark.parametrize("seed", [2, 4, 9, 12])
def test_a_slow_period_that_ends_before_is_no_change_of_speed(seed):
    """Of 128 rows that are as even as all others, as a real recording has one."""
    speed = np.ones(ONSET + 600)
    speed[ONSET : ONSET + 128] = 1.42
    assert drift_after(uneven(seed, len(speed), speed=speed)).count == 0


@pytest.mark.parametrize("length", [40, 90])
def test_a_busy_neighbour_is_no_change_of_speed(length):
    """Steps slower and uneven for as long as a real recording has them."""
    n = ONSET + 600
    rng = np.random.default_rng(9)
    burst = np.ones(n)
    burst[ONSET : ONSET + length] = 1.45 * np.exp(rng.normal(0, 0.12, length))
    assert drift_after(uneven(4, n, speed=burst)).count == 0


@pytest.mark.parametrize(("seed", "floors"), [(11, 1.5), (2, 1.7)])
def test_a_slow_ramp_is_learned(seed, floors):
    n = ONSET + 6500
    floor = error_at_the_end(plain("iid", seed, ONSET), 2000)
    assert error_at_the_end(plain("iid", seed, n, speed=ramp(n, ONSET, 4000, 1.3)), 500) < floors * floor


@pytest.mark.parametrize("seed", [0, 1])
def test_prefill_that_costs_twice_as_much_is_learned(seed):
    state = state_of()
    state.learn(plain("iid", seed, N, prefill_gain=since(N, ONSET, 2.0)))
    prices = {feature.name: feature.coefficient for feature in state.snapshot().models["portable"].features}
    assert prices["prefill_tokens"] == pytest.approx(50.0, rel=0.05)
    assert prices["intercept"] == pytest.approx(5000.0, rel=0.05)
    assert state.snapshot().drift.count >= 1


@pytest.mark.parametrize("seed", range(4))
def test_prefill_that_takes_twice_as_long_is_found_within_1500_rows(seed):
    n = ONSET + 1500
    drift = drift_after(plain("iid", 40 + seed, n, prefill_gain=since(n, ONSET, 2.0)))
    assert drift.count >= 1
    assert drift.gain > 1.2


def test_a_change_that_is_half_seen_at_a_restart_is_reported_all_the_same():
    rows = uneven(3, ONSET + 400, speed=since(ONSET + 400, ONSET, 1.38))
    through, stopped = Bank(Config(learners=("rls",))), Bank(Config(learners=("rls",)))
    through.learn("c", Target.STEP_TIME, rows)
    stopped.learn("c", Target.STEP_TIME, rows.slice(0, ONSET + 110))
    assert stopped.targets("c")["step_time"].drift.count == 0
    again = Bank(Config(learners=("rls",)))
    again.restore(stopped.state())
    again.learn("c", Target.STEP_TIME, rows.slice(ONSET + 110, ONSET + 400))
    assert again.targets("c") == through.targets("c")
    assert through.targets("c")["step_time"].drift.count == 1


@pytest.mark.parametrize("detector", ["adwin", "page_hinkley"])
def test_a_detector_of_river_is_the_alarm_where_it_is_configured(detector):
    """It reports what the sums report, at a time of its own."""
    rows = uneven(5, ONSET + 1500, speed=since(ONSET + 1500, ONSET, 1.38))
    bank = Bank(Config(learners=("rls",), detector=detector))
    bank.learn("c", Target.STEP_TIME, rows)
    drift = bank.targets("c")["step_time"].drift
    assert drift.count == 1
    assert drift.gain == pytest.approx(1.38, rel=0.1)
