"""Steps and requests at loads that were hardly served: what the shapes beside them say."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tracefit.example_snapshot import cell_of, config_of, step_time_of, tree
from tracefit.shapes import stratum_name

CONTEXT_US = 0.08


def machine_us(prefill_tokens, requests, context):
    """Whose prefills have a floor."""
    rest_us = max(16_000.0, 9_000.0 + 75.0 * prefill_tokens) if prefill_tokens else 10_000.0
    return rest_us + 55.0 * requests + CONTEXT_US * context


def learned(sizes, prefills=(40, 80, 140, 200, 300, 600), rows=400.0, **beside):
    """What is published after these batches at 1,500 tokens of context; its line misses the machine's."""
    document = tree()
    config = document["configs"][0]
    config["config"] |= {"max_num_seqs": 1000, "num_gpu_blocks": 10**6}
    target = config["targets"]["step_time"]
    line = {"intercept": 8_500.0, "prefill_tokens": 78.0, "decode_context_tokens": 0.09, "requests": 63.0}
    for feature in target["models"]["portable"]["features"]:
        feature["coefficient"] = line[feature["name"]]
    config["targets"] = {"step_time": target | {"mean_factor": 1.0, "shape_factors": {}, "seen": None} | beside}
    for requests in sizes:
        for tokens in (0, *prefills):
            context = 1500.0 * requests
            predicted_us = 8_500.0 + 78.0 * tokens + 0.09 * context + 63.0 * requests
            us = machine_us(tokens, requests, context)
            factor = (us / predicted_us) ** (rows / (rows + 8.0))
            shape = {"factor": factor, "rows": rows, "usual": [tokens, requests, context, us]}
            config["targets"]["step_time"]["shape_factors"][cell_of(tokens, requests)] = shape
    return document


SERVED = (20, 30, 44, 60, 100)
BIG = learned(SERVED, context_us_per_token=CONTEXT_US)


def step_us(document, prefill_tokens, requests, context):
    config = config_of(document)
    return config.step_time(prefill_tokens=prefill_tokens, requests=requests, decode_context_tokens=context).us


@pytest.mark.parametrize("requests", [1, 4, 10, 80, 200])
def test_batches_between_and_beyond_those_that_were_served_follow_the_ones_beside(requests):
    told_us = step_us(BIG, 0, requests, 500 * requests)
    assert told_us == pytest.approx(machine_us(0, requests, 500 * requests), rel=0.06)


@pytest.mark.parametrize("tokens", [60, 120, 450])
@pytest.mark.parametrize("requests", [15, 50, 120])
def test_prefills_between_those_that_were_served_follow_the_ones_beside(tokens, requests):
    told_us = step_us(BIG, tokens, requests, 500 * requests)
    assert told_us == pytest.approx(machine_us(tokens, requests, 500 * requests), rel=0.08)


def test_shorter_contexts_than_were_served_cost_what_context_costs():
    short_us, long_us = (step_us(BIG, 0, 60, 60 * context) for context in (500, 4_000))
    assert long_us - short_us == pytest.approx(60 * CONTEXT_US * 3_500)
    unknown_columns = learned(SERVED)  # b_C stands in for the batch
    assert step_us(unknown_columns, 0, 60, 60 * 500) < 0.99 * short_us
    for document in (of_means := learned(SERVED, context_us_per_token=CONTEXT_US), unknown_columns):
        document["configs"][0]["telemetry"] = "metrics"
    assert step_us(of_means, 0, 60, 30_000) == step_us(unknown_columns, 0, 60, 30_000), "means are of many sizes"


def test_what_was_served_often_is_told_by_its_own_rows():
    odd = learned(SERVED, context_us_per_token=CONTEXT_US)
    step_time_of(odd)["shape_factors"]["decode:97-104"]["usual"][3] *= 1.3
    assert step_us(odd, 0, 100, 100 * 1500) == pytest.approx(1.3 * step_us(BIG, 0, 100, 100 * 1500), rel=0.03)
    assert step_us(odd, 0, 60, 60 * 1500) == pytest.approx(step_us(BIG, 0, 60, 60 * 1500), rel=0.02)


@pytest.mark.parametrize("requests", [2**power for power in range(8)])
def test_a_prefill_that_was_served_is_like_itself_also_with_the_fewest_requests_of_its_octave(requests):
    """Servers are busy at powers of two, where ``max_num_seqs`` ends a batch."""
    prefills = (19, 107, 1_217, 4_870)
    strata = {stratum: [0.9, 1.0, 1.1] for stratum in (stratum_name(0, requests), stratum_name(1, requests))}
    interval = {"p10": 0.9, "p50": 1.0, "p90": 1.1, "strata": strata}
    config = config_of(learned((requests,), prefills, context_us_per_token=CONTEXT_US, interval=interval))
    for tokens in prefills:
        assert "shape" not in config.step_time(prefill_tokens=tokens, requests=requests).extrapolated


def test_the_band_of_a_batch_holds_what_few_rows_of_it_took():
    odd = learned(SERVED, context_us_per_token=CONTEXT_US)
    took_us = 1.4 * machine_us(0, 10, 15_000)
    step_time_of(odd)["shape_factors"]["decode:10"] = {"factor": 1.15, "rows": 4.0, "usual": [0, 10, 15_000, took_us]}
    said = config_of(odd).step_time(requests=10, decode_context_tokens=15_000)
    assert 1.05 * machine_us(0, 10, 15_000) < said.us < 0.95 * took_us < took_us <= 1.001 * said.high


def test_a_shape_whose_one_row_compiled_says_nothing():
    odd = learned(SERVED, context_us_per_token=CONTEXT_US)
    shapes = step_time_of(odd)["shape_factors"]
    shapes["decode:10"] = {"factor": 1.4, "rows": 1.0, "usual": [0, 10, 15_000, 200_000]}
    assert step_us(odd, 0, 10, 5_000) == step_us(BIG, 0, 10, 5_000)


NUMBERS = st.one_of(st.floats(-1e3, 1e3), st.sampled_from((0.0, 1e-300, 1e12, -1e12)))


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=2), st.integers(1, 900))
@example([(0.0, 1.0, -1e12, 1e4), (0.0, 1e12, 0.0, 1e12)], 1)
@example([(0.0, 1.0, 0.0, 1e4), (0.0, 2.0, -1e5, 1e4)], 1)
def test_any_usual_work_gives_times(work, requests):
    bent = learned((20, 30), prefills=(), context_us_per_token=CONTEXT_US)
    for shape, usual in zip(step_time_of(bent)["shape_factors"].values(), work, strict=True):
        shape["usual"] = list(usual)
    told_us = step_us(bent, 0, requests, 1_000)
    assert math.isfinite(told_us)
    assert told_us > 0.0
