"""The load of the last minute: what requests were like, whom they met, and that hostile numbers leave it alone."""

import msgspec
import numpy as np
import pytest

from collector.decode import Export, Telemetry
from collector.recordings import Recording
from collector.service.load import RecentLoad
from exporters.what_if import Advisory
from tests.support import exporter_cases as cases
from tests.support.gpu_server import request_exports, serve
from tests.support.page_server import RECORDED
from tests.support.pipelines import EVERY_REQUEST, new_pipeline
from tests.support.recordings import otlp_file, recording
from tests.support.step_exports import make_export
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import columns_of, core_of, spans_in, stock_of
from tests.support.vllm_scheduler import Traffic

NOW = 1_800_000_000 * 10**9
CONFIG = cases.config()  # one engine, vllm-0


def stock(count=10):
    given = {"prompt": 300, "outputs": 101, "ttft_s": 0.25, "decode_s": 2.0, "queue_s": 0.05, "prefill_s": 0.15}
    spans = [stock_of(f"r{number}", number * 0.5, **given) for number in range(count)]
    return Telemetry("vllm-0", {}, requests=spans)


def mix_after(*telemetry, config=CONFIG):
    load = RecentLoad(1)
    for each in telemetry:
        load.record(each)
    return load.workloads([config], NOW).get(config.config_id)


def test_an_engine_that_tells_everything():
    run = run_engine(many_jobs(60, spacing=3), budget=256)
    steps, cores = columns_of(run), [core_of(run, job) for job in run.jobs]
    mix = mix_after(Telemetry("vllm-0", {}, steps=steps, core=cores))
    assert mix.prompt_tokens == pytest.approx(np.mean([job.prompt for job in run.jobs]), rel=0.02)
    assert mix.output_tokens == pytest.approx(np.mean([job.outputs for job in run.jobs]), rel=0.02)
    decodes = run.truth("batch.num_decode_reqs")
    there = run.truth("queue.running_depth") + run.truth("queue.waiting_depth")
    assert mix.concurrency == pytest.approx((decodes * there).sum() / decodes.sum(), rel=0.2)
    waits = [job.ns_of("FIRST_TOKEN") - job.ns_of("QUEUED") for job in run.jobs]
    assert mix.ttft_us == pytest.approx(np.mean(waits) / 1e3, rel=0.02)
    decoding = sum(job.ns_of("FINISHED") - job.ns_of("FIRST_TOKEN") for job in run.jobs)
    assert mix.itl_us == pytest.approx(decoding / 1e3 / sum(job.outputs - 1 for job in run.jobs), rel=0.02)
    assert mix.prefix_hit == pytest.approx(0.0, abs=1e-9)
    halved = steps.copy()
    halved["prefill_tokens"] //= 2
    for quality, hit in (("steps", 0.5), ("sampled", 0.0)):
        config = msgspec.structs.replace(CONFIG, telemetry=quality)
        mix = mix_after(Telemetry("vllm-0", {}, steps=halved, core=cores), config=config)
        assert mix.prefix_hit == pytest.approx(hit, abs=0.05), "what was never computed, where all steps are told"


def test_requests_alone_tell_whom_each_of_them_met():
    mix = mix_after(stock(20))
    assert (mix.prompt_tokens, mix.output_tokens) == pytest.approx((300, 101))
    assert mix.itl_us == pytest.approx(20_000)
    assert mix.ttft_us == pytest.approx(200_000)
    arrivals_s = np.arange(20) * 0.5
    at_s = np.arange(0.0, 12.0, 0.001)[:, None] + 0.0005
    running = ((arrivals_s + 0.05 < at_s) & (at_s < arrivals_s + 2.2)).sum(axis=1)
    in_flight = ((arrivals_s < at_s) & (at_s < arrivals_s + 2.2)).sum(axis=1)
    decoding = running * 0.5 ** ((11.7 - at_s[:, 0]) / 30.0)
    assert mix.running == pytest.approx((decoding * running).sum() / decoding.sum(), rel=0.01)
    assert mix.concurrency == pytest.approx((decoding * in_flight).sum() / decoding.sum(), rel=0.01)
    assert mix.prefix_hit == pytest.approx(0.0), "their spans do not tell it"
    cached = [msgspec.structs.replace(span, cached_tokens=75) for span in stock(20).requests]
    assert mix_after(Telemetry("vllm-0", {}, requests=cached)).prefix_hit == pytest.approx(0.25)


