"""KV telemetry for tests: recordings read back, batches as vLLM encodes them, and the join fed with both streams."""

from __future__ import annotations

import copy
import functools
import gzip
import json
from base64 import b64decode

import msgspec
import numpy as np
import pytest
from google.protobuf.internal.decoder import _DecodeVarint
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from collector.config.schema import JoinConfig
from collector.decode.kv.batches import KvBatch
from collector.decode.kv.messages import read_line, read_payload
from collector.decode.plain import decode
from collector.join.events import Rows
from collector.join.joiner import Joiner
from collector.telemetry import Counts
from tests.support.builders import attribute
from tests.support.paths import ROOT

BUNDLED = ROOT / "tests" / "data"
CAPTURES = ROOT.parent / "shared" / "captures"
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


def recording(name):
    """Where a recording lies: bundled, else beside the repository; the test is skipped, loudly, where it is not."""
    for place in (BUNDLED / name, CAPTURES / name):
        if (place / "kv.jsonl.gz").exists():
            return place
    pytest.skip(f"recording {name} is neither bundled nor in ../shared/captures")


def kv_lines(name):
    with gzip.open(recording(name) / "kv.jsonl.gz") as stream:
        return list(stream)


def kv_batches(name, source="kv"):
    return [read_line(line, source) for line in kv_lines(name)]


def raw_batches(name):
    """(ts, events, rank) with everything in them: what the reader must not keep."""
    return [msgspec.msgpack.decode(b64decode(json.loads(line)["payload_b64"])) for line in kv_lines(name)]


def exports(name):
    data = gzip.decompress((recording(name) / "otlp.pb.gz").read_bytes())
    position = 0
    while position < len(data):
        length, position = _DecodeVarint(data, position)
        yield data[position : position + length]
        position += length


@functools.cache
def _decoded(name):
    return [one for export in exports(name) for one in decode(export, "peer", lambda *_: None, Counts())]


def telemetry(name, keep=lambda _step: True):
    """Decoded exports; summaries of steps that ``keep`` refuses are left out, as sampling would."""
    out = []
    for one in map(copy.copy, _decoded(name)):
        chosen = np.array([keep(int(step)) for step in one.steps["step_id"]], bool)
        if not chosen.all():
            one.steps = one.steps[chosen]
            one.snapshots = one.snapshots[:0]
        out.append(one)
    return out


def prefill_tokens(name):
    """What the summaries say, by (instance, step)."""
    return {
        (one.instance, int(row["step_id"])): float(row["prefill_tokens"])
        for one in telemetry(name)
        for row in one.steps
    }


def joined(name, batches, keep=lambda _step: True, settings=None):
    """A joiner that has taken a whole recording, flushed, and the rows it gave."""
    joiner = Joiner(settings or JoinConfig(quick_lane=False))
    for one in batches:
        joiner.kv.add(one)
    for one in telemetry(name, keep):
        joiner.add(one)
    return joiner, rows_of(joiner.drain(flush=True))


def rows_of(events):
    return [event for event in events if isinstance(event, Rows)]


def sequences(joiner):
    return {engine.instance: one for engine in joiner._engines.values() for one in engine.sequences}


def rebuilt_over_true(name, batches, keep=lambda _step: True):
    """Rebuilt ÷ true prefill tokens over steps without a summary, and the share of prefilling steps that are exact."""
    joiner, _ = joined(name, batches, keep)
    rebuilt = true = exact = count = 0.0
    by_instance = sequences(joiner)
    for (instance, step), tokens in prefill_tokens(name).items():
        window = by_instance[instance].window
        if keep(step) or not 0 <= step - window.base < window.size:
            continue
        cell = window.rebuilt[step - window.base]
        asynchronous = by_instance[instance].votes.decided.value == "async"
        found = cell["prefill_tokens"] + (cell["first_requests"] if asynchronous else 0)
        rebuilt, true = rebuilt + found, true + tokens
        count += tokens > 0
        exact += tokens > 0 and abs(found - tokens) < 0.5
    return rebuilt / true, exact / count


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


def rows_by_target(rows):
    """Everything that was given, one matrix per target: features, offsets, time, phase."""
    out = {}
    for one in rows:
        block = one.rows
        parts = out.setdefault((one.config_id, one.target), ([], [], []))
        parts[0].append(block.raw)
        parts[1].append(np.diff(block.offsets))
        parts[2].append(np.column_stack((block.elapsed_us, block.end_ns, block.phase)))
    return {key: tuple(np.concatenate(part) for part in parts) for key, parts in out.items()}
