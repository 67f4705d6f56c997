"""Time to the first token of requests that meet others: the API's own time, with them, and steps scheduled ahead."""

from __future__ import annotations

import math
from collections import deque

import msgspec
import numpy as np
import pytest

from collector.config import JoinConfig
from collector.join.api_process import ApiProcess
from collector.join.requests.api_queueing import ApiQueueing, with_stand_ins
from collector.join.requests.first_tokens import BusyArrival, StepCosts, explained, told
from online import FeatureSnapshot, ModelSnapshot, TargetSnapshot
from online.state.graph import dump, load
from tests.support.pipelines import new_pipeline
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import STOCK_SCOPE, Piece, exports_of, pieces, stock_span


def waits(ahead, requests=400, api_us=8000.0, prefill_us=0.0, seed=1, per_request_us=0.0):
    chance = np.random.default_rng(seed)
    pace = chance.uniform(10_000, 18_000, requests)
    prompt = chance.integers(100, 900, requests).astype(float)
    met = chance.integers(2, 120, requests).astype(float)
    first = api_us + (1.0 + ahead + chance.random(requests)) * pace + prefill_us * prompt + per_request_us * met
    return [BusyArrival(*map(float, each)) for each in zip(first, pace, prompt, met, strict=True)]


def grown_of(arrivals, costs=StepCosts()):  # noqa: B008 - immutable
    """What they tell, of how the time grows with the requests in flight too."""
    return explained(arrivals, costs, arrivals)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("prefill_us", [0.0, 40.0])
def test_the_api_is_told_from_the_steps_and_those_scheduled_ahead(ahead, prefill_us):
    found = explained(waits(ahead, prefill_us=prefill_us), StepCosts(prefill_us))
    assert found.scheduled_ahead == bool(ahead)
    assert found.api_us == pytest.approx(8000, abs=600)


@pytest.mark.parametrize("seed", range(5))
def test_a_wait_for_the_rest_of_a_step_is_told_from_the_api(seed):
    chance = np.random.default_rng(seed)
    waits_us = 9000.0 + chance.uniform(0.0, 20_000.0, 400)
    waits_us[::10] += 300_000.0  # the engine was busy with something else
    found = told(waits_us.tolist(), StepCosts())
    assert found.api_us == pytest.approx(9000, abs=3 * found.stderr_us)
    assert 200 < found.stderr_us < 600


def test_few_requests_tell_nothing():
    assert explained(waits(1, requests=19), StepCosts()) is None
    assert told([9000.0] * 19, StepCosts()) is None


def test_some_that_waited_for_a_slot_change_little():
    some = waits(1)
    some[::10] = [msgspec.structs.replace(each, wait_us=3e6) for each in some[::10]]
    assert explained(some, StepCosts()).api_us == pytest.approx(8000, abs=1500)


def test_what_cannot_be_below_zero_is_not():
    assert explained(waits(0, api_us=0.0), StepCosts(400.0)).api_us == 0.0


