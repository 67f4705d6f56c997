"""The largest concurrency: within the targets, and limited by what limits it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracefit
from tests.tracefit.example_snapshot import config_of, tree

CONFIG = config_of()
CHAT = {"prompt_tokens": 2000, "output_tokens": 300}


def test_at_the_answer_the_target_holds_and_one_more_breaks_it():
    plan = CONFIG.plan(**CHAT, itl_ms=30)
    assert plan.at.concurrency == plan.concurrency
    assert CONFIG.request(**CHAT, concurrency=plan.concurrency).itl.ms <= 30
    assert CONFIG.request(**CHAT, concurrency=plan.concurrency + 1).itl.ms > 30


@given(st.floats(100, 8000), st.floats(2, 1500), st.floats(9, 200), st.booleans())
def test_every_smaller_probe_of_the_curve_keeps_the_target(prompt, output, itl_ms, safe):
    plan = CONFIG.plan(prompt_tokens=prompt, output_tokens=output, itl_ms=itl_ms, safe=safe)
    for point in plan.curve:
        if point.concurrency <= plan.concurrency:
            holds_with_band = safe and point.concurrency == plan.concurrency
            assert (point.itl.high if holds_with_band else point.itl.us) <= itl_ms * 1e3
    assert [point.concurrency for point in plan.curve] == sorted({point.concurrency for point in plan.curve})


def test_the_safe_side_is_smaller():
    plain, safe = (CONFIG.plan(**CHAT, itl_ms=30, safe=side) for side in (False, True))
    assert 0 < safe.concurrency < plain.concurrency
    assert safe.at.itl.high <= 30_000


@pytest.mark.parametrize(
    ("limits", "targets", "limit"),
    [
        ({}, {"itl_ms": 30}, "itl"),
        ({}, {"ttft_ms": 140}, "ttft"),
        ({"max_num_seqs": 8}, {"itl_ms": 30}, "max_num_seqs"),
        ({"kv_tokens": 20_000}, {"itl_ms": 30}, "kv_capacity"),
        ({"max_num_batched_tokens": 60, "kv_tokens": 10**7}, {"itl_ms": 10_000, "ttft_ms": 60_000}, "token_budget"),
    ],
)
def test_what_limits_is_named(limits, targets, limit):
    assert CONFIG.assuming(**limits).plan(**CHAT, **targets).limit == limit


def test_kv_capacity_leaves_room_for_requests_whose_phases_agree():
    held = CONFIG.assuming(kv_tokens=100_000).plan(**CHAT).concurrency
    assert held * (2000 + 150) < 100_000 < (held + 4) * (2000 + 150)


def test_where_no_limit_is_known_it_says_so_and_ends_at_the_largest_batch_seen():
    bare = tree()
    bare["configs"][0]["config"] = {}
    plan = config_of(bare).plan(**CHAT)
    assert (plan.concurrency, plan.limit) == (60, "seen")
    assert config_of(bare).plan(**CHAT, itl_ms=60).limit == "itl"
    bare["configs"][0]["targets"]["step_time"]["seen"] = None
    assert config_of(bare).plan(**CHAT).limit == "none"


def test_a_target_that_nothing_keeps_gives_none():
    plan = CONFIG.plan(**CHAT, itl_ms=5)
    assert (plan.concurrency, plan.limit, plan.at.concurrency) == (0, "itl", 1)


def test_a_rate_is_served_by_so_many_engines():
    alone = CONFIG.plan(**CHAT, itl_ms=30, rate=2.0)
    assert alone.replicas == 1
    fleet = CONFIG.plan(**CHAT, itl_ms=30, rate=40.0)
    assert fleet.replicas == math.ceil(40.0 / fleet.at.requests_per_s)
    assert CONFIG.plan(**CHAT, itl_ms=5, rate=1.0).replicas is None


def test_a_target_that_an_answer_of_one_token_cannot_break_is_refused():
    for itl_ms, ttft_ms in ((1.0, None), (30.0, 500.0)):
        with pytest.raises(tracefit.BadInputError, match=r"^itl_ms: .* one token"):
            CONFIG.plan(prompt_tokens=100, output_tokens=1, itl_ms=itl_ms, ttft_ms=ttft_ms)
    assert CONFIG.plan(prompt_tokens=100, output_tokens=1, ttft_ms=500.0).concurrency > 1
