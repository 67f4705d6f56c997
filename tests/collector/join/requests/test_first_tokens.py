"""Time to the first token where no span tells queue or prefill: the API's own time, and steps scheduled ahead."""

from __future__ import annotations

import math

import numpy as np
import pytest

from collector.join.requests.first_tokens import explained, told
from tests.support.pipelines import new_pipeline
from tests.support.toy_spans import STOCK_SCOPE, Piece, exports_of, stock_span


def waits(ahead, requests=400, api_us=8000.0, prefill_us=0.0, seed=1):
    chance = np.random.default_rng(seed)
    pace = chance.uniform(10_000, 18_000, requests)
    prompt = chance.integers(100, 900, requests).astype(float)
    first = api_us + (1.0 + ahead + chance.random(requests)) * pace + prefill_us * prompt
    return list(zip(first, pace, prompt, strict=True))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("prefill_us", [0.0, 40.0])
def test_the_api_is_told_from_the_steps_and_those_scheduled_ahead(ahead, prefill_us):
    found = explained(waits(ahead, prefill_us=prefill_us), prefill_us)
    assert found.scheduled_ahead == bool(ahead)
    assert found.api_us == pytest.approx(8000, abs=600)


@pytest.mark.parametrize("seed", range(5))
def test_a_wait_for_the_rest_of_a_step_is_told_from_the_api(seed):
    chance = np.random.default_rng(seed)
    waits_us = 9000.0 + chance.uniform(0.0, 20_000.0, 400)
    waits_us[::10] += 300_000.0  # the engine was busy with something else
    found = told(waits_us.tolist())
    assert found.api_us == pytest.approx(9000, abs=3 * found.stderr_us)
    assert 200 < found.stderr_us < 600


def test_few_requests_tell_nothing():
    assert explained(waits(1, requests=19), 0.0) is None
    assert told([9000.0] * 19) is None


def test_some_that_waited_for_a_slot_change_little():
    some = waits(1)
    some[::10] = [(3e6, pace, prompt) for _, pace, prompt in some[::10]]
    assert explained(some, 0.0).api_us == pytest.approx(8000, abs=1500)


def test_what_cannot_be_below_zero_is_not():
    assert explained(waits(0, api_us=0.0), 400.0).api_us == 0.0


@pytest.mark.parametrize("odd", [0.0, -1e300, math.inf, math.nan, 1e308, 5e-324])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_times_that_cannot_be_leave_a_finite_answer_or_none(odd, place, every):
    bent = [list(each) for each in waits(1)]
    for each in bent[::every]:
        each[place] = odd
    found = explained([tuple(each) for each in bent], 40.0)
    assert found is None or math.isfinite(found.api_us)


def stock_pieces(requests, **told):
    """An asynchronous engine of 10 to 14 ms a step, whose API takes 6 ms."""
    chance = np.random.default_rng(3)
    out = []
    for number in range(requests):
        pace_s = float(0.012 + 0.002 * np.sin(number / 40))
        ttft_s = 0.006 + (2.0 + float(chance.random())) * pace_s
        arrival_s = number * 0.2 + 0.05 * float(chance.random())
        span = stock_span(
            f"r{number}", arrival_s, prompt=200, outputs=101, ttft_s=ttft_s, decode_s=100 * pace_s, **told
        )
        out.append(Piece("api-0", STOCK_SCOPE, span))
    return sorted(out, key=lambda piece: piece.span.end_time_unix_nano)


def published(sent, batch=20):
    pipeline = new_pipeline()
    for export in exports_of(sent, batch):
        pipeline.process([export])
    pipeline.flush()
    (config,) = pipeline.snapshot(0, 1).configs
    return config


def test_requests_that_tell_no_queue_give_api_queueing_and_how_the_engine_schedules():
    config = published(stock_pieces(400))
    (engine,) = config.engines
    assert engine.scheduling == "async"
    (intercept,) = config.targets["api_queueing"].models["portable"].features
    steps = {each.name: each.coefficient for each in config.targets["step_time"].models["portable"].features}
    ahead_us = config.targets["api_queueing"].step_ahead_us
    assert ahead_us == pytest.approx(12_000, rel=0.1)
    assert intercept.coefficient - ahead_us + 200 * steps["prefill_tokens"] == pytest.approx(6000, abs=800)
    assert intercept.status == "weak"


def test_it_does_not_matter_how_many_come_together():
    sent = stock_pieces(120)
    one, other = (published(sent, batch).targets["api_queueing"] for batch in (1, 50))
    assert one == other


def test_requests_that_tell_their_queue_say_nothing_of_how_the_engine_schedules():
    config = published(stock_pieces(400, queue_s=0.001, prefill_s=0.02))
    assert config.engines[0].scheduling == "unknown"
    target = config.targets["api_queueing"]
    assert target.step_ahead_us is None
    (intercept,) = target.models["portable"].features
    # 6 ms and one of the two steps, which the toy adds to neither part; less 21 ms, plus the other one
    assert intercept.coefficient == pytest.approx(6000 + 2 * 12_000 - 21_000, abs=2000)
