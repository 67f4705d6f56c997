"""Time to the first token of requests that meet others: the API's own time, with them, and steps scheduled ahead."""

import math

import msgspec
import numpy as np
import pytest

from collector.decode import Export
from collector.join.api_queueing import ARRIVALS_MAX, HANDOFFS_MAX, ApiQueueing, BusyArrival, with_fallbacks
from online import FeatureSnapshot, ModelSnapshot, TargetSnapshot
from tests.support import vllm_senders
from tests.support.gpu_server import LIMITS, facts, request_exports, serve, work_us
from tests.support.pipelines import only_config, replayed
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import api_of, core_of
from tests.support.vllm_scheduler import Engine, Traffic
from tests.support.vllm_senders import span_exports, step_exports


def waits(ahead, requests=400, api_us=8000.0, prefill_us=0.0):
    chance = np.random.default_rng(1)
    pace = chance.uniform(10_000, 18_000, requests)
    prompt = chance.integers(100, 900, requests).astype(float)
    met = chance.integers(2, 120, requests).astype(float)
    first = api_us + (1.0 + ahead + chance.random(requests)) * pace + prefill_us * prompt
    return [BusyArrival(*map(float, each)) for each in zip(first, pace, prompt, met, strict=True)]


def priced(prefill_us, status="weak"):
    price = FeatureSnapshot(name="prefill_tokens", unit="us/token", coefficient=prefill_us, status=status)
    model = ModelSnapshot(features=[price], rows=300, effective_rows=300.0)
    return TargetSnapshot(vector="beta", unit="us", champion="portable", models={"portable": model})


def found_of(arrivals, prefill_us=0.0, *, known=False):
    queueing = ApiQueueing(arrivals=[each._replace(is_known=known) for each in arrivals])
    return with_fallbacks(None, [queueing], priced(prefill_us))


def api_us_of(found):
    (intercept,) = found.models["portable"].features
    return intercept.coefficient - (found.step_ahead_us or 0.0)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("prefill_us", [0.0, 40.0])
def test_the_api_is_told_from_the_steps_and_those_scheduled_ahead(ahead, prefill_us):
    found = found_of(waits(ahead, prefill_us=prefill_us), prefill_us)
    assert bool(found.step_ahead_us) == bool(ahead)
    assert api_us_of(found) == pytest.approx(8000, abs=600)


@pytest.mark.parametrize("ahead", [0, 1])
def test_experts_that_only_a_step_with_a_prompt_touches_are_no_step_scheduled_ahead(ahead):
    """A quarter of them, 10 ms, are touched by a mean step, which takes no longer; a prompt reads the others too."""
    experts = FeatureSnapshot(name="active_experts", unit="us", coefficient=40_000.0, mean=0.25, status="identified")
    model = ModelSnapshot(features=[experts], rows=300, effective_rows=300.0)
    step = msgspec.structs.replace(priced(0.0), models={"portable": model})
    prefill_us = 30_000.0 + (1.0 + ahead) * 10_000.0
    arrivals = [BusyArrival(9_000.0 + n, 25_000.0, 300.0, 3.0, prefill_us, is_known=True) for n in range(40)]
    found = with_fallbacks(None, [ApiQueueing(arrivals=arrivals)], step)
    assert bool(found.step_ahead_us) == bool(ahead)


