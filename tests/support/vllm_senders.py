"""What the simulated engine sends: four kinds of telemetry, each as its real sender writes it.

    steps    the events that deploy/vllm-plugin sends, with the attributes that it gives them (without journeys)
    fpm      ForwardPassMetrics as JSON lines, ``wall_time`` from output to output, a record of zeros when it goes idle
    spans    request spans of an un-forked vLLM with ``--otlp-traces-endpoint``, five seconds in an export
    pages    ``/metrics`` of an un-forked vLLM, twice a second

Steps and spans are files of length-prefixed exports, pages and fpm are JSON lines, as ``tracefit replay`` reads them.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.internal.encoder import _VarintBytes
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.support.clocks import T0_NS
from tests.support.gpu_kernels import fpm_record
from tests.support.paths import ROOT
from tests.support.step_exports import put, scope_in
from tests.support.vllm_scheduler import BLOCK_SIZE, Engine, Request, Step

sys.path.insert(0, str(ROOT / "deploy" / "vllm-plugin"))

Facts = Mapping[str, object]
"""Attributes of the resource, which the plugin reads off vLLM and users of plain spans set by themselves."""
EXPORT_NS = 1_000_000_000
SPANS_EXPORT_NS = 5_000_000_000
SCRAPE_NS = 500_000_000


def write(path: Path, exports: Iterator[bytes]) -> Path:
    """Exports, each behind its length."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for payload in exports:
            file.write(_VarintBytes(len(payload)) + payload)
    return path


# ------------------------------------------------------------------- steps


def step_exports(engine: Engine, facts: Facts, per_export: int = 0) -> Iterator[bytes]:
    """As the producer plugin sends them: a second in an export, or so many steps."""
    from tracefit_vllm.otlp import STEP_KEYS, STEP_SCOPE, step_numbers

    answered = [step for step in engine.steps if step.done]
    key = (lambda step: (step.number - 1) // per_export) if per_export else (lambda step: step.start // EXPORT_NS)
    for number, group in enumerate(_grouped(answered, key), 1):
        export = ExportTraceServiceRequest()
        scope = scope_in(export, facts, STEP_SCOPE)
        span = scope.spans.add(
            name=f"scheduler_steps_{number}",
            trace_id=number.to_bytes(16, "big"),
            span_id=number.to_bytes(8, "big"),
            start_time_unix_nano=T0_NS + group[0].start,
            end_time_unix_nano=T0_NS + group[-1].done,
        )
        for step in group:
            told = _told(engine, step)
            event = span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=T0_NS + told.end_ns)
            put(event, dict(zip(STEP_KEYS, step_numbers(told), strict=True)))
        yield export.SerializeToString()


def _told(engine: Engine, step: Step) -> Any:
    """The step as the plugin's queue holds it."""
    from tracefit_vllm.publisher import Step as Told

    tokens = step.work.prefill_tokens + step.work.decodes
    requests = step.work.prefill_requests + step.work.decodes
    batch = (
        step.running,
        step.waiting,
        step.unanswered,
        requests - step.unanswered,
        tokens,
        step.unanswered_tokens,
        tokens - step.unanswered_tokens,
        step.finished,
        step.preempted,
        step.context,
        step.context - step.several_context,
        step.several_context,
        step.several,
        step.several_tokens,
        step.pairs,
        engine.limits.kv_blocks,
        step.free_blocks,
    )
    return Told(step.number, step.start, step.scheduled, step.output, step.done, batch)


def fpm_lines(engine: Engine) -> Iterator[str]:
    """One JSON object a step."""
    before = 0
    for step in engine.steps:
        if not step.done:
            continue
        busy = step.work != type(step.work)()
        yield json.dumps(
            fpm_record(
                step.work,
                (step.done - max(before, step.start)) / 1e9 if busy else 0.0,
                number=step.number,
                prompt_variance=step.prompt_variance,
                context_variance=step.context_variance,
                waiting=step.waiting,
                waiting_tokens=step.waiting_tokens,
            )
        )
        before = step.done


# ------------------------------------------------------------------- request spans


