"""What a page says of the time outside of the steps is forgotten like everything else, and has a band."""

import gzip
import json

import pytest

import tracefit
from collector.commands.replay import replay
from collector.config.schema import Config
from collector.runtime.tasks import SystemClock

STEP_S, DECODING, BEFORE_MS, AFTER_MS = 0.02, 4, 140.0, 40.0
SCATTER = (0.6, 1.3, 0.9, 1.2, 1.0)
MINUTES = 60


def pages(own_ms_by_minute):
    """A scrape every second of a server that runs without a pause; its API takes so long, give or take a half."""
    steps = requests = 0
    own_s = 0.0
    for second in range(60 * MINUTES):
        steps += round(1.0 / STEP_S)
        requests += 2
        own_s += 2e-3 * own_ms_by_minute(second // 60) * SCATTER[second // 20 % len(SCATTER)] + 2 * STEP_S / 2.0
        generated = steps * DECODING
        values = {
            "num_requests_running": DECODING,
            "num_requests_waiting": 0,
            "num_preemptions_total": 0,
            "prompt_tokens_total": 100 * (requests + DECODING),
            "generation_tokens_total": generated,
            "iteration_tokens_total_sum": generated + 100 * (requests + DECODING),
            "iteration_tokens_total_count": steps,
            "time_to_first_token_seconds_count": requests + DECODING,
            "inter_token_latency_seconds_sum": generated * STEP_S,
            "inter_token_latency_seconds_count": generated,
            'inter_token_latency_seconds_bucket{le="0.01"}': 0,
            'inter_token_latency_seconds_bucket{le="0.03"}': generated,
            'inter_token_latency_seconds_bucket{le="+Inf"}': generated,
            "e2e_request_latency_seconds_sum": 2.0 * requests + own_s,
            "e2e_request_latency_seconds_count": requests,
            "request_queue_time_seconds_sum": 0.5 * requests,
            "request_inference_time_seconds_sum": 1.5 * requests,
            "request_success_total": requests,
            "request_prompt_tokens_sum": 100 * requests,
            "request_generation_tokens_sum": 100 * requests,
        }
        lines = []
        for name, value in values.items():
            family, _, rest = name.partition("{")
            labels = 'engine="0",model_name="m"' + ("," + rest.rstrip("}") if rest else "")
            lines.append(f"vllm:{family}{{{labels}}} {float(value)}")
        at_ns = (second + 1) * 10**9
        yield {
            "unix_ns": 1_790_000_000 * 10**9 + at_ns,
            "sent_mono_ns": at_ns,
            "got_mono_ns": at_ns + 2_000_000,
            "page": "\n".join(lines) + "\n",
        }


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """After an hour, in the second half of which the API was faster."""
    directory = tmp_path_factory.mktemp("pages")
    recording = directory / "pages.jsonl.gz"
    with gzip.open(recording, "wt", compresslevel=1) as file:
        for page in pages(lambda minute: BEFORE_MS if minute < MINUTES / 2 else AFTER_MS):
            file.write(json.dumps(page) + "\n")
    replay([recording], directory / "out.json", Config(), SystemClock(), say=_quiet, note=_quiet)
    return tracefit.load(directory / "out.json").configs[0]


def _quiet(_text):
    pass


def test_what_was_long_ago_hardly_counts(config):
    (intercept,) = config.coefficients("api_queueing")
    lifetime_us = 1e3 * (BEFORE_MS + AFTER_MS) / 2.0
    assert intercept.value < 0.75 * lifetime_us
    assert intercept.value == pytest.approx(1e3 * AFTER_MS, rel=0.5)
    assert intercept.stderr > 0.0


def test_the_time_to_the_first_token_has_its_band(config):
    answer = config.request(prompt_tokens=100, output_tokens=100, concurrency=1)
    alone = config.step_time(prefill_tokens=100, requests=1)
    (intercept,) = config.coefficients("api_queueing")
    assert answer.ttft.high - alone.high > 1.2 * intercept.value
    assert answer.ttft.low - alone.low < 0.9 * intercept.value
