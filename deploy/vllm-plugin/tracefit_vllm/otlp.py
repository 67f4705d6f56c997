"""Steps over OTLP/gRPC, in the instrumented fork's names.

    scope vllm.scheduler.step   span scheduler_steps_<n>, one per chunk   step.BATCH_SUMMARY

Prefill means "no output token yet", the fork's rule: so is the first decode step of a request under asynchronous
scheduling, and a request that recomputes after a preemption is decode. Of n tokens scheduled for a request which had
computed c before,

    context = sum(c + n)        attn_pairs = sum(n*c + n*(n + 1)/2)   causal query-key pairs

Requests with n = 1 are "single", others "multi". For n = 1 the pairs are c + 1, the request's context: a batch that
only decodes costs two sums over lists that vLLM has made anyway, and only multi requests are looked up one by one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from . import __version__
from .publisher import Step
from .settings import LOG, Settings, Value, resource_attributes

STEP_SCOPE: Final = "vllm.scheduler.step"
STEP_KEYS: Final = (
    *("step.id", "step.ts_start_ns", "step.ts_end_ns", "step.duration_us"),
    *("queue.running_depth", "queue.waiting_depth", "batch.num_prefill_reqs", "batch.num_decode_reqs"),
    *("batch.scheduled_tokens", "batch.prefill_tokens", "batch.decode_tokens"),
    *("batch.num_finished", "batch.num_preempted"),
    *("batch.context_tokens", "batch.context_tokens_single", "batch.context_tokens_multi"),
    *("batch.num_multi_reqs", "batch.multi_tokens", "batch.attn_pairs"),
    *("kv.blocks_total_gpu", "kv.blocks_free_gpu", "step.ts_output_ns", "step.ts_done_ns", "kv.usage_gpu_ratio"),
)
"""Numbers of a summary: times, what ``batch`` returns, times again, a ratio."""

METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
GIVE_UP_S: Final = 75.0
"""A receiver that restarts is waited for; the queue behind a chunk is bounded, and newer events are worth more."""
_RETRIES: Final = {
    "maxAttempts": 5,
    "initialBackoff": "0.25s",
    "maxBackoff": "5s",
    "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED", "OUT_OF_RANGE", "DATA_LOSS"],
}
"""gRPC's own; the same bytes go again, so that a receiver knows a repetition by its span ids."""


