"""The three ways of docs/deploy.md to learn from spans and keep them where they are looked at."""

import re
from functools import cache

import yaml
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from tests.support.clocks import eventually
from tests.support.gpu_server import step_payloads
from tests.support.otlp_backend import Backend
from tests.support.page_server import PageServer, recorded_pages
from tests.support.paths import ROOT
from tests.support.sidecars import call_export, metric, running_sidecar

SECTION = (ROOT / "docs" / "deploy.md").read_text().split("## Traces that go on")[1].split("\n## ")[0]
FORWARD, COLLECTOR, BESIDE = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL))
SOON = {"IDLE_TIMEOUT_S": "1", "ALLOWED_LATENESS_S": "0.5", "MODEL": "m"}


@cache
def steps():
    return step_payloads(8)


def send_spans(port, count):
    """As an application with the real SDK does."""
    provider = TracerProvider()
    exporter = OTLPSpanExporter(f"http://127.0.0.1:{port}", insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=max(count, 512)))
    for number in range(count):
        provider.get_tracer("app").start_span(f"span {number}").end()
    provider.shutdown()


def names(backend):
    """Scope and name of each span that arrived, in order."""
    return [
        (scope.scope.name, span.name)
        for payload in backend.traces()
        for resource in ExportTraceServiceRequest.FromString(payload).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def learned(sidecar):
    snapshot = sidecar.snapshot()
    return [config.telemetry for config in snapshot.configs if "step_time" in config.targets] if snapshot else []


def test_spans_go_through_to_the_backend_while_steps_are_learned_and_stay(tmp_path):
    assert FORWARD["forward"].startswith("grpc://")
    with Backend() as backend, running_sidecar(tmp_path, FORWARD=f"grpc://127.0.0.1:{backend.port}", **SOON) as sidecar:
        for payload in steps():
            call_export(sidecar.grpc_port, payload)
        send_spans(sidecar.grpc_port, 1000)
        eventually(lambda: metric(sidecar.http_port, 'tracefit_forward_spans_total{outcome="sent"}') == 1000)
        eventually(lambda: learned(sidecar) == ["steps+"])
    assert names(backend) == [("app", f"span {number}") for number in range(1000)]


def test_a_collector_sends_everything_to_tracefit_and_what_it_keeps_to_the_backend():
    pipelines = COLLECTOR["service"]["pipelines"]
    to_tracefit, kept = pipelines["traces/learn"], pipelines["traces/keep"]
    assert to_tracefit["receivers"] == kept["receivers"]
    assert not to_tracefit.get("processors"), "nothing is sampled before it is learned"
    assert any("sampling" in name for name in kept["processors"])
    exporter = COLLECTOR["exporters"][to_tracefit["exporters"][0]]
    assert exporter["sending_queue"]["enabled"], "an error must not reach vLLM, which would send the same again"
    assert int(exporter["retry_on_failure"]["max_elapsed_time"].removesuffix("s")) <= 60
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines.values() for name in pipeline.get(kind, ())}
        assert used == set(COLLECTOR[kind]), "what is defined is used, and the other way round"


def test_beside_an_untouched_endpoint_plugin_and_page_are_learned_from(tmp_path):
    assert {"listen", "scrape"} == set(BESIDE)
    with (
        Backend() as backend,
        PageServer(lambda _path, _elapsed_s: (200, {}, recorded_pages()[-1][1])) as server,
        running_sidecar(tmp_path, SCRAPE=server.url, **SOON) as sidecar,
    ):
        send_spans(backend.port, 10)
        for payload in steps():
            call_export(sidecar.grpc_port, payload)
        eventually(lambda: "steps+" in learned(sidecar))
        eventually(lambda: metric(sidecar.http_port, 'tracefit_scrape_pages_total{of="counters",outcome="read"}') > 0)
    assert {scope for scope, _ in names(backend)} == {"app"}
