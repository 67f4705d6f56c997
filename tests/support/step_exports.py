"""Exports of one steadily decoding engine, and the files they are recorded in."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

from google.protobuf.internal.encoder import _VarintBytes
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from tests.support.clocks import T0_NS

STEP_US = 20_000


KINDS = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value", bytes: "bytes_value"}


def attribute(key: str, value: object) -> KeyValue:
    return KeyValue(key=key, value={KINDS[type(value)]: value})


def put(node, attributes) -> None:
    """Give a span, an event or a resource its attributes; a third of the time that copies of messages take."""
    for key, value in attributes.items():
        node.attributes.add(key=key, value={KINDS[type(value)]: value})


def scope_in(request: ExportTraceServiceRequest, facts, name: str = "vllm.scheduler.step") -> ScopeSpans:
    """An empty scope of a resource with these attributes."""
    resource = request.resource_spans.add()
    put(resource.resource, facts)
    scope = resource.scope_spans.add()
    scope.scope.name = name
    return scope


def step_attributes(step: int, **changes: object) -> dict[str, object]:
    """A decode-only step of one busy engine: two requests, one step every STEP_US."""
    start_ns = 10**12 + step * STEP_US * 1000
    return {
        "step.id": step,
        "step.ts_start_ns": start_ns,
        "step.ts_end_ns": start_ns + 90_000,
        "step.duration_us": 90,
        "queue.running_depth": 2,
        "queue.waiting_depth": 0,
        "batch.num_prefill_reqs": 0,
        "batch.num_decode_reqs": 2,
        "batch.scheduled_tokens": 2,
        "batch.prefill_tokens": 0,
        "batch.decode_tokens": 2,
        "batch.num_finished": 0,
        "batch.num_preempted": 0,
        "kv.usage_gpu_ratio": 0.25,
        "kv.blocks_total_gpu": 100,
        "kv.blocks_free_gpu": 75,
        "batch.context_tokens": 400 + step % 7,
        "batch.context_tokens_single": 400 + step % 7,
        "batch.context_tokens_multi": 0,
        "batch.num_multi_reqs": 0,
        "batch.multi_tokens": 0,
        **changes,
    }


def make_export(
    spans: int = 1,
    *,
    steps_per_span: int = 10,
    first_step: int = 1,
    instance: str = "engine-0",
    begin_ns: int = T0_NS,
) -> ExportTraceServiceRequest:
    """Step spans with consecutive steps, span ids unique per first step."""
    request = ExportTraceServiceRequest()
    scope = scope_in(request, {"service.instance.id": instance})
    for index in range(spans):
        step = first_step + index * steps_per_span
        span = scope.spans.add(
            name=f"scheduler_steps_{index + 1}",
            trace_id=step.to_bytes(16, "big"),
            span_id=step.to_bytes(8, "big"),
            start_time_unix_nano=begin_ns + step * STEP_US * 1000,
            end_time_unix_nano=begin_ns + (step + steps_per_span) * STEP_US * 1000,
        )
        for number in range(step, step + steps_per_span):
            event = span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=begin_ns + number * STEP_US * 1000)
            put(event, step_attributes(number))
    return request


def every_kind_of_value() -> ExportTraceServiceRequest:
    """An export with all that OTLP's JSON has a rule for."""
    request = make_export(steps_per_span=1)
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.parent_span_id, span.kind, span.dropped_events_count, span.flags = b"12345678", 2, 7, 0x300
    span.status.code, span.status.message = 2, "why"
    for value in (True, False, 0, -1, 2**63 - 1, 1.5, float("inf"), "", "ü", b"\x00\xff"):
        span.attributes.append(attribute("key", value))
    nested = span.attributes.add(key="nested").value
    nested.kvlist_value.values.append(attribute("inner", 3))
    nested.kvlist_value.values.add(key="list").value.array_value.values.append(attribute("", 4).value)
    span.attributes.add(key="empty")
    return request


def delimited(*requests: ExportTraceServiceRequest) -> bytes:
    payloads = [request.SerializeToString() for request in requests]
    return b"".join(_VarintBytes(len(payload)) + payload for payload in payloads)


def otlp_json(request, *, ints=str):
    """As the Collector's file exporter writes it: hex ids, 64-bit integers as strings."""

    def convert(node):
        if isinstance(node, list):
            return [convert(item) for item in node]
        if not isinstance(node, dict):
            return node
        out = {}
        for key, value in node.items():
            if key in {"traceId", "spanId", "parentSpanId"}:
                out[key] = base64.b64decode(value).hex()
            elif key in {"intValue", "timeUnixNano", "startTimeUnixNano", "endTimeUnixNano"}:
                out[key] = ints(value)
            else:
                out[key] = convert(value)
        return out

    return json.dumps(convert(MessageToDict(request, use_integers_for_enums=True))).encode() + b"\n"


def write_recording(path: Path, *requests: ExportTraceServiceRequest) -> Path:
    path.write_bytes(gzip.compress(delimited(*requests)))
    return path
