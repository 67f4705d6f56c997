"""A step: coefficients times work times factor, with a band, and the truth about what was never seen."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracefit
from tests.tracefit.example_snapshot import config_of, step_time_of, tree

CONFIG = config_of()

tokens = st.one_of(st.integers(0, 20_000), st.floats(0, 1e6, allow_nan=False))
requests = st.one_of(st.integers(0, 600), st.floats(0, 1e4, allow_nan=False))
steps = st.tuples(tokens, requests, st.one_of(st.integers(0, 10**7), st.floats(0, 1e8)))


def changed(edit):
    """The example after an edit of its step_time."""
    bent = tree()
    edit(step_time_of(bent))
    return config_of(bent)


@pytest.mark.parametrize("cell", ["decode:1", "decode:8", "prefill:16-31:512-724"])
def test_of_a_shape_that_was_seen_it_is_the_sum_of_the_terms_times_the_factor(cell):
    target = CONFIG.targets["step_time"]
    factor, _, (prefill, requests, context, us) = target.shapes[cell]
    plain = 7_900 + 42 * prefill + 0.11 * context + 95 * requests
    step = CONFIG.step_time(prefill_tokens=prefill, requests=requests, decode_context_tokens=context)
    assert step.us == pytest.approx(factor * plain, rel=0.01)
    assert step.us == pytest.approx(us, rel=0.01)


def test_it_has_the_band_of_its_stratum():
    step = CONFIG.step_time(requests=8)
    assert (step.low, step.high) == pytest.approx((0.97 * step.us, 1.04 * step.us), rel=1e-4)


def test_without_a_stratum_it_has_the_band_of_the_nearest_of_its_kind():
    config = changed(lambda t: t["interval"].update(strata={"decode:8-15": [0.9, 1.0, 1.1], "prefill:1": [0.5, 1, 2]}))
    step, prefill = config.step_time(requests=3), config.step_time(prefill_tokens=600, requests=20)
    assert (step.low, step.high) == pytest.approx((0.9 * step.us, 1.1 * step.us), rel=1e-3)
    assert (prefill.low, prefill.high) == pytest.approx((0.5 * prefill.us, 2 * prefill.us), rel=1e-3)


def test_without_factors_seen_and_interval_the_line_remains():
    def bare(target):
        for key in ("shape_factors", "seen", "interval"):
            del target[key]

    step = changed(bare).step_time(prefill_tokens=512, requests=20)
    assert step.us == step.low == step.high == 7_900 + 42 * 512 + 95 * 20
    assert step.extrapolated == ()


@given(steps)
def test_the_band_holds_the_prediction(step):
    answer = CONFIG.step_time(prefill_tokens=step[0], requests=step[1], decode_context_tokens=step[2])
    assert 0 <= answer.low <= answer.us <= answer.high
    assert math.isfinite(answer.high)


@given(steps, st.floats(0, 1e5))
def test_more_context_is_never_faster(step, more):
    base = {"prefill_tokens": step[0], "requests": step[1]}
    few, many = (CONFIG.step_time(decode_context_tokens=step[2] + extra, **base).us for extra in (0, more))
    assert many >= few


def test_what_was_never_seen_is_named_and_its_band_is_wider():
    inside = CONFIG.step_time(requests=40, decode_context_tokens=140_000)
    outside = CONFIG.step_time(requests=40, decode_context_tokens=400_000)
    assert inside.extrapolated == ()
    assert outside.extrapolated == ("decode_context_tokens", "context_per_request")
    for tokens in (20_000, 150_000):  # the shortest that were seen have 1,429 tokens each, the longest 1,800
        assert CONFIG.step_time(requests=40, decode_context_tokens=tokens).extrapolated == ("context_per_request",)
    assert outside.high / outside.us > inside.high / inside.us
    assert outside.usable


def carried(config):
    """Whether the contexts that were seen are usable, and those beyond."""
    return [config.step_time(requests=40, decode_context_tokens=tokens).usable for tokens in (140_000, 400_000)]


def test_beyond_an_octave_of_what_was_seen_nothing_carries():
    near, far = (CONFIG.step_time(prefill_tokens=tokens, requests=12) for tokens in (50, 20))
    assert (near.extrapolated, near.usable) == ((), True)
    assert (far.extrapolated, far.usable) == (("shape",), False)


@pytest.mark.parametrize("told", [{"model": ""}, {"model": "prod-chat"}])
def test_of_a_model_that_may_be_a_mixture_for_nobody_told_what_it_is_nothing_carries_outside(told):
    document = tree()
    facts = document["configs"][0]["config"]
    facts |= told
    assert carried(config_of(document)) == [True, False]
    assert config_of(document).step_time(requests=40, decode_context_tokens=400_000).extrapolated[-1] == "model"
    facts["num_experts"] = 0
    assert carried(config_of(document)) == [True, True]


@pytest.mark.parametrize("untold", [{"max_num_seqs": None}, {"num_gpu_blocks": None}])
def test_where_nobody_told_a_limit_nothing_carries_beyond_what_was_seen_at_once(untold):
    document = tree()
    document["configs"][0]["config"] |= untold
    config = config_of(document)
    beyond = {"requests": 70, "decode_context_tokens": 300_000}
    assert [each.step_time(**beyond).usable for each in (config, CONFIG)] == [False, True]
    assert config.assuming(max_num_seqs=256, kv_tokens=400_000).step_time(**beyond).usable
    assert not {"max_num_seqs", "kv_tokens"}.isdisjoint(config.step_time(**beyond).extrapolated)


def test_of_means_nothing_carries_beyond_three_quarters_of_an_octave_of_batches_with_rows_whatever_their_prompts():
    document = tree()
    document["configs"][0]["telemetry"] = "metrics"
    cells = ("prefill:2-3:1", "decode:8")
    step_time_of(document)["shape_factors"] = {cell: {"factor": 1.0, "rows": 99.0} for cell in cells}
    told = {n: config_of(document).step_time(requests=n) for n in (2.5, 4.1, 4.3, 4.7, 4.8, 8)}
    assert [n for n, step in told.items() if "shape" in step.extrapolated and not step.usable] == [4.3, 4.7]


def test_outside_a_weak_coefficient_does_not_carry():
    config = changed(lambda t: t["models"]["portable"]["features"][2].update(status="weak"))
    assert carried(config) == [True, False]


def test_outside_the_band_holds_what_another_load_would_move():
    config = changed(lambda t: t["models"]["portable"]["features"][2].update(form_error=0.05))
    step, sure = (each.step_time(requests=40, decode_context_tokens=400_000) for each in (config, CONFIG))
    assert step.high > sure.high > sure.us
    assert step.usable


def test_the_error_of_a_sum_is_that_of_its_covariance():
    """The intercept and requests trade with each other: of 40 requests they are known well together."""
    portable = tree()["configs"][0]["targets"]["step_time"]["models"]["portable"]
    names = [each["name"] for each in portable["features"]]
    apart = np.array([{"intercept": 400.0, "requests": -10.0}.get(name, 0.0) for name in names])

    def bare(target):
        target["shape_factors"] = {}

    def told(target):
        bare(target)
        target["models"]["portable"]["covariance"] = np.outer(apart, apart).tolist()

    inside = changed(bare).step_time(requests=40, decode_context_tokens=140_000)
    traded, alone = (changed(edit).step_time(requests=40, decode_context_tokens=400_000) for edit in (told, bare))
    assert traded.extrapolated
    assert traded.high / traded.us == pytest.approx(inside.high / inside.us, rel=1e-3)
    assert alone.high > traded.high
    with pytest.raises(tracefit.LoadError, match="a covariance of all coefficients"):
        changed(lambda target: target["models"]["portable"].update(covariance=[[1.0]]))


def test_beyond_the_engine_itself_is_named():
    assert "max_num_seqs" in CONFIG.step_time(requests=129).extrapolated
    assert "max_num_batched_tokens" in CONFIG.step_time(prefill_tokens=9000, requests=2).extrapolated


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda t: t["models"]["portable"].update(rows=100), "100 rows"),
        (lambda t: t["models"]["portable"]["error"].update(median_ape=0.4), "40%"),
        (lambda t: [f.update(status="prior_only") for f in t["models"]["portable"]["features"]], "donor"),
    ],
)
def test_what_should_not_be_bet_on_says_why(edit, why):
    config = changed(edit)
    assert why in "; ".join(config.reasons)
    assert not config.usable
    assert not config.step_time(requests=8).usable


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda c: c["targets"].pop("step_time"), "learned nothing about step_time"),
        (lambda c: c["targets"]["step_time"].update(models={}), "no coefficients of step_time"),
        (lambda c: c.update(quarantined="ValueError: x"), "quarantined: ValueError"),
    ],
)
def test_without_coefficients_the_reason_is_given(edit, why):
    bent = tree()
    edit(bent["configs"][0])
    config = config_of(bent)
    assert why in config.reasons[0]
    with pytest.raises(tracefit.NoCoefficientsError, match=why):
        config.step_time(requests=1)


def test_coefficients_of_every_target_are_had():
    assert [each.name for each in CONFIG.coefficients("api_queueing")] == ["intercept", "prompt_tokens"]
    assert CONFIG.coefficients()[0].value == 7_900
    with pytest.raises(tracefit.NoCoefficientsError, match="queue_wait"):
        CONFIG.coefficients("queue_wait")


def test_a_set_that_needs_a_data_sheet_is_left_to_the_sidecar():
    def physics(target):
        target["models"] = {"physics": target["models"]["portable"]}
        target["models"]["physics"]["features"][1]["name"] = "t_weight"
        target["champion"] = "physics"

    with pytest.raises(tracefit.NoCoefficientsError, match="publishes no coefficients of step_time"):
        changed(physics).step_time(requests=1)


BAD = [-1, -1e-9, math.nan, math.inf, -math.inf, 10**12, 1e300, 10**400, "5", None, True, [], {}, object()]


ASKED = {
    CONFIG.step_time: {"prefill_tokens": 0, "requests": 1, "decode_context_tokens": 0},
    CONFIG.request: {"prompt_tokens": 100, "output_tokens": 10, "concurrency": 1, "prefix_hit": 0.0},
    CONFIG.plan: {"prompt_tokens": 100, "output_tokens": 10, "prefix_hit": 0.0, "itl_ms": 9, "ttft_ms": 9, "rate": 1},
}


@pytest.mark.parametrize(("ask", "name"), [(ask, name) for ask, asked in ASKED.items() for name in asked])
@pytest.mark.parametrize("value", BAD, ids=lambda each: repr(each)[:12])
def test_a_number_that_makes_no_sense_is_refused_by_name(ask, name, value):
    if value is None and name in {"itl_ms", "ttft_ms", "rate"}:
        return  # it is not asked for
    with pytest.raises(tracefit.BadInputError, match=f"^{name}: ") as raised:
        ask(**ASKED[ask] | {name: value})
    assert raised.value.parameter == name
    assert "\n" not in str(raised.value)


def test_a_limit_that_nothing_can_hold_is_no_limit():
    bent = tree()
    bent["configs"][0]["config"] |= {"num_gpu_blocks": 10**400, "max_num_seqs": 10**30, "max_num_batched_tokens": -1}
    limits = config_of(bent).limits
    assert limits == tracefit.Limits()