@pytest.mark.parametrize(("machine", "size", "every_s"), [("llama8b-h100", 120, 15), ("qwen30a3-h200", 150, 30)])
def test_itl_is_predicted_where_request_spans_come_of_bursts_beyond_capacity(machine, size, every_s):
    """Nobody meets the idle engine between them. A closed loop of as many has more prompts while it decodes."""
    traffic = Traffic(5)
    for burst_s in range(1, 180, every_s):
        for _ in range(size):
            traffic.send(int((burst_s + 0.3 * traffic.rng.random()) * 1e9), *traffic.sizes(700, 150, 0.5))
    engine = serve(machine, 180.0, 3, traffic=traffic)
    pipeline = new_pipeline(**EVERY_REQUEST)
    for export in request_exports(machine, engine):
        pipeline.process([Export(export, machine, spans_in(export), machine)])
    pipeline.flush()
    view = view_of(pipeline)
    assert view.predicted.itl_us == pytest.approx(view.workload.itl_us, rel=0.2)


@pytest.mark.parametrize("name", ["c10_long", "c7_async_sim"])
def test_itl_is_predicted_as_it_was_observed_as_far_as_steps_scatter(name):
    """Of loads that differ from minute to minute, of which one in four may be beyond, and of asynchronous steps."""
    pipeline, exports = new_pipeline(), recording(otlp_file(name))
    parts, found = (4 if name == "c10_long" else 1), []
    for part in range(parts):
        pipeline.process(exports[len(exports) * part // parts : len(exports) * (part + 1) // parts])
        if part == parts - 1:
            pipeline.flush()
        found.append(mix_as_predicted(pipeline))
    assert [is_inside for _, _, is_inside in found].count(False) <= parts // 4
    assert np.mean([ratio for _, ratio, _ in found]) == pytest.approx(1.0, abs=0.05)


def view_of(pipeline):
    """What is said of the load of the only configuration."""
    snapshot = pipeline.snapshot(NOW, 1)
    (config,) = snapshot.configs
    return Advisory(pipeline.workload_of).of(snapshot, config)


def mix_as_predicted(pipeline):
    """The mix of the only configuration; observed ITL by predicted ITL; whether that is as of 8 of 10 steps."""
    view = view_of(pipeline)
    usual = pipeline.snapshot(NOW, 1).configs[0].targets["step_time"].interval
    ratio = view.workload.itl_us / view.predicted.itl_us
    return view.workload, ratio, usual.p10 <= ratio <= usual.p90


def test_what_a_server_was_asked_before_it_fell_silent_is_forgotten():
    load = RecentLoad(1)
    for name in ("vllm-0", "its API process"):
        load.record(msgspec.structs.replace(stock(), instance=name, arrived_unix_ns=NOW))
    assert load.workloads([CONFIG], NOW)
    assert load.workloads([CONFIG], NOW + 4 * 60 * 10**9)
    assert not load.workloads([CONFIG], NOW + 5 * 60 * 10**9)
    steps = columns_of(run_engine(many_jobs(5)))
    steps["unix_ns"] += NOW
    assert mix_after(Telemetry("vllm-0", {}, steps=steps), stock()) is None, "nothing was asked of those that run"


def test_the_load_of_senders_without_a_place_is_not_kept_and_replaces_nobodys():
    pipeline = new_pipeline(engines_max=1)
    for name in ("engine", "stranger", "another"):
        pipeline.process([Export(make_export(instance=name).SerializeToString(), "", 1)])
    assert pipeline.revision[-1] == 1, "processes whose load is known"


def test_a_recorded_page_alone_tells_the_load_of_its_requests():
    pipeline = new_pipeline()
    for timed in Recording(RECORDED, print):
        pipeline.process(pages=[timed.item])
    mix, _, is_inside = mix_as_predicted(pipeline)
    assert is_inside
    # what the clients of the recording counted and timed
    assert mix.prompt_tokens == pytest.approx(185.0, rel=0.05)
    assert mix.output_tokens == pytest.approx(46.5, rel=0.05)
    assert mix.itl_us == pytest.approx(60_011, rel=0.05)
    assert 2.7e5 < mix.ttft_us < 5.7e5
    assert 0.05 < mix.prefix_hit < 21.4 / 185
    assert 8 < mix.concurrency < 16
