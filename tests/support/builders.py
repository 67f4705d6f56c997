"""Builders for tests of the way in: a clock that moves by hand, telemetry made to measure, a running sidecar."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import threading
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import grpc
from google.protobuf.internal.encoder import _VarintBytes
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from collector.app import Sidecar
from collector.config.load import load
from collector.config.schema import Config
from collector.receive.otlp.otlp_grpc import METHOD
from collector.runtime.clock import SystemClock
from collector.telemetry import Counts
from online.snapshot import Snapshot

T0_NS = 1_795_000_000_000_000_000


class FakeClock:
    """Time passes when told to."""

    def __init__(self, monotonic_ns: int = 1_000_000_000, unix_nano: int = T0_NS):
        self._monotonic_ns = monotonic_ns
        self._unix_nano = unix_nano

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def unix_nano(self) -> int:
        return self._unix_nano

    def advance(self, seconds: float) -> None:
        self._monotonic_ns += int(seconds * 1e9)
        self._unix_nano += int(seconds * 1e9)


def attribute(key: str, value: object) -> KeyValue:
    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value", bytes: "bytes_value"}
    return KeyValue(key=key, value=AnyValue(**{kinds[type(value)]: value}))


STEP_US = 20_000


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
    spans: int = 1, *, steps_per_span: int = 10, first_step: int = 1, instance: str = "engine-0"
) -> ExportTraceServiceRequest:
    """Step spans with consecutive steps, span ids unique per first step."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.append(attribute("service.instance.id", instance))
    scope = resource.scope_spans.add()
    scope.scope.name = "vllm.scheduler.step"
    for index in range(spans):
        step = first_step + index * steps_per_span
        span = scope.spans.add(
            name=f"scheduler_steps_{index + 1}",
            trace_id=step.to_bytes(16, "big"),
            span_id=step.to_bytes(8, "big"),
            start_time_unix_nano=T0_NS + step * STEP_US * 1000,
            end_time_unix_nano=T0_NS + (step + steps_per_span) * STEP_US * 1000,
        )
        for number in range(step, step + steps_per_span):
            event = span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=T0_NS + number * STEP_US * 1000)
            event.attributes.extend(attribute(key, value) for key, value in step_attributes(number).items())
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


class CountingProcessor:
    """In place of the pipeline: remembers what it was given, in batches; may be held back or made to fail."""

    def __init__(self) -> None:
        self.batches: list[tuple] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.learned_rows = 0

    def process(self, exports) -> None:
        self.gate.wait(30)
        self.batches.append(tuple(exports))
        if self.error is not None:
            raise self.error
        self.learned_rows += sum(export.spans for export in exports)

    def take_counts(self) -> Counts:
        return Counts()

    def snapshot(self, now_unix_nano: int, generation: int) -> Snapshot:
        return Snapshot(generation=generation, created_unix_nano=now_unix_nano, tracefit_version="0", configs=[])

    def flushed(self) -> CountingProcessor:
        return self


class NoKeeper:
    """In place of durability: nothing was left behind, nothing is kept."""

    keeps_backlog = False

    def backlog(self, _):
        return []

    def record_batch(self):
        pass

    def tick(self, *, final=False):
        pass


def make_config(directory: Path, **overrides: str) -> Config:
    """Port 0 everywhere, files under ``directory``; overrides by environment names without the prefix."""
    environ = {
        "TRACEFIT_RECEIVERS__GRPC__ENDPOINT": "127.0.0.1:0",
        "TRACEFIT_RECEIVERS__HTTP__ENDPOINT": "127.0.0.1:0",
        "TRACEFIT_EXPORTERS__HTTP__ENDPOINT": "127.0.0.1:0",
        "TRACEFIT_SNAPSHOT__DIRECTORY": str(directory),
        "TRACEFIT_SNAPSHOT__PUBLISH_INTERVAL_S": "0.05",
        "TRACEFIT_LEARNERS": "[rls]",
    }
    environ |= {f"TRACEFIT_{name}": value for name, value in overrides.items()}
    return load(None, environ)


@contextlib.contextmanager
def running_sidecar(directory: Path, **overrides: str) -> Iterator[Sidecar]:
    sidecar = Sidecar(make_config(directory, **overrides), SystemClock())
    sidecar.start()
    try:
        yield sidecar
    finally:
        sidecar.stop()


def call_export(port: int, payload: bytes, *, timeout_s: float = 20, compression=None, wait=True) -> bytes:
    """One raw call; grpc.RpcError tells the status."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return channel.unary_unary(METHOD)(payload, timeout=timeout_s, compression=compression, wait_for_ready=wait)


def get(port: int, path: str) -> bytes:
    response: HTTPResponse
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return response.read()


def metric(port: int, series: str) -> float:
    """The value of one series of the page."""
    for line in get(port, "/metrics").decode().splitlines():
        if line.startswith(series + " "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{series} is not on the page")


def eventually(condition, timeout_s: float = 10.0) -> None:
    """Wait for another thread or process to get there."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    assert condition()


def as_json(path: Path) -> dict:
    return json.loads(path.read_bytes())
