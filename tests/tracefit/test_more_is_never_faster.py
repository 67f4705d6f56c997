"""More work is never faster by chance: TTFT over the prompt, ITL over the concurrency, and plans, of all telemetry."""

import itertools
import json
import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.banks import learned as bank_of
from tests.support.banks import told
from tests.support.linear_steps import steps
from tests.support.paths import DATA
from tests.support.pipelines import client_of
from tests.tracefit.example_snapshot import cell_of, config_of, step_time_of, tree

QUALITIES = ("steps", "requests", "metrics")
"""What the client tells apart: rows of single steps, of means of many steps, and of pages."""
FEW, MANY = 63.0, 3_000.0
LOUD = {"p10": 0.02, "p50": 1.0, "p90": 7.0}
"""Of rows so few of which leave 30 per cent of their noise."""
PROMPTS = [round(8 * 1.25**power) for power in range(32)]
CONCURRENCIES = (*range(1, 34), *range(36, 130, 5))
NEARLY = 1.0 - 1e-6


def learned(telemetry, seed, rows_max, *, scheduling="sync"):
    """A snapshot with any coefficients, and factors that are off by what so many rows leave of a loud noise."""
    draw = random.Random(seed)
    document = tree()
    config = document["configs"][0]
    config |= {"telemetry": telemetry}
    config["engines"][0]["scheduling"] = scheduling
    budget = draw.choice((256, 2_048, 8_192))
    config["config"] |= {"max_num_seqs": 1_000, "num_gpu_blocks": 10**6, "max_num_batched_tokens": budget}
    beta = [10 ** draw.uniform(3, 5), 10 ** draw.uniform(0, 3), 10 ** draw.uniform(-3, 0.5), 10 ** draw.uniform(0, 3)]
    target = config["targets"]["step_time"]
    for feature, value in zip(target["models"]["portable"]["features"], beta, strict=True):
        feature["coefficient"] = value
    shapes = {}
    for _ in range(draw.randrange(60)):
        tokens, requests = draw.choice((0, draw.randrange(1, 4_000))), draw.randrange(1, 100)
        rows, context = draw.uniform(1.0, rows_max), requests * draw.uniform(10.0, 3_000.0)
        us = (beta[0] + beta[1] * tokens + beta[2] * context + beta[3] * requests) * draw.lognormvariate(0.0, 0.3)
        factor = draw.lognormvariate(0.0, 0.3) ** (rows / (rows + 8.0))
        shape = {"factor": factor, "rows": rows} | draw.choice(({}, {"usual": [tokens, requests, context, us]}))
        shapes[cell_of(tokens, requests)] = shape
    more = draw.choice(({}, {"context_us_per_token": beta[2] * draw.uniform(0.3, 2.0)}))
    config["targets"] = {"step_time": target | {"mean_factor": 1.0, "shape_factors": shapes, "seen": None} | more}
    return document


def assert_rising(times):
    ratios = [after / before for before, after in itertools.pairwise(times)]
    assert min(ratios) >= NEARLY, (ratios.index(min(ratios)), min(ratios))


def ttft_by_prompt(config, output, concurrency):
    asked = {"output_tokens": output, "concurrency": concurrency}
    return [config.request(prompt_tokens=each, **asked).ttft.us for each in PROMPTS]


def itl_by_concurrency(config, output, prompt, concurrencies=CONCURRENCIES):
    asked = {"prompt_tokens": prompt, "output_tokens": output}
    return [config.request(concurrency=each, **asked).itl.us for each in concurrencies]


def assert_plan_keeps_targets(config, prompt, output, concurrency):
    target_us = 1.01 * config.request(prompt_tokens=prompt, output_tokens=output, concurrency=concurrency).itl.us
    planned = config.plan(prompt_tokens=prompt, output_tokens=output, itl_ms=target_us / 1e3).concurrency
    smaller = itl_by_concurrency(config, output, prompt, range(1, min(planned, 100) + 1))
    assert max(smaller, default=0.0) <= target_us


