"""Items to ExportTraceServiceRequest bytes: one request per chunk, a scope per kind, the counts of losses on the spans.

scope vllm.scheduler.step   span scheduler_steps_<n>   step.BATCH_SUMMARY, step.REQUEST_SNAPSHOT
scope vllm.scheduler        span llm_core per request  journey.*
scope vllm.kv_events        span kv_events_<n>         event name = type, attributes = fields
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from . import __version__
from .batch import BATCH_KEYS
from .items import Item, KvBatch, SnapshotRows, StepRow
from .journeys import Finished
from .wire import IntAttributes, Value, attribute, event, field

STEP_SCOPE: Final = "vllm.scheduler.step"
CORE_SCOPE: Final = "vllm.scheduler"
KV_SCOPE: Final = "vllm.kv_events"

STEP_KEYS: Final = (
    "step.id",
    "step.ts_start_ns",
    "step.ts_end_ns",
    "step.duration_us",
    *BATCH_KEYS,
    "plugin.hook_ns",
    "step.ts_output_ns",
    "step.ts_done_ns",
)
"""A step row's values in order; the last two are left out of a step whose output never came."""

TOTAL_AT: Final = STEP_KEYS.index("kv.blocks_total_gpu")
LOSSES: Final = frozenset({"queue_full", "export_failed"})
"""Counts of items that never arrived; they also make up the span's dropped_events_count."""

YIELD_EVERY: Final = 32
"""Events encoded before the interpreter lock is offered to the engine's thread (else it waits up to 5 ms for it)."""

_STEP: Final = IntAttributes(STEP_KEYS)
_SNAPSHOT: Final = IntAttributes(
    (
        "request.num_prompt_tokens",
        "request.num_computed_tokens",
        "request.num_output_tokens",
        "request.num_preemptions",
        "request.scheduled_tokens_this_step",
        "step.id",
    )
)
_JOURNEY: Final = IntAttributes(
    (
        "ts.monotonic_ns",
        "scheduler.step",
        "prefill.done_tokens",
        "prefill.total_tokens",
        "decode.done_tokens",
        "decode.max_tokens",
        "num_preemptions",
    )
)


def step_event(row: StepRow) -> bytes:
    """Encode one ``step.BATCH_SUMMARY``."""
    values = row.values
    total, free = values[TOTAL_AT], values[TOTAL_AT + 1]
    ratio = attribute("kv.usage_gpu_ratio", 1.0 - free / total if total > 0 else 0.0)
    return event("step.BATCH_SUMMARY", row.unix_ns, _STEP.encode(values if row.done_ns else values[:-2]) + ratio)


def snapshot_events(item: SnapshotRows) -> Iterable[bytes]:
    """Encode one ``step.REQUEST_SNAPSHOT`` per running request."""
    for request_id, phase, *counts in item.rows:
        texts = attribute("request.id", request_id) + attribute("request.phase", phase)
        yield event("step.REQUEST_SNAPSHOT", item.unix_ns, texts + _SNAPSHOT.encode((*counts, item.step)))


def journey_events(journey: Finished) -> list[bytes]:
    """Encode a request's events."""
    encoded = []
    for kind, ts_ns, step, phase, *counts, extra in journey.events:
        attributes = (
            attribute("event.type", kind)
            + attribute("phase", phase)
            + attribute("ts.monotonic", ts_ns / 1e9)
            + _JOURNEY.encode((ts_ns, step, *counts))
        )
        if extra:
            attributes += attribute("finish.status" if kind == "FINISHED" else "schedule.kind", extra)
        encoded.append(event(f"journey.{kind}", ts_ns + journey.offset_ns, attributes))
    return encoded


def kv_events(batch: KvBatch) -> Iterable[bytes]:
    """Encode a batch of KV-cache events; the step is the one whose output was processed."""
    numbers = {"step.id": batch.step, "data_parallel_rank": batch.rank, "batch_seq": batch.sequence}
    common = b"".join(attribute(key, value) for key, value in numbers.items())
    for name, fields in batch.events:
        attributes = b"".join(attribute(key, value) for key, value in fields.items())
        yield event(name, batch.unix_ns, common + attributes)