class Spans:
    """The exports of one scheduler."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.address = settings.endpoint
        self._scheduler = scheduler
        self._settings = settings
        self._resource = resource_attributes(scheduler, settings)
        self._summary = Span.Event(name="step.BATCH_SUMMARY")
        """Filled anew for each step: to make its attributes anew would take twice as long."""
        *self._counts, self._ratio = [self._summary.attributes.add(key=key).value for key in STEP_KEYS]
        self._prefilling: dict[str, Any] = {}
        """Requests that have been scheduled and have no output token yet."""
        self._chunks = 0
        self._warned = False

    # On the engine's thread.

    def batch(self, output: Any) -> tuple[int, ...]:
        """Sum up what was scheduled, right after ``schedule()``, in the order of ``STEP_KEYS``."""
        by_id = self._scheduler.requests
        for key, request in [*self._prefilling.items()]:
            if request.num_output_tokens or key in output.finished_req_ids:
                del self._prefilling[key]
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        context = total + sum(output.scheduled_cached_reqs.num_computed_tokens)
        for new in output.scheduled_new_reqs:
            context += new.num_computed_tokens
            if not by_id[new.req_id].num_output_tokens:
                self._prefilling[new.req_id] = by_id[new.req_id]
        prefills = [tokens for key in self._prefilling if (tokens := scheduled.get(key)) is not None]
        multi = multi_tokens = multi_context = multi_pairs = 0
        if total != len(scheduled):
            for request_id, tokens in scheduled.items():
                if tokens != 1:
                    after = by_id[request_id].num_computed_tokens
                    multi += 1
                    multi_tokens += tokens
                    multi_context += after
                    multi_pairs += tokens * (after - tokens) + tokens * (tokens + 1) // 2
        pool = self._scheduler.kv_cache_manager.block_pool
        requests = (*self._scheduler.get_request_counts(), len(prefills), len(scheduled) - len(prefills))
        tokens = (total, sum(prefills), total - sum(prefills))
        gone = (len(output.finished_req_ids), len(output.preempted_req_ids or ()))
        contexts = (context, context - multi_context, multi_context)
        of_several = (multi, multi_tokens, context - multi_context + multi_pairs)
        blocks = (pool.num_gpu_blocks - 1, pool.get_num_free_blocks())  # the null block is never used
        return (*requests, *tokens, *gone, *contexts, *of_several, *blocks)

    # On the publisher's thread.

    def open(self) -> None:
        """Connect, which never waits."""
        # gRPC's core would start threads anew in a forked child, which crash it (grpc/grpc, doc/fork_support.md).
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        import grpc  # noqa: PLC0415 it takes 0.2 s

        split = urlsplit(self._settings.endpoint)
        options: list[tuple[str, Any]] = [
            ("grpc.primary_user_agent", f"tracefit-vllm/{__version__}"),
            ("grpc.max_reconnect_backoff_ms", 2000),  # the default of 120 s would outlast a sidecar's restart
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": _RETRIES}]})),
        ]
        if split.scheme == "https":
            roots = Path(self._settings.certificate).read_bytes() if self._settings.certificate else None
            self._channel = grpc.secure_channel(split.netloc, grpc.ssl_channel_credentials(roots), options)
        else:
            self._channel = grpc.insecure_channel(split.netloc, options)
        self._export: Any = self._channel.unary_unary(METHOD)  # bytes in, bytes out
        self._error: type[Exception] = grpc.RpcError

    def send(self, steps: Sequence[Step], _lost: int) -> bool:
        """Send one export; False if it was refused, or nobody took it for ``GIVE_UP_S``."""
        if not steps:
            return True
        payload = self.request(steps).SerializeToString()
        try:
            self._export(payload, timeout=GIVE_UP_S, metadata=self._settings.headers, wait_for_ready=True)
        except self._error as error:
            if not self._warned:
                self._warned = True
                code = error.code().name  # type: ignore[attr-defined]
                LOG.warning("tracefit: %s takes no telemetry (%s); said once, serving goes on", self.address, code)
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def request(self, steps: Sequence[Step]) -> ExportTraceServiceRequest:
        """Build one export: a span that lasts from its first step to its last."""
        self._chunks += 1
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        for key, value in self._resource.items():
            _set(resource.resource.attributes.add(key=key).value, value)
        scope = resource.scope_spans.add()
        scope.scope.name, scope.scope.version = STEP_SCOPE, __version__
        span = scope.spans.add(trace_id=os.urandom(16), span_id=os.urandom(8), name=f"scheduler_steps_{self._chunks}")
        offset_ns = time.time_ns() - time.monotonic_ns()
        for step in steps:
            span.events.append(self._fill(step, offset_ns))
        span.start_time_unix_nano = span.events[0].time_unix_nano
        span.end_time_unix_nano = span.events[-1].time_unix_nano
        return request

    def _fill(self, step: Step, unix_minus_mono_ns: int) -> Span.Event:
        """Fill the one event with a step, at the end of ``schedule()``; whoever keeps it copies it."""
        *counts, self._ratio.double_value = step_numbers(step)
        for value, count in zip(self._counts, counts, strict=True):
            value.int_value = count
        self._summary.time_unix_nano = unix_minus_mono_ns + step.end_ns
        return self._summary


def step_numbers(step: Step) -> tuple[Any, ...]:
    """What is told of one step, in the order of ``STEP_KEYS``."""
    number, start_ns, end_ns, output_ns, done_ns, batch, _ = step
    total, free = batch[-2:]
    usage = 1.0 - free / total if total > 0 else 0.0
    return number, start_ns, end_ns, (end_ns - start_ns) // 1000, *batch, output_ns, done_ns, usage


def _set(told: Any, value: Value) -> None:
    """Set the value of an attribute."""
    if isinstance(value, str):
        told.string_value = value.encode("utf-8", "replace").decode()
    elif isinstance(value, bool):
        told.bool_value = value
    else:
        told.int_value = value