LOADS = (st.sampled_from((2, 5, 20, 100, 500)), st.sampled_from((1, 2, 5, 20, 60)), st.sampled_from(PROMPTS))


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("telemetry", QUALITIES)
@given(st.integers(0, 10**6), *LOADS)
@settings(max_examples=settings.default.max_examples // 5)
def test_more_is_never_faster(telemetry, scheduling, seed, output, concurrency, prompt):
    document = learned(telemetry, seed, FEW, scheduling=scheduling)
    step_time_of(document)["interval"] = LOUD
    config = config_of(document)
    assert_rising(ttft_by_prompt(config, output, concurrency))
    assert_rising(itl_by_concurrency(config, output, prompt))


@pytest.mark.parametrize("telemetry", QUALITIES)
@given(st.integers(0, 10**6), *LOADS)
@settings(max_examples=settings.default.max_examples // 6)
def test_a_plan_keeps_its_target_at_every_smaller_load(telemetry, seed, output, concurrency, prompt):
    """Also where some batches were measured to be faster than smaller ones."""
    assert_plan_keeps_targets(config_of(learned(telemetry, seed, MANY)), prompt, output, concurrency)


def measured_at(shapes, *, prefill):
    """A configuration of these shapes alone: the requests of each, its rows, and how long it takes."""
    document = tree()
    step_time_of(document).update(
        seen=None,
        mean_factor=1.0,
        context_us_per_token=1e-6,
        interval={"p10": 0.9, "p50": 1.0, "p90": 1.1},
        shape_factors={
            name: {"factor": 1.0, "rows": rows, "usual": [prefill, n, 500 * n, us]}
            for name, (n, rows, us) in shapes.items()
        },
    )
    return config_of(document)


@pytest.mark.parametrize(
    ("rows", "us", "fast"), [(400.0, 29_000.0, True), (2.0, 25_500.0, False), (400.0, 30_000.0, False)]
)
def test_a_batch_that_was_measured_to_be_faster_than_smaller_ones_is_told_so_and_no_chance(rows, us, fast):
    """As kernels are for multiples of four. A plan ends before the batches that are slower."""
    measured = {1: 30_000.0, 2: 30_200.0, 3: 30_400.0, 4: us, 5: 30_800.0}
    config = measured_at({f"decode:{n}": (n, rows if n == 4 else MANY, measured[n]) for n in measured}, prefill=0)
    said = [config.request(prompt_tokens=1, output_tokens=4_000, concurrency=n).itl for n in measured]
    assert (said[3].us < 0.96 * said[2].us) == fast
    assert not fast or config.plan(prompt_tokens=1, output_tokens=4_000, itl_ms=29.9).concurrency == 0


@pytest.mark.parametrize("seed", range(3))
def test_on_noisy_rows_of_a_linear_machine_a_plan_follows_its_target(seed):
    """By one request for each 1.5 per cent, as far as a request costs so much."""
    document = tree()
    document["configs"][0]["config"] |= {"max_num_seqs": 1_000, "num_gpu_blocks": 10**6}
    target = told(bank_of(steps(5_000, seed, noise=0.08).rows))
    document["configs"][0]["targets"] = {"step_time": json.loads(msgspec.json.encode(target))}
    config, chat = config_of(document), {"prompt_tokens": 500, "output_tokens": 200}
    times = itl_by_concurrency(config, 200, 500, range(1, 31))
    assert_rising(times)
    targets = [times[3] / 1e3 * 1.015**power for power in range(int(math.log(times[-1] / times[3], 1.015)))]
    planned = [config.plan(**chat, itl_ms=itl_ms).concurrency for itl_ms in targets]
    assert len(planned) > 40
    assert {after - before for before, after in itertools.pairwise(planned)} == {0, 1}


def assert_no_first_token_before_its_step(config, prompts):
    for prompt in prompts:
        budget = config.limits.max_num_batched_tokens or prompt
        step = config.step_time(prefill_tokens=min(prompt, budget), requests=1)
        assert config.request(prompt_tokens=prompt, output_tokens=50, concurrency=1).ttft.us >= NEARLY * step.us


@pytest.mark.parametrize("telemetry", QUALITIES)
@given(st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 4)
def test_the_first_token_takes_at_least_the_step_of_its_prompt(telemetry, seed):
    """By coefficients alone: a step is told as it was measured, a request without what was slow by chance."""
    document = learned(telemetry, seed, FEW)
    step_time_of(document)["shape_factors"] = {}
    assert_no_first_token_before_its_step(config_of(document), PROMPTS)


@pytest.mark.parametrize("odd", [1, 8, 24])
def test_a_batch_with_a_prompt_that_was_slow_by_chance_makes_no_larger_one_as_slow(odd):
    """Four rows of one batch took twice as long; of every other there are thousands, which rise with the batch."""

    def ttft_us(slow):
        shapes = {cell_of(512, n): (n, MANY, 30_000.0 + 20.0 * n) for n in (1, 2, 4, 8, 16, 32, 64)}
        shapes |= {cell_of(512, odd): (odd, 4.0, 60_000.0)} if slow else {}
        return measured_at(shapes, prefill=512).request(prompt_tokens=512, output_tokens=200, concurrency=60).ttft.us

    assert ttft_us(slow=True) < 1.2 * ttft_us(slow=False)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("telemetry", QUALITIES)
def test_nothing_is_faster_where_requests_begin_to_wait_for_a_slot(telemetry, scheduling):
    """Either limit: the KV cache, passed by longer prompts, and the slots, passed by more requests."""
    document = learned(telemetry, 1, FEW, scheduling=scheduling)
    document["configs"][0]["config"] |= {"max_num_seqs": 16, "num_gpu_blocks": 1_000, "block_size": 16}
    del document["configs"][0]["config"]["max_num_batched_tokens"]
    config = config_of(document)
    longer = [config.request(prompt_tokens=each, output_tokens=20, concurrency=12) for each in range(900, 1_800, 10)]
    more = [config.request(prompt_tokens=300, output_tokens=20, concurrency=each / 4) for each in range(48, 100)]
    assert longer[0].running == 12 > longer[-1].running
    assert more[0].running == 12
    assert more[-1].running == 16
    for answers in (longer, more):
        times = [each.ttft.us for each in answers]
        assert min(after / before for before, after in itertools.pairwise(times)) >= NEARLY


RECORDED = ("c2_long_prefill_mp", "c6_saturated", "c8_stock_0.32.0", "c10_long", "m1_pages")


@pytest.mark.parametrize("recording", RECORDED)
def test_more_is_never_faster_on_a_server_that_was_recorded(recording, tmp_path):
    config = client_of(DATA / recording, tmp_path)
    for output, (concurrency, prompt) in itertools.product((20, 200), ((1, 100), (4, 400), (12, 900))):
        assert_rising(ttft_by_prompt(config, output, concurrency))
        assert_plan_keeps_targets(config, prompt, output, concurrency)