@pytest.mark.parametrize("odd", [0.0, -1e300, math.inf, math.nan, 1e308, 5e-324])
@pytest.mark.parametrize("place", ["wait_us", "pace_us", "prompt_tokens", "in_flight"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_times_that_cannot_be_leave_a_finite_answer_or_none(odd, place, every):
    bent = waits(1, per_request_us=50.0)
    bent[::every] = [msgspec.structs.replace(each, **{place: odd}) for each in bent[::every]]
    for found in (
        grown_of(bent, StepCosts(40.0)),
        told([each.pace_us for each in waits(1)], StepCosts(40.0), bent, bent),
    ):
        assert found is None or math.isfinite(found.api_us)
        grown = found.in_flight if found is not None else None
        assert grown is None or all(math.isfinite(value) and value > 0.0 for value in msgspec.structs.astuple(grown))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_the_api_takes_longer_with_each_request_that_runs(ahead, seed):
    found = grown_of(waits(ahead, per_request_us=60.0, requests=1000, seed=seed))
    grown = found.in_flight
    assert grown.us_per_request == pytest.approx(60.0, abs=4 * grown.stderr_us)
    assert grown.stderr_us < 10.0
    at_none_us = found.api_us - grown.requests * grown.us_per_request
    assert at_none_us == pytest.approx(8000.0, abs=1500.0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_steps_grow_by_with_each_request_is_not_the_apis(ahead):
    step_us = 100.0  # of the batch that is met; the own pace is that of later ones
    bent = [
        msgspec.structs.replace(each, wait_us=each.wait_us + (1.5 + ahead) * step_us * (each.in_flight - 60.0))
        for each in waits(ahead, per_request_us=60.0, requests=1000)
    ]
    found = grown_of(bent, StepCosts(us_per_request=step_us))
    assert found.scheduled_ahead == bool(ahead)
    assert found.in_flight.us_per_request == pytest.approx(60.0, abs=4 * found.in_flight.stderr_us)


@pytest.mark.parametrize("quiet", [0.3, 0.7])
def test_what_is_published_holds_at_few_and_at_many_whichever_are_more(quiet):
    chance = np.random.default_rng(6)
    met = np.where(chance.random(1000) < quiet, 5.0, 100.0)
    pace_us = chance.uniform(10_000, 18_000, 1000)
    first_us = 8000.0 + 60.0 * met + (2.0 + chance.random(1000)) * pace_us
    arrivals = [BusyArrival(*each) for each in zip(first_us, pace_us, np.full(1000, 300.0), met, strict=True)]
    found = grown_of(arrivals)
    grown = found.in_flight
    for number in (5.0, 100.0):
        at_number_us = found.api_us + grown.us_per_request * (number - grown.requests)
        assert at_number_us == pytest.approx(8000.0 + 60.0 * number, abs=900.0)


@pytest.mark.parametrize("per_request_us", [0.0, 60.0])
def test_longer_prompts_in_busy_hours_are_not_the_requests_in_flight(per_request_us):
    bent = [
        msgspec.structs.replace(
            each,
            prompt_tokens=each.prompt_tokens + 10.0 * each.in_flight,
            wait_us=each.wait_us + 20.0 * (each.prompt_tokens + 10.0 * each.in_flight),
        )
        for each in waits(1, per_request_us=per_request_us, requests=1000)
    ]
    grown = grown_of(bent).in_flight  # nobody says what a prompt token costs
    if per_request_us:
        assert grown.us_per_request == pytest.approx(per_request_us, abs=4 * grown.stderr_us)
    else:
        assert grown is None


def test_a_few_that_waited_for_something_else_bend_no_slope():
    some = waits(1, per_request_us=60.0, requests=1000)
    some[::10] = [msgspec.structs.replace(each, wait_us=2.2 * each.wait_us, in_flight=3.0) for each in some[::10]]
    assert grown_of(some).in_flight.us_per_request == pytest.approx(60.0, abs=15.0)


@pytest.mark.parametrize(
    "arrivals",
    [
        waits(1),
        waits(1, per_request_us=-60.0),
        waits(1, requests=20, per_request_us=5.0),
        [msgspec.structs.replace(each, in_flight=7.0) for each in waits(1)],
        [msgspec.structs.replace(each, in_flight=0.0) for each in waits(1)],
    ],
    ids=["none", "less with each", "too few", "never another number", "not counted"],
)
def test_what_is_not_sure_to_grow_stays_one_number(arrivals):
    assert grown_of(arrivals).in_flight is None


def test_arrivals_kept_by_an_earlier_version_are_of_no_known_number():
    graph = dump(ApiQueueing(first_tokens=deque(waits(1, requests=30)))).graph
    ((_, values),) = (each for each in graph["objects"] if each[0] == "api_queueing")
    place = graph["kinds"]["api_queueing"].index("first_tokens")
    values[place] = [msgspec.structs.astuple(each)[:3] for each in values[place]]
    found = load(msgspec.msgpack.decode(msgspec.msgpack.encode(graph)), ApiQueueing, None)
    assert [each.in_flight for each in found.first_tokens] == [0.0] * 30
    assert explained(found.first_tokens, StepCosts()) is not None
    assert grown_of(found.first_tokens).in_flight is None


def test_times_that_do_not_scatter_at_all_are_told_or_left():
    level = [BusyArrival(30_000.0, 12_000.0, 300.0, 1.0 + n % 7) for n in range(60)]
    assert grown_of(level).in_flight is None
    straight = [BusyArrival(30_000.0 + 50.0 * (n % 7), 12_000.0, 300.0, 1.0 + n % 7) for n in range(60)]
    assert grown_of(straight).in_flight.us_per_request == pytest.approx(50.0)
    for tiny in (1e-4, 1e-12, 1e-300):
        bent = [msgspec.structs.replace(each, wait_us=30_000.0 + tiny * each.in_flight) for each in straight]
        assert grown_of(bent).in_flight is None


def queueing_told(per_request_us, requests=400):
    """Spans that tell queue and prefill leave the API's 6 ms and the rest of a step."""
    chance = np.random.default_rng(5)
    queueing = ApiQueueing()
    for met in chance.integers(2, 120, requests).tolist():
        wait_us = 6000.0 + per_request_us * met + 14_000.0 * chance.random()
        queueing.told_waits_us.append(wait_us)
        queueing.told_arrivals.append(BusyArrival(wait_us, 14_000.0, 300.0, float(met)))
    return queueing


def test_engines_beside_one_api_process_share_those_in_flight():
    process = ApiProcess("api-0", "", 0, JoinConfig())
    process.api_queueing.first_tokens.extend(waits(1, per_request_us=60.0, requests=1000))
    process.api_queueing.told_waits_us.extend(queueing_told(60.0).told_waits_us)
    process.api_queueing.told_arrivals.extend(queueing_told(60.0).told_arrivals)
    alone = grown_of(process.api_queueing.first_tokens).in_flight
    engine = ApiQueueing()
    process.tell_engine(engine, 4)
    for found in (grown_of(engine.first_tokens).in_flight, with_stand_ins(None, [engine]).in_flight):
        assert found.us_per_request == pytest.approx(4 * alone.us_per_request, rel=0.4)
        assert found.requests == pytest.approx(alone.requests / 4, rel=0.1)
    assert not process.api_queueing.first_tokens
    assert not process.api_queueing.told_arrivals


def test_where_queue_and_prefill_are_told_it_grows_as_well():
    grown = with_stand_ins(None, [queueing_told(60.0)]).in_flight
    assert grown.us_per_request == pytest.approx(60.0, abs=4 * grown.stderr_us)
    assert grown.requests == pytest.approx(60.0, abs=5.0)
    assert with_stand_ins(None, [queueing_told(0.0)]).in_flight is None


def test_what_was_learned_of_requests_that_met_nobody_grows_from_one_on():
    intercept = FeatureSnapshot(name="intercept", unit="us", coefficient=6000.0, status="identified")
    model = ModelSnapshot(features=[intercept], rows=300, effective_rows=300.0)
    alone = TargetSnapshot(vector="alpha", unit="us", champion="portable", models={"portable": model})
    found = with_stand_ins(alone, [queueing_told(60.0)])
    assert found.models == alone.models
    assert found.in_flight.requests == 1.0
    assert with_stand_ins(alone, [queueing_told(0.0)]) == alone


def stock_pieces(requests, every_s=lambda _: 0.2, per_request_s=0.0, **told):
    """An asynchronous engine of 10 to 14 ms a step, whose API takes 6 ms, and this much more per request in flight."""
    chance = np.random.default_rng(3)
    out, ends_s, next_s = [], [], 0.0
    for number in range(requests):
        pace_s = float(0.012 + 0.002 * np.sin(number / 40))
        ttft_s = 0.006 + (2.0 + float(chance.random())) * pace_s
        arrival_s = next_s + 0.05 * float(chance.random())
        ttft_s += per_request_s * sum(end_s > arrival_s for end_s in ends_s)
        next_s += every_s(number)
        ends_s.append(arrival_s + ttft_s + 100 * pace_s)
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


def test_what_the_api_takes_more_with_each_request_is_published_beside_its_intercept():
    def every_s(number):
        return 0.1 if number // 50 % 2 else 0.4

    grown = published(stock_pieces(500, every_s, 0.0004)).targets["api_queueing"].in_flight
    assert grown.us_per_request == pytest.approx(400.0, abs=4 * grown.stderr_us)
    assert 4.0 < grown.requests < 12.0
    assert published(stock_pieces(200, every_s)).targets["api_queueing"].in_flight is None


def beside_engines(engines, processes):
    """What is published of replicas of one configuration whose processes all meet the same requests."""
    model = (("vllm.model", "m"),)
    sent = []
    for number in range(engines):
        run = run_engine(many_jobs(60, spacing=9 + number, seed=number))
        sent += pieces(run, instance=f"engine-{number}", apis=False, facts=model)
    for number in range(processes):
        for piece in stock_pieces(500, lambda n: 0.1 if n // 50 % 2 else 0.4, 0.003):
            span = type(piece.span)()
            span.CopyFrom(piece.span)
            span.span_id = bytes([number]) + span.span_id[1:]
            sent.append(piece._replace(instance=f"api-{number}", span=span))
    sent.sort(key=lambda piece: piece.span.end_time_unix_nano)
    return published(sent).targets["api_queueing"].in_flight


def test_replicas_with_an_api_process_each_are_told_of_their_own_requests():
    one, three = beside_engines(1, 1), beside_engines(3, 3)
    assert three.requests == pytest.approx(one.requests, rel=0.2)
    assert three.us_per_request == pytest.approx(one.us_per_request, rel=0.2)


def test_an_engine_beside_several_api_processes_has_the_requests_of_all_in_flight():
    one, other = beside_engines(1, 1), beside_engines(1, 3)
    assert other.requests == pytest.approx(3 * one.requests, rel=0.2)


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


@pytest.mark.parametrize(("status", "hidden", "taken_off"), [("weak", True, True), ("prior_only", False, True),
                                                             ("prior_only", True, False)])  # fmt: skip
def test_nothing_is_taken_off_for_a_prompt_at_the_price_of_computed_tokens_where_hits_are_hidden(
    status, hidden, taken_off
):
    """A data sheet's 40 us a token on prompts of 300 that may all have been in the prefix cache."""
    queueing = ApiQueueing()
    queueing.first_tokens.extend(BusyArrival(40_000.0 + n % 9, 10_000.0, 300.0, 3.0) for n in range(60))
    price = FeatureSnapshot(name="prefill_tokens", unit="us/token", coefficient=40.0, status=status)
    model = ModelSnapshot(features=[price], rows=300, effective_rows=300.0)
    step = TargetSnapshot(vector="beta", unit="us", champion="portable", models={"portable": model})
    found = with_stand_ins(None, [queueing], step, hits_hidden=hidden)
    (intercept,) = found.models["portable"].features
    everything_us = 40_000.0 - 10_000.0 * 1.5
    assert intercept.coefficient == pytest.approx(everything_us - taken_off * 40.0 * 300.0, abs=20.0)
