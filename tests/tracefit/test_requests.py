"""Requests in a closed loop: mean values against an engine that is stepped request by request."""

import copy
import math
import statistics
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracefit
from tests.support.vllm_scheduler import Engine, Host, Limits, Traffic
from tests.tracefit import example_snapshot as example
from tests.tracefit.example_snapshot import config_of, step_time_of, tree

STEPS_ONLY = tree()
_TARGETS = STEPS_ONLY["configs"][0]["targets"]
STEPS_ONLY["configs"][0]["targets"] = {"step_time": _TARGETS["step_time"]}
_TARGETS["step_time"]["mean_factor"] = 1.0
CONFIG = config_of()
BARE = config_of(STEPS_ONLY)


def step(prefill_tokens, requests, decode_context_tokens):
    return BARE.step_time(
        prefill_tokens=prefill_tokens, requests=requests, decode_context_tokens=decode_context_tokens
    ).us


in_either_mode = pytest.mark.parametrize("asynchronous", [False, True])

LOADS = {
    "alone": (1, 1000, 100, 8192, 128, None),
    "chat": (24, 800, 250, 8192, 128, 0.04),
    "many": (100, 300, 200, 8192, 128, 0.05),
    "few tokens for two": (2, 1200, 8, 8192, 128, None),
    "long prompts, few tokens": (16, 3000, 40, 8192, 128, 0.07),
    "chunked prompts": (12, 6000, 150, 2048, 128, None),
    "prefills nearly fill the steps": (38, 1800, 60, 2048, 128, 0.15),
    "prefills of short answers nearly fill the steps": (48, 800, 20, 2048, 128, 0.15),
    "prefill-bound": (48, 3000, 20, 4096, 128, None),
    "more than slots": (60, 500, 150, 8192, 16, None),
}
"""Clients, prompt and output tokens, tokens in a step, slots; how far TTFT may be off."""
HOST = Host(0.0, 0.0, 0.0, 0.0, api_us=1_000.0, api_us_per_token=0.0, answer_us=1_000.0, noise=0.0, stall_share=0.0)


def scheduled(asynchronous, document=STEPS_ONLY):
    """What is published of the engine where it schedules ahead, or does not."""
    document = copy.deepcopy(document)
    document["configs"][0]["engines"][0]["scheduling"] = "async" if asynchronous else "sync"
    return document


