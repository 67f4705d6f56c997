"""An engine that has nothing to do: the time is no stall, whether or not its empty step was sent."""

import random

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import tracefit
from collector.commands.replay import replay
from collector.config.schema import Config
from collector.runtime.tasks import SystemClock
from tests.support.clocks import T0_NS
from tests.support.step_exports import attribute, step_attributes, write_recording

BURSTS, DECODES, IDLE_NS = 160, 12, 900_000_000


def lone_requests(*, with_empty_steps, told_finished):
    """One request after the other with nothing to do between them; what every step took is 8 ms + 40 us a token."""
    draw = random.Random(4)
    export = ExportTraceServiceRequest()
    resource = export.resource_spans.add()
    resource.resource.attributes.append(attribute("service.instance.id", "engine-0"))
    scope = resource.scope_spans.add()
    scope.scope.name = "vllm.scheduler.step"
    span = scope.spans.add(
        name="scheduler_steps_1", trace_id=bytes([1] * 16), span_id=bytes([1] * 8), start_time_unix_nano=T0_NS
    )
    now_ns, number, ended = 10**12, 0, 0

    def add(elapsed_us, prefill, decodes, context):
        nonlocal now_ns, number, ended
        number += 1
        done_ns = now_ns + round(1e3 * elapsed_us * draw.uniform(0.99, 1.01))
        busy = prefill > 0 or decodes > 0
        event = span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=T0_NS + now_ns + 90_000)
        said = step_attributes(number) | {
            "step.ts_start_ns": now_ns,
            "step.ts_end_ns": now_ns + 90_000,
            "step.ts_done_ns": done_ns,
            "queue.running_depth": int(busy),
            "batch.num_prefill_reqs": int(prefill > 0),
            "batch.num_decode_reqs": decodes,
            "batch.scheduled_tokens": prefill + decodes,
            "batch.prefill_tokens": prefill,
            "batch.decode_tokens": decodes,
            "batch.num_finished": ended if told_finished else 0,
            "batch.context_tokens": context + prefill,
            "batch.context_tokens_single": context,
            "batch.context_tokens_multi": prefill,
            "batch.num_multi_reqs": int(prefill > 0),
            "batch.multi_tokens": prefill,
            "batch.attn_pairs": context + prefill * (prefill + 1) // 2,
        }
        event.attributes.extend(attribute(key, value) for key, value in said.items())
        now_ns, ended = done_ns + 20_000, 0

    for _ in range(BURSTS):
        prompt = draw.randrange(20, 600)
        add(8_000.0 + 40.0 * prompt, prompt, 0, 0)
        for decoded in range(DECODES):
            add(8_000.0 + 0.5 * (prompt + decoded), 0, 1, prompt + decoded)
        ended = 1
        if with_empty_steps:
            add(40.0, 0, 0, 0)
        now_ns += IDLE_NS
    span.end_time_unix_nano = T0_NS + now_ns
    return export


@pytest.mark.parametrize("told_finished", [True, False])
@pytest.mark.parametrize("with_empty_steps", [True, False])
def test_idle_time_between_requests_is_no_stall(tmp_path, with_empty_steps, told_finished):
    export = lone_requests(with_empty_steps=with_empty_steps, told_finished=told_finished)
    recording = write_recording(tmp_path / "otlp.pb.gz", export)
    replay([recording], tmp_path / "out.json", Config(learners=("rls",)), SystemClock())
    config = tracefit.load(tmp_path / "out.json").config()
    assert config.telemetry == "steps+"
    assert config.targets["step_time"].mean_factor == pytest.approx(1.0, abs=0.02)


def _quiet(_text):
    pass