class Encoder:
    """Builds the requests of one exporter; used by its thread only."""

    def __init__(self, resource: Mapping[str, Value], sample_rate: float) -> None:
        attributes = [_key_value(key, value) for key, value in resource.items()]
        self._resource = ResourceSpans(resource=Resource(attributes=attributes)).SerializeToString()
        self._scopes = {
            name: ScopeSpans(scope=InstrumentationScope(name=name, version=__version__)).SerializeToString()
            for name in (STEP_SCOPE, CORE_SCOPE, KV_SCOPE)
        }
        self._sample_rate = sample_rate
        self._sequence = 0
        self._reported = 0

    def request(self, items: Sequence[Item], drops: Mapping[str, int]) -> bytes:
        """Return one serialised ExportTraceServiceRequest that holds all the items."""
        steps: list[StepRow] = []
        step_events: list[bytes] = []
        spans: dict[str, list[bytes]] = {STEP_SCOPE: [], CORE_SCOPE: [], KV_SCOPE: []}
        kv: list[KvBatch] = []
        for number, item in enumerate(items, 1):
            if isinstance(item, StepRow):
                steps.append(item)
                step_events.append(step_event(item))
            elif isinstance(item, SnapshotRows):
                step_events.extend(snapshot_events(item))
            elif isinstance(item, Finished):
                spans[CORE_SCOPE].append(self._core_span(item))
            else:
                kv.append(item)
            if number % YIELD_EVERY == 0:
                time.sleep(0)
        self._sequence += 1
        if step_events:
            spans[STEP_SCOPE].append(self._step_span(steps, step_events, drops))
        if kv:
            spans[KV_SCOPE].append(self._kv_span(kv))
        body = b"".join(
            field(2, self._scopes[scope] + b"".join(field(2, span) for span in found))
            for scope, found in spans.items()
            if found
        )
        # Field numbers: request 1 = resource_spans, ResourceSpans 2 = scope_spans, ScopeSpans 2 = spans.
        return field(ExportTraceServiceRequest.RESOURCE_SPANS_FIELD_NUMBER, self._resource + body)

    def _step_span(self, steps: Sequence[StepRow], events: Sequence[bytes], drops: Mapping[str, int]) -> bytes:
        counts = dict(drops)  # a copy: the engine's thread may add a reason meanwhile
        lost = sum(count for reason, count in counts.items() if reason in LOSSES)
        now_ns = time.time_ns()
        attributes: dict[str, Value] = {"scheduler.span_sequence": self._sequence}
        if steps:
            attributes["scheduler.step_range_start"] = steps[0].values[0]
            attributes["scheduler.step_range_end"] = steps[-1].values[0]
        attributes["plugin.step_sample"] = self._sample_rate
        attributes |= {f"plugin.{reason}": count for reason, count in sorted(counts.items())}
        span = Span(
            trace_id=os.urandom(16),
            span_id=os.urandom(8),
            name=f"scheduler_steps_{self._sequence}",
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=steps[0].unix_ns if steps else now_ns,
            end_time_unix_nano=now_ns,
            attributes=[_key_value(key, value) for key, value in attributes.items()],
            dropped_events_count=min(lost - self._reported, 2**32 - 1),
        )
        self._reported = lost
        return span.SerializeToString() + b"".join(events)

    def _core_span(self, journey: Finished) -> bytes:
        trace_id, parent = _parent(journey.trace_headers.get("traceparent", ""))
        offset_ns = journey.offset_ns
        span = Span(
            trace_id=trace_id,
            span_id=os.urandom(8),
            parent_span_id=parent,
            name="llm_core",
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=journey.events[0][1] + offset_ns,
            end_time_unix_nano=journey.events[-1][1] + offset_ns,
            attributes=[_key_value("gen_ai.request.id", journey.request_id)],
            dropped_events_count=journey.dropped,
        )
        return span.SerializeToString() + b"".join(journey_events(journey))

    def _kv_span(self, batches: Sequence[KvBatch]) -> bytes:
        span = Span(
            trace_id=os.urandom(16),
            span_id=os.urandom(8),
            name=f"kv_events_{self._sequence}",
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=batches[0].unix_ns,
            end_time_unix_nano=batches[-1].unix_ns,
        )
        return span.SerializeToString() + b"".join(body for batch in batches for body in kv_events(batch))


def _parent(traceparent: str) -> tuple[bytes, bytes]:
    """Return trace id and parent span id of a W3C traceparent, else a new trace without a parent."""
    parts = traceparent.split("-")
    try:
        trace_id, span_id = bytes.fromhex(parts[1]), bytes.fromhex(parts[2])
    except (IndexError, ValueError):
        trace_id = span_id = b""
    if len(trace_id) != 16 or len(span_id) != 8 or not any(trace_id) or not any(span_id):  # noqa: PLR2004
        return os.urandom(16), b""
    return trace_id, span_id


def _key_value(key: str, value: Value) -> KeyValue:
    if isinstance(value, bool):
        return KeyValue(key=key, value=AnyValue(bool_value=value))
    if isinstance(value, int):
        return KeyValue(key=key, value=AnyValue(int_value=value))
    if isinstance(value, float):
        return KeyValue(key=key, value=AnyValue(double_value=value))
    if isinstance(value, bytes):
        return KeyValue(key=key, value=AnyValue(bytes_value=value))
    return KeyValue(key=key, value=AnyValue(string_value=value))