def served_and_asked(traffic, seconds, load, asynchronous):
    """Mean times of requests without the first quarter, and what the client says that knows steps and limits."""
    clients, _, _, budget, slots, _ = load

    def us(work):
        return step(work.prefill_tokens, work.prefill_requests + work.decodes, work.decode_context + work.decodes)

    limits = Limits(max_num_seqs=slots, max_num_batched_tokens=budget, asynchronous=asynchronous)
    served = Engine(us, traffic, limits, HOST).run(seconds * 10**9).requests
    kept = served[len(served) // 4 :]

    def mean(of):
        return statistics.fmean(map(of, kept))

    engine = config_of(scheduled(asynchronous))
    engine = engine.assuming(max_num_seqs=slots, max_num_batched_tokens=budget, kv_tokens=10**9)
    times = SimpleNamespace(
        ttft=mean(lambda each: each.first - each.received) / 1e3,
        itl=mean(lambda each: (each.last - each.first) / max(each.made - 1, 1)) / 1e3,
        e2e=mean(lambda each: each.last - each.received) / 1e3,
    )
    return times, engine.request(
        prompt_tokens=mean(lambda each: each.prompt), output_tokens=mean(lambda each: each.made), concurrency=clients
    )


def in_a_loop(load, seconds, spread, asynchronous):
    """The same of clients that need two milliseconds from an answer to the next request."""
    traffic = Traffic(5)
    traffic.closed(0, seconds * 10**9, *load[:3], spread, 0.0)
    return served_and_asked(traffic, seconds, load, asynchronous)


@in_either_mode
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_means_are_those_of_a_simulated_vllm(load, asynchronous):
    times, seen = in_a_loop(load, 60, 0.3, asynchronous)
    for name, off in (("itl", 0.06), ("e2e", 0.06), ("ttft", load[-1])):
        assert off is None or getattr(seen, name).us == pytest.approx(getattr(times, name), rel=off)


@in_either_mode
@pytest.mark.parametrize("clients", [2, 32])
@pytest.mark.parametrize(("prompt", "output"), [(300, 150), (2_000, 30), (6_000, 100)])
def test_loops_of_equal_requests_that_gather_have_an_itl_in_the_band(prompt, output, clients, asynchronous):
    """As load generators send them. Those that begin together end together, and wait for the prompts of each other."""
    times, seen = in_a_loop((clients, prompt, output, 8_192, 128, None), 40, 0.0, asynchronous)
    assert seen.ttft.low <= times.ttft
    assert seen.itl.low <= times.itl <= seen.itl.high


@in_either_mode
@pytest.mark.parametrize("clients", [1, 2, 8, 60])
@pytest.mark.parametrize(("prompt", "output"), [(100, 1), (900, 2), (100, 4)])
def test_the_shortest_answers_are_those_of_a_simulated_vllm(prompt, output, clients, asynchronous):
    """Of one token each, half of all are in a step and the others in the next; or thirds, if one is scheduled ahead."""
    off = 0.2 if asynchronous else 0.1
    times, seen = in_a_loop((clients, prompt, output, 2048, 128, None), 20, 0.2, asynchronous)
    assert seen.e2e.us == pytest.approx(times.e2e, rel=off)
    assert seen.requests_per_s == pytest.approx(clients * 1e6 / (times.e2e + 2_000.0), rel=off)


@in_either_mode
@pytest.mark.parametrize(("prompt", "output"), [(800, 20), (2000, 2), (100, 1)])
def test_one_more_request_never_makes_the_engine_slower_by_much(prompt, output, asynchronous):
    """Where prefills begin to fill the steps, and where all of one token no longer fit one."""
    config = config_of(scheduled(asynchronous)).assuming(max_num_seqs=128, max_num_batched_tokens=2048, kv_tokens=10**9)
    load = {"prompt_tokens": prompt, "output_tokens": output}
    some = [config.request(**load, concurrency=concurrency) for concurrency in range(3, 80)]
    for one, more in pairwise(some):
        assert more.requests_per_s >= 0.98 * one.requests_per_s
        assert more.ttft.us >= one.ttft.us


def _told_by(telemetry, **step_time):
    """The example by this telemetry, of which nothing but the time of a step was learned."""
    document = tree()
    document["configs"][0] |= {"telemetry": telemetry, "targets": {"step_time": _TARGETS["step_time"] | step_time}}
    return config_of(document)


CHAT = {"prompt_tokens": 800, "output_tokens": 200, "concurrency": 20}
UNKNOWN = [
    ("prompt_tokens", (6_000, 50, 2, 0.0), False, True),
    ("prompt_tokens", (12_000, 50, 2, 0.0), True, False),
    ("prompt_tokens", (12_000, 50, 2, 0.95), True, False),
    ("output_tokens", (250, 1, 8, 0.0), False, True),
    ("output_tokens", (250, 3, 8, 0.0), True, False),
    ("output_tokens", (250, 50, 8, 0.0), False, True),
    ("kv_tokens", (500, 400, 20, 0.0), False, True),
    ("kv_tokens", (500, 400, 24, 0.0), True, True),
    ("kv_tokens", (500, 400, 40, 0.0), True, False),
]


@pytest.mark.parametrize(("name", "load", "named", "usable"), UNKNOWN)
def test_what_cannot_be_known_of_a_load_is_named_and_not_usable(name, load, named, usable):
    """What chunks, cached or not, pay for those before; whom each of few tokens meets; who is preempted for memory."""
    config = _told_by("steps", seen=None).assuming(max_num_batched_tokens=2_048, kv_tokens=20_000)
    prompt, output, concurrency, hit = load
    said = config.request(prompt_tokens=prompt, output_tokens=output, concurrency=concurrency, prefix_hit=hit)
    assert (name in said.extrapolated, said.usable) == (named, usable)


FACTS = [
    ("speculative_decoding", {"speculative_decoding": True}, 750),
    ("speculative_decoding", {"speculative_decoding": "eagle3"}, 750),
    ("max_num_batched_tokens", {"enable_chunked_prefill": False}, 1_500),
    ("", {"enable_chunked_prefill": False}, 750),
    ("", {"speculative_decoding": False, "enable_chunked_prefill": True}, 1_500),
]


@pytest.mark.parametrize(("named", "facts", "prompt"), FACTS)
def test_requests_of_an_engine_that_works_otherwise_are_not_usable_while_its_steps_are(named, facts, prompt):
    """A step gives several tokens of one answer, or waits until it holds a whole prompt."""
    document = tree()
    document["configs"][0]["config"] |= {"max_num_batched_tokens": 2_048} | facts
    del step_time_of(document)["seen"]
    config = config_of(document)
    said = config.request(prompt_tokens=prompt, output_tokens=100, concurrency=8)
    assert (said.extrapolated, said.usable) == (tuple(filter(None, [named])), not named)
    assert config.step_time(requests=8, decode_context_tokens=14_400).usable


def test_the_band_holds_the_wait_for_memory_where_sizes_decide_whether_one_waits():
    config = _told_by("steps", seen=None).assuming(kv_tokens=20_000)
    roomy, full = (config.request(prompt_tokens=500, output_tokens=400, concurrency=each).ttft for each in (20, 24))
    assert full.high > 3.0 * full.us > 3.0 * roomy.us


def test_the_band_of_the_first_token_holds_how_long_prompts_wait_for_tokens():
    config = _told_by("steps", seen=None, interval=None).assuming(kv_tokens=10**9)
    load = {"prompt_tokens": 1800, "output_tokens": 60, "concurrency": 38}
    few, many = (config.assuming(max_num_batched_tokens=budget).request(**load).ttft for budget in (2048, 10**5))
    assert (few.high - few.us) / few.us > 0.05 > 5.0 * (many.high - many.us) / many.us


@pytest.mark.parametrize("telemetry", ["journeys", "requests", "metrics"])
@pytest.mark.parametrize("tokens", [0, 600])
def test_rows_of_many_steps_tell_how_long_batches_of_a_size_take_with_prompts_or_without(telemetry, tokens):
    """Factors are published so much smaller as rows are few."""
    shapes = {"prefill:16-31:64-90": {"factor": 1.1, "rows": 64.0}}
    said = _told_by(telemetry, seen=None, shape_factors=shapes).step_time(prefill_tokens=tokens, requests=20)
    b0, b_prefill, _, b_requests = (each.value for each in BARE.coefficients())
    assert said.us == pytest.approx(1.1 ** (72 / 64) * (b0 + tokens * b_prefill + 20 * b_requests))


def test_pages_may_show_that_a_request_alone_is_slower_than_two():
    """As kernels of a single row are in some formats; there the windows of one request took a quarter longer."""
    shapes = {"decode:1": {"factor": 1.2, "rows": 40.0}, "decode:2": {"factor": 1.0, "rows": 40.0}}
    config = _told_by("metrics", mean_factor=0.8, seen=None, shape_factors=shapes)  # stalls are in its windows
    alone, two = (config.request(prompt_tokens=1, output_tokens=4_000, concurrency=n).itl.us for n in (1, 2))
    assert alone > 1.15 * two
    assert two == pytest.approx(config.step_time(requests=2, decode_context_tokens=4_000).us, rel=0.03)


def test_a_larger_batch_that_was_hardly_seen_does_not_make_smaller_ones_faster():
    often, seldom = {"decode:1": {"factor": 1.0, "rows": 100.0}}, {"decode:17-24": {"factor": 0.6, "rows": 2.0}}
    alone, both = (
        _told_by("requests", shape_factors=each).request(prompt_tokens=200, output_tokens=400).itl.us
        for each in (often, often | seldom)
    )
    assert both == pytest.approx(alone, rel=0.03)


@pytest.mark.parametrize("telemetry", ["steps", "requests"])
def test_errors_of_the_form_widen_what_the_coefficients_answer(telemetry):
    """Rows of single steps tell shapes themselves; of means, the coefficients are asked beside what was seen."""
    models = copy.deepcopy(_TARGETS["step_time"]["models"])
    for feature in models["portable"]["features"]:
        feature["form_error"] = 0.5 * feature["coefficient"]
    sure = _told_by(telemetry, seen=None).request(**CHAT)
    unsure = _told_by(telemetry, seen=None, models=models).request(**CHAT)
    widths = [answer.itl.high - answer.itl.low for answer in (sure, unsure)]
    assert (widths[1] > 2.0 * widths[0]) == (telemetry == "requests")
    assert unsure.itl.us == sure.itl.us


def test_a_token_budget_that_nobody_told_is_named_where_prompts_need_several_steps():
    document = tree()
    del document["configs"][0]["config"]["max_num_batched_tokens"]
    config = config_of(document)
    short, long = (config.request(prompt_tokens=each, output_tokens=100, concurrency=4) for each in (500, 5_000))
    assert "max_num_batched_tokens" not in short.extrapolated
    shared = config.request(prompt_tokens=1_500, output_tokens=20, concurrency=32)
    for said in (long, shared):
        assert "max_num_batched_tokens" in said.extrapolated
        assert not said.usable
    told = config.assuming(max_num_batched_tokens=2_048).request(prompt_tokens=5_000, output_tokens=100, concurrency=4)
    assert long.ttft.us == told.ttft.us


def test_what_a_request_costs_outside_of_the_steps_is_added_once():
    with_api = CONFIG.request(prompt_tokens=1000, output_tokens=100, concurrency=1)
    without = BARE.request(prompt_tokens=1000, output_tokens=100, concurrency=1)
    stretched = CONFIG.step_time(prefill_tokens=1000, requests=1).us * 1.02
    assert with_api.ttft.us == pytest.approx(stretched + 900 + 0.4 * 1000 + 1200)
    assert without.ttft.us == pytest.approx(stretched / 1.02)
    after = with_api.e2e.us - with_api.ttft.us - 99 * with_api.itl.us
    assert after == pytest.approx(1500 + 1.7 * 100)
    bar, bare = (each.ttft.high - each.ttft.us for each in (with_api, without))
    of_no_rows = 1.28 * 20  # its standard error
    assert bar == pytest.approx(math.hypot(1.02 * bare, 0.5 * (900 + 0.4 * 1000), of_no_rows))
    untold = tree()
    intercept = example.feature("intercept", 1300.0, None, 1.0)
    untold["configs"][0]["targets"]["api_queueing"] = example.target("alpha", example.model(intercept))
    wide = config_of(untold).request(prompt_tokens=1000, output_tokens=100, concurrency=1).ttft
    assert wide.high - wide.us == pytest.approx(math.hypot(1.02 * bare, 1300, of_no_rows))


work = {
    "prompt_tokens": st.floats(1, 20_000),
    "output_tokens": st.floats(1, 4_000),
    "prefix_hit": st.floats(0, 1),
}


@given(**work, concurrency=st.floats(1, 500))
def test_every_answer_is_whole_and_littles_law_holds(concurrency, **asked):
    seen = CONFIG.request(concurrency=concurrency, **asked)
    for each in (seen.ttft, seen.itl, seen.e2e):
        assert 0 <= each.low <= each.us * (1 + 1e-12)
        assert each.us <= each.high * (1 + 1e-12)
        assert math.isfinite(each.high)
    assert seen.e2e.us * seen.requests_per_s <= concurrency * 1e6 * (1 + 1e-12)
    assert concurrency * 1e6 <= (seen.e2e.us + 2_000.0) * seen.requests_per_s * (1 + 1e-12)
    assert seen.running <= min(concurrency, 128)


@given(**work, concurrency=st.integers(1, 200))
def test_more_cached_prompt_is_never_later(concurrency, **asked):
    asked["prefix_hit"] = 0.0
    cold = BARE.assuming(max_num_batched_tokens=10**9).request(concurrency=concurrency, **asked)
    asked["prefix_hit"] = 1.0
    warm = BARE.assuming(max_num_batched_tokens=10**9).request(concurrency=concurrency, **asked)
    assert warm.ttft.us <= cold.ttft.us * 1.04  # the factor of one shape is 1.03


def test_between_two_whole_numbers_it_is_between():
    two, half, three = (CONFIG.request(prompt_tokens=500, output_tokens=200, concurrency=n).itl.us for n in (2, 2.5, 3))
    assert half == pytest.approx((two + three) / 2, rel=1e-3)


def test_one_output_token_has_no_itl():
    seen = CONFIG.request(prompt_tokens=500, output_tokens=1)
    assert seen.itl == (0.0, 0.0, 0.0)
    assert seen.e2e.us > seen.ttft.us > 0


def test_a_request_that_the_engine_cannot_hold_is_refused():
    with pytest.raises(tracefit.BadInputError, match="kv_capacity"):
        CONFIG.assuming(kv_tokens=1000).request(prompt_tokens=2000, output_tokens=10)


@pytest.mark.parametrize("telemetry", ["fpm", "requests"])
def test_the_band_holds_a_step_ahead_where_nothing_tells_of_it_and_a_fact_does(telemetry):
    def answer(scheduling, facts):
        document = tree()
        config = document["configs"][0]
        config["engines"][0]["scheduling"], config["telemetry"] = scheduling, telemetry
        config["config"] |= facts
        return config_of(document).request(prompt_tokens=800, output_tokens=250, concurrency=24).ttft

    sync, ahead, unknown = answer("sync", {}), answer("async", {}), answer("unknown", {})
    assert unknown.us == sync.us
    assert unknown.high > ahead.us > sync.high
    assert answer("unknown", {"async_scheduling": True}) == ahead
    assert answer("unknown", {"async_scheduling": False}) == answer("sync", {"async_scheduling": True}) == sync


@pytest.mark.parametrize("waits_us", [0.0, 300.0])
def test_the_band_of_the_first_token_holds_a_step_ahead_unless_waits_speak_for_none(waits_us):
    """Who is alone meets no such step: where waits speak for one, it may be the API server's time."""

    def first(concurrency, **told):
        document = tree()
        config = document["configs"][0]
        config["engines"][0]["scheduling"], config["telemetry"] = "unknown", "requests"
        config["targets"]["api_queueing"] |= told
        return config_of(document).request(prompt_tokens=800, output_tokens=250, concurrency=concurrency).ttft

    alone, several = (first(count, step_ahead_us=waits_us) for count in (1, 24))
    if waits_us:
        assert several.low < several.us - 0.9 * step(0, 24, 24 * 925)
        assert alone.high > alone.us + waits_us
    else:
        assert several.us == first(24).us
        assert several.high < first(24).high
        assert alone == first(1)


def test_a_prefix_hit_is_not_counted_again_where_the_price_of_a_token_has_it():
    """Spans of a server that hides hits tell what a token costs that was sent, not one that was computed."""
    document = tree()
    document["configs"][0] |= {"telemetry": "requests", "prefix_hits_hidden": True}
    hidden = config_of(document)
    document["configs"][0]["prefix_hits_hidden"] = False
    told = config_of(document)
    chat = {"prompt_tokens": 800, "output_tokens": 200}
    assert (hidden.prefix_hits_hidden, told.prefix_hits_hidden) == (True, False)
    assert hidden.request(**chat, prefix_hit=0.0) == told.request(**chat)
    assert hidden.plan(**chat, itl_ms=30) == told.plan(**chat, itl_ms=30)
    assert told.request(**chat, prefix_hit=0.5).ttft.us < told.request(**chat).ttft.us
    for ask in (hidden.request, hidden.plan):
        with pytest.raises(tracefit.BadInputError, match=r"prefix_hit: .* hides prefix hits"):
            ask(**chat, prefix_hit=0.5)
