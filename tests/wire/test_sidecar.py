"""The whole sidecar, in this process, on real ports."""

import re
import subprocess

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from online import Bank
from online.state import LEARNERS, decode, encode
from tests.support.clocks import T0_NS, eventually
from tests.support.sidecars import as_json, ask, call_export, get, metric, running_sidecar
from tests.support.step_exports import STEP_US, make_export, step_attributes

STEPS, PROBES = 400, ("/healthz", "/readyz")
SOON = {"JOIN_TIMEOUT_S": "1", "ALLOWED_LATENESS_S": "0"}


def test_what_a_real_sdk_exporter_sends_is_counted_and_learned(tmp_path):
    provider = TracerProvider(
        resource=Resource.create({"service.instance.id": "engine-0", "vllm.model": "tiny"}),
        span_limits=SpanLimits(max_events=20_000),
    )
    with running_sidecar(tmp_path) as sidecar:
        exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{sidecar.grpc_port}", insecure=True)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = provider.get_tracer("vllm.scheduler.step")
        for first in range(1, STEPS, 100):
            span = tracer.start_span(f"scheduler_steps_{first}", start_time=T0_NS + first * STEP_US * 1000)
            for step in range(first, first + 100):
                span.add_event("step.BATCH_SUMMARY", step_attributes(step), T0_NS + step * STEP_US * 1000)
            span.end(end_time=T0_NS + (first + 100) * STEP_US * 1000)
        assert provider.force_flush(10_000)
        provider.shutdown()
        assert (
            metric(sidecar.http_port, 'tracefit_receiver_spans_total{outcome="accepted",transport="grpc"}')
            == STEPS / 100
        )
        eventually(lambda: metric(sidecar.http_port, 'tracefit_decode_events_total{outcome="accepted"}') == STEPS)
        assert metric(sidecar.http_port, 'tracefit_size_bytes{of="queue"}') == 0
    (config,) = as_json(tmp_path / "snapshot.json")["configs"]
    step_time = config["targets"]["step_time"]
    assert step_time["models"]["portable"]["rows"] >= STEPS - 2
    assert step_time["mean_us"] == pytest.approx(STEP_US)


def test_live_pages_show_what_was_learned_promtool_accepts_theirs_and_probes_tell_of_the_end(tmp_path, promtool):
    with running_sidecar(tmp_path, **SOON) as sidecar:
        assert b"Waiting for telemetry" in get(sidecar.http_port, "/")
        send_steps(sidecar)
        eventually(lambda: sidecar.snapshot() is not None)
        page, status = get(sidecar.http_port, "/metrics"), get(sidecar.http_port, "/").decode()
        config_id = sidecar.snapshot().configs[0].config_id
        assert [ask(sidecar.http_port, path)[0] for path in PROBES] == [200, 200]
        sidecar.health.set_serving(False)
        assert [ask(sidecar.http_port, path)[0] for path in PROBES] == [200, 503], "a draining process is alive"
        assert b"starts or stops" in ask(sidecar.http_port, "/readyz")[2]
    for family in (b"receiver_spans_total", b"build_info", b"coefficient"):
        assert b"tracefit_" + family in page
    assert b"process_resident_memory_bytes" in page
    assert not re.search(rb"_created[ {]", page)
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for words in (config_id, "rows learned", '<span class="state ok">ready</span>'):
        assert words in status


def send_steps(sidecar):
    """400 steps."""
    for first in range(1, 400, 100):
        call_export(sidecar.grpc_port, make_export(steps_per_span=100, first_step=first).SerializeToString())


def test_what_was_learned_can_be_fetched_as_a_state_where_that_is_switched_on(tmp_path):
    (tmp_path / "tokens").write_text("0123456789abcdef\n")
    with running_sidecar(tmp_path / "off") as sidecar:
        assert ask(sidecar.http_port, "/state")[0] == 404
    overrides = {
        "PAGES_STATE": "true",
        "PAGES_TOKEN_FILE": str(tmp_path / "tokens"),
        "CHECKPOINT_INTERVAL_S": "0.1",
        **SOON,
    }
    bearer = {"Authorization": "Bearer 0123456789abcdef"}
    with running_sidecar(tmp_path / "on", **overrides) as sidecar:
        assert ask(sidecar.http_port, "/state")[0] == 401
        assert ask(sidecar.http_port, "/state", **bearer)[0] == 503, "nothing has been written yet"
        send_steps(sidecar)
        eventually(lambda: ask(sidecar.http_port, "/state", **bearer)[0] == 200)
    with running_sidecar(tmp_path / "on", **overrides) as sidecar:
        status, headers, body = ask(sidecar.http_port, "/state", **bearer)
        assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
    whole, learned = decode((tmp_path / "on" / "state.bin").read_bytes()), decode(body)
    assert encode(learned[LEARNERS]) == encode(whole[LEARNERS])
    bank = Bank(sidecar.config)
    bank.restore(body)
    assert bank.lineages[bank.configs()[0]].engines
