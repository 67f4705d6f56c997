"""A page of counters: what is read of it, and what is not."""

import gzip
import json
import math

import pytest

from collector.decode.pages import Flavour, Meaning, PageProblem, is_page_line, parse_page, read_page_line
from collector.telemetry import PullOutcome
from tests.support.page_server import RECORDED, recorded_pages

PAGES = [page for _, page in recorded_pages()]

VLLM = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 2.0
vllm:kv_cache_usage_perc{model_name="m"} 0.5
vllm:prompt_tokens_total{model_name="m"} 100.0
vllm:generation_tokens_total{model_name="m"} 50.0
vllm:time_to_first_token_seconds_count{model_name="m"} 5.0
vllm:inter_token_latency_seconds_sum{model_name="m"} 1.5
vllm:inter_token_latency_seconds_count{model_name="m"} 45.0
vllm:iteration_tokens_total_count{model_name="m"} 20.0
vllm:request_success_total{finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{finished_reason="length",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",enable_prefix_caching="False"} 1.0
"""

SGLANG = b"""sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_used_tokens{engine_type="unified",model_name="m",tp_rank="0"} 900.0
sglang:prompt_tokens_total{model_name="m"} 4000.0
sglang:generation_tokens_total{model_name="m"} 600.0
sglang:time_to_first_token_seconds_count{model_name="m"} 9.0
sglang:inter_token_latency_seconds_count{model_name="m"} 500.0
sglang:inter_token_latency_seconds_sum{model_name="m"} 10.0
sglang:num_requests_total{model_name="m"} 6.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="0"} 3000.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="1"} 3000.0
sglang:realtime_tokens_total{mode="decode",model_name="m",tp_rank="0"} 600.0
sglang:cuda_graph_passes_total{mode="decode_cuda_graph",model_name="m",tp_rank="0"} 90.0
sglang:cuda_graph_passes_total{mode="decode_none",model_name="m",tp_rank="0"} 5.0
sglang:cuda_graph_passes_total{mode="prefill_none",model_name="m",tp_rank="0"} 7.0
sglang:forward_execution_seconds_total{category="DECODE",model_name="m",tp_rank="0"} 1.5
sglang:forward_execution_seconds_total{category="EXTEND",model_name="m",tp_rank="0"} 0.5
sglang:estimated_flops_per_gpu_total{model_name="m",tp_rank="0"} 3.2e+19
sglang:estimated_read_bytes_per_gpu_total{model_name="m",tp_rank="0"} 4e+16
sglang:estimated_write_bytes_per_gpu_total{model_name="m",tp_rank="0"} 1e+16
"""


def only(page):
    (reading,) = parse_page(page)
    return reading


def test_the_numbers_of_a_real_page_are_read():
    reading = only(PAGES[-1])
    assert (reading.engine, reading.model, reading.flavour) == ("0", "tiny", Flavour.VLLM)
    assert reading.facts == {"block_size": 32, "num_gpu_blocks": 2048, "enable_prefix_caching": True}
    assert reading.values[Meaning.STEPS] == 5844
    assert reading.values[Meaning.STEP_TOKENS] == 169605
    assert reading.values[Meaning.FINISHED] == 792  # over all reasons
    assert reading.values[Meaning.PREFIX_HIT_TOKENS] == 13728
    assert math.isnan(reading.values[Meaning.KV_USED_TOKENS])


def test_a_page_tells_its_numbers_by_their_families_and_facts():
    reading = only(VLLM)
    assert reading.values[Meaning.ITL_COUNT] == 45
    assert reading.values[Meaning.KV_USAGE_RATIO] == 0.5
    assert reading.values[Meaning.FINISHED] == 3
    assert reading.facts == {"block_size": 16, "num_gpu_blocks": 100, "enable_prefix_caching": False}
    assert only(SGLANG).facts == {}
    for page, family in ((VLLM, b"vllm:spec_decode_num_drafts"), (SGLANG, b"sglang:spec_verify_calls")):
        told = only(page).facts | {"speculative_decoding": True}
        assert only(page + family + b'_total{model_name="m"} 0.0\n').facts == told


def counters(reading):
    return reading.values[: Meaning.KV_USED_TOKENS]


def test_a_series_that_stands_there_twice_counts_once():
    turned = PAGES[5].replace(b'engine="0",model_name="tiny"', b'model_name="tiny",engine="0"')
    for again in (PAGES[5], turned):
        assert counters(only(PAGES[5] + again)) == counters(only(PAGES[5]))


def test_sglang_is_read_and_its_ranks_are_not_added_up():
    reading = only(SGLANG)
    assert reading.flavour is Flavour.SGLANG
    assert reading.values[Meaning.RUNNING] == 3
    assert reading.values[Meaning.PREFILL_TOKENS] == 3000
    told = [reading.values[each] for each in (Meaning.STEPS, Meaning.DECODE_STEPS, Meaning.GPU_SECONDS)]
    assert told == [102, 95, 2.0]
    assert [reading.values[each] for each in (Meaning.FLOPS, Meaning.MEMORY_BYTES)] == [3.2e19, 5e16]


def test_engines_of_one_page_are_told_apart():
    second = PAGES[5].replace(b'engine="0"', b'engine="1"')
    readings = parse_page(PAGES[5] + second)
    assert [reading.engine for reading in readings] == ["0", "1"]
    assert counters(readings[0]) == counters(readings[1])


def test_labels_with_braces_quotes_and_timestamps_do_not_confuse():
    odd = PAGES[5].replace(b'model_name="tiny"} 2', b'model_name="a} 9 \\"b"} 2').replace(b".0\n", b".0 1700000000\n")
    assert not isinstance(parse_page(odd), PageProblem)
    assert only(VLLM.replace(b'"m"', b'"a\\"b\\\\n\\nc"')).model == 'a"b\\n\nc'


@pytest.mark.parametrize(
    ("page", "outcome"),
    [
        (b"", PullOutcome.UNEXPECTED),
        (b"<!DOCTYPE html><html>\n", PullOutcome.UNEXPECTED),
        (PAGES[5][:-2], PullOutcome.UNEXPECTED),
        (b"go_goroutines 12\n", PullOutcome.UNEXPECTED),
        (b"x" * (9 * 2**20), PullOutcome.TOO_LARGE),
        (VLLM.replace(b"num_requests_running", b"requests_running_now"), PullOutcome.MISSING_FAMILIES),
        (VLLM.replace(b"} 100.0", b"} NaN"), PullOutcome.UNEXPECTED),
        (VLLM.replace(b"} 100.0", b"} -1.0"), PullOutcome.UNEXPECTED),
        (VLLM.replace(b"} 100.0", b"} many"), PullOutcome.UNEXPECTED),
        (VLLM.replace(b"} 100.0", b"} 1e17"), PullOutcome.UNEXPECTED),
        (VLLM + b"".join(b'vllm:request_success_total{r="%d"} 1\n' % n for n in range(17_000)), PullOutcome.TOO_LARGE),
        (VLLM + b'vllm:cache_config_info{block_size="16"} 1\n' * 17_000, PullOutcome.TOO_LARGE),
        (VLLM.replace(b'"m"', b'"%s"' % (b"x" * 2**20)), PullOutcome.TOO_LARGE),
        (VLLM.replace(b'"m"', b"m"), PullOutcome.UNEXPECTED),
        (SGLANG.replace(b"num_used_tokens", b"tokens_in_use"), PullOutcome.MISSING_FAMILIES),
        (b"".join(PAGES[5].replace(b'"0"', b'"%d"' % n) for n in range(70)), PullOutcome.TOO_LARGE),
    ],
)
def test_what_is_no_page_is_refused_for_a_reason(page, outcome):
    assert parse_page(page).outcome is outcome


def test_a_family_that_went_missing_is_named():
    fault = parse_page(VLLM.replace(b"iteration_tokens", b"iterations"))
    assert fault.lacks == ("vllm:iteration_tokens_total_count",)


def test_a_line_of_a_recording_is_a_page():
    line = gzip.decompress(RECORDED.read_bytes()).splitlines()[3]
    page, entry = read_page_line(line, "file"), json.loads(line)
    assert (page.unix_ns, page.mono_ns, page.recording) == (entry["unix_ns"], entry["sent_mono_ns"], "file")
    far = json.dumps({"unix_ns": 1, "url": "http://" + "h" * 500, "page": entry["page"]}).encode()
    assert is_page_line(line)
    assert is_page_line(far)
    assert read_page_line(b'{"unix_ns": 1, "page": 7}', "file").outcome is PullOutcome.UNEXPECTED
    assert read_page_line(b'{"unix_ns": -1, "page": ""}', "file").outcome is PullOutcome.UNEXPECTED