def span_exports(engine: Engine, facts: Facts) -> Iterator[bytes]:
    """As the API process of an un-forked vLLM sends them."""
    rng = random.Random(1)
    for group in _grouped(engine.requests, lambda request: request.last_seen // SPANS_EXPORT_NS):
        export = ExportTraceServiceRequest()
        scope = scope_in(export, facts, "vllm.tracing.otel")
        for request in group:
            span = scope.spans.add(
                name="llm_request",
                kind=2,
                trace_id=rng.randbytes(16),
                span_id=rng.randbytes(8),
                start_time_unix_nano=T0_NS + request.sent,
                end_time_unix_nano=T0_NS + request.last_seen,
            )
            put(span, _of_span(request, rng))
        yield export.SerializeToString()


def _took_s(request: Request) -> dict[str, float]:
    """By the names of its span."""
    took_ns = {
        "time_to_first_token": request.first_seen - request.sent,
        "e2e": request.last_seen - request.sent,
        "time_in_queue": request.scheduled - request.queued,
        "time_in_model_prefill": request.first - request.scheduled,
        "time_in_model_decode": request.last - request.first,
        "time_in_model_inference": request.last - request.scheduled,
    }
    return {name: ns / 1e9 for name, ns in took_ns.items()}


def _of_span(request: Request, rng: random.Random) -> dict[str, object]:
    return {
        "gen_ai.request.id": f"cmpl-{rng.randbytes(16).hex()}-0",
        "gen_ai.usage.prompt_tokens": request.prompt,
        "gen_ai.usage.completion_tokens": request.made,
        "gen_ai.request.max_tokens": request.output,
        **{f"gen_ai.latency.{name}": s for name, s in _took_s(request).items()},
    }


# ------------------------------------------------------------------- pages

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BETWEEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)

REQUEST_TIMES = {
    "e2e_request_latency_seconds": "e2e",
    "request_queue_time_seconds": "time_in_queue",
    "request_inference_time_seconds": "time_in_model_inference",
    "request_prefill_time_seconds": "time_in_model_prefill",
    "request_decode_time_seconds": "time_in_model_decode",
}
"""Histograms, and what the attribute of a span is called."""
HISTOGRAMS = {
    "iteration_tokens_total": TOKENS,
    "time_to_first_token_seconds": FIRST_S,
    "inter_token_latency_seconds": BETWEEN_S,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    **dict.fromkeys(REQUEST_TIMES, REQUEST_S),
}
COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class _Page:
    """The families that vLLM counts, fed with one engine step after the other."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._blocks = engine.limits.kv_blocks
        self._registry = CollectorRegistry()
        bounds = {name: {"buckets": each} for name, each in HISTOGRAMS.items()}
        kinds = {**dict.fromkeys(COUNTERS, Counter), **dict.fromkeys(GAUGES, Gauge), **dict.fromkeys(bounds, Histogram)}
        labels = ("engine", "model_name")
        self._family = {
            name: kind(f"vllm:{name}", name, labels, registry=self._registry, **bounds.get(name, {})).labels("0", model)
            for name, kind in kinds.items()
        }
        success = Counter("vllm:request_success", "ended", (*labels, "finished_reason"), registry=self._registry)
        _, self._finished, _ = (success.labels("0", model, reason) for reason in ("stop", "length", "abort"))
        info = {"block_size": BLOCK_SIZE, "enable_prefix_caching": False, "engine": 0, "num_gpu_blocks": self._blocks}
        Gauge("vllm:cache_config_info", "cache", [*info], registry=self._registry).labels(*info.values()).set(1)

    def add(self, step: Step) -> None:
        """What the API process counts of the outputs of a step; one without outputs is no iteration to it."""
        family = self._family
        family["num_requests_running"].set(step.running - len(step.ended))
        family["num_requests_waiting"].set(step.waiting)
        family["kv_cache_usage_perc"].set(1.0 - step.free_blocks / self._blocks)
        family["num_preemptions"].inc(step.preempted)
        if not step.generated:
            return
        prompts = sum(request.prompt for request in step.started)
        for name, tokens in (("prompt", prompts), ("generation", step.generated)):
            family[f"{name}_tokens"].inc(tokens)
        family["prefix_cache_queries"].inc(prompts)
        family["iteration_tokens_total"].observe(prompts + step.generated)
        for request in step.started:
            family["time_to_first_token_seconds"].observe((request.first_seen - request.sent) / 1e9)
        for gap, times in step.gaps.items():
            for _ in range(times):
                family["inter_token_latency_seconds"].observe(gap / 1e9)
        for request in step.ended:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._finished.inc()
        took_s = _took_s(request)
        for name, theirs in REQUEST_TIMES.items():
            self._family[name].observe(took_s[theirs])
        self._family["request_prompt_tokens"].observe(request.prompt)
        self._family["request_generation_tokens"].observe(request.made)

    def text(self) -> str:
        """The page."""
        return generate_latest(self._registry).decode()


def page_lines(engine: Engine, model: str) -> Iterator[str]:
    """A recording of scrapes."""
    page, at = _Page(engine, model), SCRAPE_NS
    for step in engine.steps:
        while step.done and step.done > at:
            # The server answers a few milliseconds after it was asked.
            yield json.dumps(
                {"unix_ns": T0_NS + at, "sent_mono_ns": at, "got_mono_ns": at + 3_000_000, "page": page.text()}
            )
            at += SCRAPE_NS
        if step.done:
            page.add(step)


def write_lines(path: Path, lines: Iterator[str]) -> Path:
    """JSON lines."""
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for line in lines:
            file.write(line + "\n")
    return path


def _grouped(items: list[Any], key: Callable[[Any], int]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for item in items:
        if group and key(item) != key(group[0]):
            yield group
            group = []
        group.append(item)
    if group:
        yield group
