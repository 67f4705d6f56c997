"""What the instrumented fork sends, the plugin sends: names and types, from a capture of the fork."""

from __future__ import annotations

import random

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tracefit_vllm.exporter import Exporter
from tracefit_vllm.settings import Settings
from tracefit_vllm.tap import Tap

from tests.plugin.fakes import Request, Scheduler, Status, drive
from tests.support.recordings import payloads

FORK_ONLY = {
    "step.REQUEST_SNAPSHOT": {"kv.blocks_allocated_gpu", "kv.blocks_cached_gpu", "request.effective_prompt_len"}
}


def kinds(requests, source=None):
    """Per scope and event name: the kinds of its attributes; and the spans' names and kinds by scope."""
    events, spans = {}, {}
    for request in requests:
        for resource_spans in request.resource_spans:
            sources = {a.key for a in resource_spans.resource.attributes}
            if source == "fork" and "telemetry.source" in sources:
                continue
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    spans.setdefault(scope_spans.scope.name, set()).add((span.name.rstrip("0123456789"), span.kind))
                    for event in span.events:
                        found = events.setdefault((scope_spans.scope.name, event.name), {})
                        found.update({a.key: a.value.WhichOneof("value") for a in event.attributes})
    return events, spans


def test_every_event_of_the_forks_engine_core_is_sent_with_the_same_attributes_and_types(receiver):
    sent = [ExportTraceServiceRequest.FromString(payload) for payload in payloads("f1_fork_parity")]
    fork_events, fork_spans = kinds(sent, "fork")
    scheduler = Scheduler(blocks=20)
    settings = Settings(target=receiver.target, interval_s=0.02, snapshot_sample=1.0)
    assert Tap(scheduler, settings, Exporter(settings, {}), random.Random(1)).attach()
    for number in range(4):
        scheduler.add_request(Request(f"r{number}", 60, 40))
    drive(scheduler, 5)
    scheduler.finish_requests("r3", Status.FINISHED_ABORTED)
    drive(scheduler, 200)
    scheduler.shutdown()
    receiver.wait(lambda r: len(r.spans("vllm.scheduler")) == 4)
    our_events, our_spans = kinds(receiver.requests)
    core = {key: found for key, found in fork_events.items() if key[0] in ("vllm.scheduler", "vllm.scheduler.step")}
    assert len(core) >= 5
    for (scope, name), found in core.items():
        ours = our_events[scope, name]
        missing = set(found.items()) - set(ours.items())
        assert {key for key, _ in missing} <= FORK_ONLY.get(name, set()), (scope, name)
    for scope in ("vllm.scheduler", "vllm.scheduler.step"):
        assert our_spans[scope] == fork_spans[scope]
