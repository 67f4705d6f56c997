"""KV batches for tests: made by hand, as vLLM encodes them; read back from recordings; and as OTLP span events."""

from __future__ import annotations

import json
from base64 import b64decode

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from collector.decode.kv import KvBatch, read_line, read_payload
from tests.support.recordings import kv_lines
from tests.support.step_exports import attribute

TS_S = 1_795_162_319.5

FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "TransferInitiated": (
        "transfer_id",
        "request_id",
        "source_medium",
        "dest_medium",
        "block_count",
        "scheduler_step",
    ),
    "TransferCompleted": (
        "transfer_id",
        "request_id",
        "source_medium",
        "dest_medium",
        "block_count",
        "success",
        "scheduler_step",
    ),
    "CacheLoadCommitted": ("request_id", "medium", "block_count", "scheduler_step"),
    "CacheStoreCommitted": ("request_id", "medium", "block_count", "scheduler_step"),
    "CacheEviction": ("medium", "blocks_evicted", "eviction_reason", "scheduler_step", "block_hashes"),
    "RemoteTransferInitiated": (
        "transfer_id",
        "request_id",
        "connector_type",
        "source_rank",
        "dest_rank",
        "block_count",
    ),
    "RemoteTransferCompleted": (
        "transfer_id",
        "request_id",
        "connector_type",
        "source_rank",
        "dest_rank",
        "block_count",
        "success",
    ),
    "AllBlocksCleared": (),
}
"""Field names by position after the tag, as the instrumented fork's classes have them."""


def stored(blocks=2, size=32, medium="GPU", tokens=None):
    tokens = list(range(blocks * size)) if tokens is None else tokens
    return ["BlockStored", [2**63 + i for i in range(blocks)], None, tokens, size, None, medium, None]


def named(event):
    """The same event as vLLM 0.32 encodes it: a map, without what is None."""
    fields = dict(zip(FIELDS[event[0]], event[1:], strict=False))
    return {"type": event[0]} | {key: value for key, value in fields.items() if value is not None}


def payload(*events, ts_s=TS_S, rank=0):
    return msgspec.msgpack.encode([ts_s, list(events), rank, None])


def batch(*events, seq=0, ts_s=TS_S, rank=0, source="kv"):
    out = read_payload(payload(*events, ts_s=ts_s, rank=rank), source, seq)
    assert isinstance(out, KvBatch)
    return out


def kv_batches(name, source="kv"):
    return [read_line(line, source) for line in kv_lines(name)]


def raw_batches(name):
    """(ts, events, rank) with everything in them: what the reader must not keep."""
    return [msgspec.msgpack.decode(b64decode(json.loads(line)["payload_b64"])) for line in kv_lines(name)]


def otlp_events(name, instance):
    """The recorded KV events as one OTLP export: span events of scope vllm.kv_events, without token ids."""
    span = Span(name="kv_events_1", span_id=b"kvevents", trace_id=b"0123456789abcdef")
    for seq, (ts_s, events, rank, *_) in enumerate(raw_batches(name)):
        unix_ns = round(ts_s * 1e9)
        span.start_time_unix_nano = span.start_time_unix_nano or unix_ns
        span.end_time_unix_nano = unix_ns
        for event in events:
            fields = dict(zip(FIELDS[event[0]], event[1:], strict=True))
            hashes = fields.pop("block_hashes", None)
            if hashes is not None:
                fields["block_count"] = len(hashes)
            for private in ("token_ids", "parent_block_hash"):
                fields.pop(private, None)
            fields |= {"data_parallel_rank": rank, "batch_seq": seq}
            attributes = [attribute(key, value) for key, value in fields.items() if value is not None]
            span.events.append(Span.Event(name=event[0], time_unix_nano=unix_ns, attributes=attributes))
    scope = ScopeSpans(scope=InstrumentationScope(name="vllm.kv_events"), spans=[span])
    resource = ResourceSpans(scope_spans=[scope])
    resource.resource.attributes.append(attribute("service.instance.id", instance))
    return ExportTraceServiceRequest(resource_spans=[resource])
