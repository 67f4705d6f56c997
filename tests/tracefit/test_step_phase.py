"""One request at a known time after a token: what is left of the running step instead of half of it."""

import pytest

import tracefit
from tests.tracefit.example_snapshot import encoded
from tracefit.step_phase import rest_of_step

CONFIG = tracefit.load(encoded()).config()
CHAT = {"prompt_tokens": 800, "output_tokens": 250, "prefix_hit": 0.99}
STEP_US = 20_000.0


def at(since_token_us, **more):
    return CONFIG.request(**{**CHAT, "concurrency": 24, **more}, since_token_us=since_token_us)


def test_the_rest_is_what_the_way_in_and_out_and_the_time_since_leave_of_the_step():
    assert rest_of_step(STEP_US, STEP_US, 5_000.0, 3_000.0)[0] == pytest.approx(12_000.0)
    assert rest_of_step(STEP_US, STEP_US, 5_000.0, 43_000.0)[0] == pytest.approx(12_000.0)  # two whole steps on the way


def test_whether_the_next_step_is_reached_is_not_known_near_its_start():
    for near_us in (0.0, 20_000.0):
        assert rest_of_step(STEP_US, STEP_US, 0.0, near_us) == pytest.approx((10_000.0, 0.0, 20_000.0))
    just_before, just_after = (rest_of_step(STEP_US, STEP_US, 0.0, STEP_US + each)[0] for each in (-0.1, 0.1))
    assert just_before == pytest.approx(just_after, abs=1.0)


def test_over_all_arrivals_the_rest_is_half_a_step_and_lies_in_its_band():
    for steps_ago in (0, 3, 100):
        rests = [rest_of_step(STEP_US, STEP_US, STEP_US * (steps_ago + part / 1000), 0.0) for part in range(1000)]
        assert sum(us for us, _, _ in rests) / 1000 == pytest.approx(STEP_US / 2, rel=0.02)
        assert all(0.0 <= low <= us <= high <= STEP_US for us, low, high in rests)


def test_steps_of_very_different_length_tell_nothing_of_the_one_that_runs():
    assert rest_of_step(STEP_US, 0.8 * STEP_US, 8_000.0, 0.0) == pytest.approx((10_000.0, 0.0, 20_000.0))


def test_steps_of_no_length_worth_the_name_leave_a_number():
    assert rest_of_step(1e-300, 1e-300, 1e12, 5.0) == pytest.approx((5e-301, 0.0, 1e-300))


def test_the_longer_ago_the_last_token_the_less_it_says():
    mean = CONFIG.request(**CHAT, concurrency=24)
    assert at(1e12).ttft.us == pytest.approx(mean.ttft.us)
    assert at(1e12).ttft.low == pytest.approx(mean.ttft.low)
    fresh, old = at(8_000.0), at(8_000.0 + 10 * mean.itl.us)
    assert fresh.ttft.high - fresh.ttft.low <= old.ttft.high - old.ttft.low


def test_one_request_differs_by_its_step_and_the_mean_over_arrivals_is_the_answer_without():
    mean = CONFIG.request(**CHAT, concurrency=24)
    asked = [at(mean.itl.us * part / 200) for part in range(200)]
    assert sum(each.ttft.us for each in asked) / 200 == pytest.approx(mean.ttft.us, rel=0.02)
    assert max(each.ttft.us for each in asked) - min(each.ttft.us for each in asked) > 0.5 * mean.itl.us
    for each in asked:
        assert each.ttft.low <= each.ttft.us <= each.ttft.high
        assert each.e2e.us - each.ttft.us == pytest.approx(mean.e2e.us - mean.ttft.us)
        assert each._replace(ttft=mean.ttft, e2e=mean.e2e) == mean


@pytest.mark.parametrize("load", [{"concurrency": 1}, {"concurrency": 4000}])
def test_alone_and_in_a_queue_no_step_is_waited_for(load):
    limited = CONFIG.assuming(max_num_seqs=64)
    assert limited.request(**CHAT, **load, since_token_us=5.0) == limited.request(**CHAT, **load)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), 1e13, "soon"])
def test_a_time_that_makes_no_sense_is_named(wrong):
    for concurrency in (1, 24):
        with pytest.raises(tracefit.BadInputError, match="since_token_us"):
            at(wrong, concurrency=concurrency)
