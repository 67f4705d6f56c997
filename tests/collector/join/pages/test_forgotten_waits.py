"""What a page says of the time outside of the steps is forgotten like everything else, and has a band."""

import math

import pytest

import tracefit
from collector.decode.pages import EngineReading, Flavour, Meaning, ScrapedPage
from tests.support.pipelines import new_pipeline

STEP_S, DECODING, BEFORE_MS, AFTER_MS = 0.02, 4, 140.0, 40.0
SCATTER = (0.6, 1.3, 0.9, 1.2, 1.0)
CHANGED, SECONDS = 800, 2400


def pages():
    """A scrape every second of a server that never pauses; its API, of late faster, takes now more and now less."""
    own_s = 0.0
    for second in range(1, SECONDS + 1):
        api_ms = BEFORE_MS if second < CHANGED else AFTER_MS
        own_s += 2e-3 * api_ms * SCATTER[second // 20 % len(SCATTER)] + 2 * STEP_S / 2.0
        steps, requests = round(second / STEP_S), 2 * second
        begun, generated = requests + DECODING, steps * DECODING
        counted = {
            Meaning.RUNNING: DECODING,
            Meaning.WAITING: 0,
            Meaning.PREEMPTIONS: 0,
            Meaning.PROMPT_TOKENS: 100 * begun,
            Meaning.GENERATED_TOKENS: generated,
            Meaning.STEP_TOKENS: generated + 100 * begun,
            Meaning.STEPS: steps,
            Meaning.FIRST_TOKENS: begun,
            Meaning.ITL_COUNT: generated,
            Meaning.ITL_SECONDS: generated * STEP_S,
            Meaning.ITL_SECONDS_SQUARED: generated * STEP_S**2,
            Meaning.E2E_COUNT: requests,
            Meaning.E2E_SECONDS: 2.0 * requests + own_s,
            Meaning.QUEUE_SECONDS: 0.5 * requests,
            Meaning.INFERENCE_SECONDS: 1.5 * requests,
            Meaning.FINISHED: requests,
            Meaning.FINISHED_PROMPT_TOKENS: 100 * requests,
            Meaning.FINISHED_GENERATED_TOKENS: 100 * requests,
        }
        values = tuple(float(counted.get(meaning, math.nan)) for meaning in Meaning)
        at_ns = second * 10**9
        yield ScrapedPage("s", 10**18 + at_ns, at_ns, (EngineReading("0", "m", Flavour.VLLM, values, {}),))


@pytest.fixture(scope="module")
def config():
    pipeline = new_pipeline()
    for page in pages():
        pipeline.process(pages=[page])
    pipeline.flush()
    return tracefit.load(pipeline.snapshot(0, 1).to_json()).configs[0]


def test_what_was_long_ago_hardly_counts(config):
    (intercept,) = config.coefficients("api_queueing")
    lifetime_us = 1e3 * (BEFORE_MS * CHANGED + AFTER_MS * (SECONDS - CHANGED)) / SECONDS
    assert intercept.value < 0.75 * lifetime_us
    assert intercept.value == pytest.approx(1e3 * AFTER_MS, rel=0.5)
    assert intercept.stderr > 0.0


def test_the_time_to_the_first_token_has_its_band(config):
    answer = config.request(prompt_tokens=100, output_tokens=100, concurrency=1)
    alone = config.step_time(prefill_tokens=100, requests=1)
    (intercept,) = config.coefficients("api_queueing")
    assert answer.ttft.high - alone.high > 1.2 * intercept.value
    assert answer.ttft.low - alone.low < 0.9 * intercept.value