@pytest.mark.parametrize("third", [0, 1, 2])
def test_the_shortest_or_the_longest_prompts_that_take_three_steps_more_are_a_doubt(third):
    """Those in the middle are none: what they take is between what both ends do."""
    prefills_us = [1_000.0 * n + 10_000.0 * (4.0 if n // 30 == third else 1.0) for n in range(90)]
    arrivals = [BusyArrival(9_000.0, 10_000.0, 10.0 * n, prefill_us=us) for n, us in enumerate(prefills_us)]
    assert bool(found_of(arrivals, 100.0, known=True).doubts) == (third != 1)


def published_by(payloads):
    return only_config(replayed([Export(payload, "peer", 1) for payload in payloads]))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("untold", [(), ("time_in_queue", "time_in_model_prefill")])
def test_steps_scheduled_ahead_are_seen_where_prompts_make_the_pace_of_requests(untold, ahead, monkeypatch):
    """Half of what a request takes are prompts of others."""
    took_s = vllm_senders._took_s
    monkeypatch.setattr(
        vllm_senders, "_took_s", lambda each: {name: s for name, s in took_s(each).items() if name not in untold}
    )
    traffic = Traffic(7)
    traffic.poisson(0, int(60e9), 6.0, 1200, 100)
    engine = serve("qwen32b-h200", 60.0, 7, asynchronous=ahead, traffic=traffic)
    api = published_by(request_exports("qwen32b-h200", engine)).targets["api_queueing"]
    assert bool(api.step_ahead_us) == ahead
    assert 1_000 < api_us_of(api) < 5_000


@pytest.mark.parametrize("odd", [0.0, 1e18, 5e-324])
@pytest.mark.parametrize("place", ["wait_us", "pace_us", "prompt_tokens", "in_flight"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_largest_and_smallest_times_that_are_let_in_leave_a_finite_answer_or_none(odd, place, every):
    bent = waits(1)
    bent[::every] = [each._replace(**{place: odd}) for each in bent[::every]]
    for found in (found_of(bent, 40.0), found_of(bent, 40.0, known=True)):
        assert found is None or math.isfinite(api_us_of(found))


@pytest.mark.parametrize(("status", "hidden", "taken_off"), [("weak", True, True), ("prior_only", False, True),
                                                             ("prior_only", True, False)])  # fmt: skip
def test_nothing_is_taken_off_for_a_prompt_at_the_price_of_computed_tokens_where_hits_are_hidden(
    status, hidden, taken_off
):
    """A data sheet's 40 us a token on prompts of 300 that may all have been in the prefix cache."""
    queueing = ApiQueueing()
    queueing.add_arrivals(BusyArrival(40_000.0 + n % 9, 10_000.0, 300.0, 3.0) for n in range(60 + ARRIVALS_MAX))
    assert len(queueing.arrivals) == ARRIVALS_MAX
    found = with_fallbacks(None, [queueing], priced(40.0, status), hits_hidden=hidden)
    (intercept,) = found.models["portable"].features
    everything_us = 40_000.0 - 10_000.0 * 1.5
    assert intercept.coefficient == pytest.approx(everything_us - taken_off * 40.0 * 300.0, abs=20.0)


@pytest.mark.parametrize(
    ("send", "ahead", "fixed_us", "tokens_a_step", "is_usable"),
    [
        (span_exports, False, 0.0, 1, True),
        (span_exports, True, 0.0, 1, True),
        (span_exports, False, 60e3, 1, False),
        (span_exports, True, 60e3, 1, False),
        (span_exports, True, 0.0, 2, False),
        (step_exports, False, 60e3, 1, True),
    ],
)
def test_prompts_that_take_steps_more_than_their_tokens_are_not_usable_from_spans(
    send, ahead, fixed_us, tokens_a_step, is_usable
):
    """As with sparse attention, or with speculative decoding; single steps show it."""

    def step_us(work):
        return work_us("llama8b-h100", work) + fixed_us * (work.prefill_tokens > 0)

    traffic = Traffic(7)
    traffic.poisson(0, int(60e9), 4.0, 600, 100)
    engine = Engine(step_us, traffic, LIMITS._replace(asynchronous=ahead), seed=7).run(int(60e9))
    for request in engine.requests:
        request.made = 1 + tokens_a_step * (request.made - 1)
    doubts = published_by(send(engine, facts("llama8b-h100"))).doubts
    assert is_usable == (not [doubt for doubt in doubts if "prompts take a step more or less" in doubt])


def test_where_hardly_a_request_finds_the_engine_idle_the_newest_handoffs_stand_in():
    run, queueing = run_engine(many_jobs(5)), ApiQueueing()
    for job in run.jobs * HANDOFFS_MAX:
        queueing.add(core_of(run, job), api_of(run, job))
    assert len(queueing.handoffs_us) == HANDOFFS_MAX
    (intercept,) = with_fallbacks(None, [queueing]).models["portable"].features
    assert (intercept.coefficient, intercept.status) == (pytest.approx(400.0), "weak")
