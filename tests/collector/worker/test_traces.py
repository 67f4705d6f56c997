"""The trace behind a drift: the span batch that held the row."""

from __future__ import annotations

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from collector.config.schema import Config
from collector.receive.intake import Export
from collector.worker.build import make_pipeline
from collector.worker.traces import PROCESSES_MAX, SPACING_NS, TRACES_MAX, TraceLog
from exporters.prometheus.exposition import MetricsPage
from online.snapshot import DriftSnapshot, EngineSnapshot
from tests.support import exporter_cases as cases
from tests.support.clocks import T0_NS
from tests.support.step_exports import STEP_US, make_export

PER_SPAN, CHANGE_AT, STEPS = 100, 2000, 6000


def slower_from(step, request):
    """The same steps, but from ``step`` on each takes twice as long."""
    for resource in request.resource_spans:
        for span in resource.scope_spans[0].spans:
            for event in span.events:
                values = {attribute.key: attribute.value for attribute in event.attributes}
                late_ns = max(0, values["step.id"].int_value - step) * STEP_US * 1000
                event.time_unix_nano += late_ns
                for key in ("step.ts_start_ns", "step.ts_end_ns"):
                    values[key].int_value += late_ns
            span.end_time_unix_nano = event.time_unix_nano + 1
    return request


def test_a_drift_leads_to_the_span_batch_with_its_rows():
    pipeline = make_pipeline(Config(learners=("rls",)))
    ends = {}
    for first in range(1, STEPS, PER_SPAN):
        request = slower_from(CHANGE_AT, make_export(steps_per_span=PER_SPAN, first_step=first))
        span = request.resource_spans[0].scope_spans[0].spans[0]
        ends[span.trace_id.hex()] = span.end_time_unix_nano
        pipeline.process([Export(request.SerializeToString(), "peer", "grpc", 1)])
    pipeline.flush()
    snapshot = pipeline.snapshot(T0_NS, 1)
    (config,) = snapshot.configs
    drift = config.targets["step_time"].drift
    assert drift.count == 1
    trace_id = pipeline.exemplars[config.config_id, "step_time"]
    late_ns = ends[trace_id] - drift.last_unix_nano
    assert 0 <= late_ns <= SPACING_NS + 2 * PER_SPAN * STEP_US * 1000
    page = MetricsPage(
        CollectorRegistry(), lambda: snapshot, exemplar_of=lambda *key: pipeline.exemplars.get(key)
    ).render("application/openmetrics-text")
    assert f'trace_id="{trace_id}"'.encode() in page.body


def drifted(when_ns, instance="vllm-0", config_id="0f3c52aa9b1e"):
    drift = DriftSnapshot(last_unix_nano=when_ns, gain=1.2, count=1)
    config = cases.config(config_id, targets={"step_time": replace(cases.target("step_time"), drift=drift)})
    return replace(config, engines=[EngineSnapshot(instance=instance, scheduling="sync", last_step=1)])


def trace(number):
    return number.to_bytes(16, "big")


def test_what_was_found_stays_when_the_log_has_forgotten_it():
    log = TraceLog()
    log.record("vllm-0", [(second * SPACING_NS, trace(second)) for second in range(1, 10)])
    found = {("0f3c52aa9b1e", "step_time"): trace(5).hex()}
    assert log.exemplars([drifted(5 * SPACING_NS - 1)]) == found
    log.record("vllm-0", [(second * SPACING_NS, trace(second)) for second in range(10, 10 + TRACES_MAX)])
    assert log.exemplars([drifted(5 * SPACING_NS - 1)]) == found
    assert log.exemplars([]) == {}


def test_the_log_is_bounded_in_processes_and_traces():
    log = TraceLog()
    for number in range(PROCESSES_MAX * 2):
        log.record(f"vllm-{number}", [(second * SPACING_NS, trace(second)) for second in range(1, 5)])
    log.record("vllm-0", [(second * SPACING_NS // 10, trace(second)) for second in range(1, TRACES_MAX * 100)])
    assert len(log._spans) == PROCESSES_MAX
    assert max(map(len, log._spans.values())) == TRACES_MAX
