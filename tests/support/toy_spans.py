"""What a toy engine did, as the spans and exports that go over the wire, and as what decoding makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.decode import Export, decode_exports
from collector.decode.records import ApiSpan, CoreSpan, RequestSpan, StepColumns, Telemetry
from collector.telemetry import Counts
from tests.support.step_exports import put, scope_in
from tests.support.toy_engine import UNIX_NS, Job, Run

STEP_SCOPE, CORE_SCOPE, API_SCOPE = "vllm.scheduler.step", "vllm.scheduler", "vllm.api"
STOCK_SCOPE = "vllm.tracing.otel"
STEPS_PER_SPAN = 100


class Piece(NamedTuple):
    """One span as it goes over the wire, with who sends it."""

    instance: str
    scope: str
    span: Span
    facts: tuple[tuple[str, str], ...] = ()


def span_id(name: str) -> bytes:
    """The same on every run."""
    return hashlib.sha256(name.encode()).digest()[:8]


def step_span(run: Run, first: int, last: int, *, snapshots: bool = False, keep=lambda _step: True) -> Span:
    """Summaries of steps first..last (ids) in one span."""
    picked = [s for s in run.summaries[first - 1 : last] if keep(s["step.id"])]
    newest = run.unix(run.summaries[last - 1]["step.ts_end_ns"])
    span = Span(
        name=f"scheduler_steps_{first}",
        span_id=span_id(f"steps {first} {run.summaries[0]['step.ts_start_ns']}"),
        start_time_unix_nano=newest,
        end_time_unix_nano=newest,
    )
    for summary in picked:
        unix = run.unix(summary["step.ts_end_ns"])
        put(span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=unix), summary)
        if snapshots:
            for snapshot in run.snapshots[summary["step.id"] - 1]:
                put(span.events.add(name="step.REQUEST_SNAPSHOT", time_unix_nano=unix), snapshot)
    return span


def core_span(run: Run, job: Job) -> Span:
    end = run.unix(job.marks[-1][2])
    span = Span(
        name="llm_core",
        span_id=span_id(f"core {job.name} {job.marks[0][2]}"),
        parent_span_id=span_id(f"api {job.name} {job.marks[0][2]}"),
        trace_id=b"t" * 16,
        start_time_unix_nano=run.unix(job.marks[0][2]),
        end_time_unix_nano=end,
    )
    put(span, {"gen_ai.request.id": f"{job.name}-0a1b2c3d"})
    for kind, step, ns, done in job.marks:
        event = span.events.add(name=f"journey.{kind}", time_unix_nano=run.unix(ns))
        put(
            event,
            {
                "event.type": kind,
                "ts.monotonic_ns": ns,
                "scheduler.step": step,
                "decode.done_tokens": done,
                "prefill.total_tokens": job.prompt,
            },
        )
        if kind == "FINISHED":
            put(event, {"finish.status": job.status})
    return span


def api_span(run: Run, job: Job) -> Span:
    """The request as the API process saw it; aborted jobs end in api.ABORTED."""
    arrived = job.marks[0][2] - int(job.arrived_before_us * 1e3)
    finished = job.marks[-1][2]
    span = Span(
        name="llm_request",
        span_id=span_id(f"api {job.name} {job.marks[0][2]}"),
        trace_id=b"t" * 16,
        start_time_unix_nano=run.unix(arrived),
        end_time_unix_nano=run.unix(finished) + 10**6,
    )
    put(
        span,
        {
            "gen_ai.usage.prompt_tokens": job.prompt,
            "gen_ai.request.n": job.samples,
            "gen_ai.response.model": "toy",
        },
    )
    moments = {"ARRIVED": arrived, "HANDOFF_TO_CORE": arrived + 400_000}
    if any(kind == "FIRST_TOKEN" for kind, *_ in job.marks):
        first = job.ns_of("FIRST_TOKEN") if job.streams else finished
        moments["FIRST_RESPONSE_FROM_CORE"] = first + 2_500_000
    moments["ABORTED" if job.status == "aborted" else "DEPARTED"] = finished + 900_000
    for kind, ns in moments.items():
        put(span.events.add(name=f"api.{kind}", time_unix_nano=run.unix(ns)), {"event.ts.monotonic": ns / 1e9})
    return span


def stock_span(
    name: str, arrival_s: float, *, prompt: int, outputs: int, ttft_s: float, decode_s: float, **more
) -> Span:
    """A finished request of an un-forked vLLM; ``more``: queue_s, prefill_s, trace_id."""
    arrival = UNIX_NS + int(arrival_s * 1e9)
    span = Span(
        name="llm_request",
        span_id=span_id(f"stock {name}"),
        trace_id=more.get("trace_id", hashlib.sha256(name.encode()).digest()[:16]),
        start_time_unix_nano=arrival,
        end_time_unix_nano=arrival + int((ttft_s + decode_s) * 1e9),
    )
    attributes = {
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": outputs,
        "gen_ai.latency.time_to_first_token": ttft_s,
        "gen_ai.latency.e2e": ttft_s + decode_s,
        "gen_ai.latency.time_in_model_decode": decode_s,
    }
    if "queue_s" in more:
        attributes["gen_ai.latency.time_in_queue"] = more["queue_s"]
    if "prefill_s" in more:
        attributes["gen_ai.latency.time_in_model_prefill"] = more["prefill_s"]
    put(span, attributes)
    return span


def pieces(run: Run, *, instance: str = "engine-0", api: str = "api-0", steps=True, **kinds) -> list[Piece]:
    """All an instrumented engine sends of a run, in order of span end; ``kinds``: keep, snapshots, apis, facts."""
    facts = kinds.get("facts", ())
    out = []
    if steps:
        extra = {k: kinds[k] for k in ("keep", "snapshots") if k in kinds}
        for first in range(1, len(run.summaries) + 1, STEPS_PER_SPAN):
            span = step_span(run, first, min(first + STEPS_PER_SPAN - 1, len(run.summaries)), **extra)
            out.append(Piece(instance, STEP_SCOPE, span, facts))
    out += [Piece(instance, CORE_SCOPE, core_span(run, job), facts) for job in run.jobs if job.marks]
    if kinds.get("apis", True):
        out += [Piece(api, API_SCOPE, api_span(run, job)) for job in run.jobs if job.marks]
    return sorted(out, key=lambda p: p.span.end_time_unix_nano)


def export_of(group: Iterable[Piece]) -> ExportTraceServiceRequest:
    """One export; neighbours of one emitter and scope share a block."""
    request = ExportTraceServiceRequest()
    last: tuple | None = None
    for piece in group:
        key = (piece.instance, piece.scope, piece.facts)
        if key != last:
            named = {"service.instance.id": piece.instance} if piece.instance else {}
            scope = scope_in(request, named | dict(piece.facts), piece.scope)
            last = key
        scope.spans.add().CopyFrom(piece.span)
    return request


def exports_of(all_pieces: Sequence[Piece], size: int = 20) -> list[Export]:
    out = []
    for start in range(0, len(all_pieces), size):
        group = all_pieces[start : start + size]
        out.append(Export(export_of(group).SerializeToString(), "peer", len(group)))
    return out


def telemetry_in(payload: bytes, counts: Counts | None = None, peer: str = "peer") -> list[Telemetry]:
    """What the plain decoder makes of one export, of which no span was there before."""
    export = Export(payload, peer, 0)
    return [*decode_exports([export], lambda *_: None, Counts() if counts is None else counts)]


def decoded(*group: Piece, counts: Counts | None = None) -> Telemetry:
    """What decoding one export of one emitter gives."""
    (telemetry,) = telemetry_in(export_of(group).SerializeToString(), counts)
    return telemetry


def columns_of(run: Run, **kinds) -> StepColumns:
    return decoded(Piece("e", STEP_SCOPE, step_span(run, 1, len(run.summaries), **kinds))).steps


def core_of(run: Run, job: Job) -> CoreSpan:
    return decoded(Piece("e", CORE_SCOPE, core_span(run, job))).core[0]


def api_of(run: Run, job: Job) -> ApiSpan:
    return decoded(Piece("a", API_SCOPE, api_span(run, job))).api[0]


def stock_of(name: str, arrival_s: float, **values) -> RequestSpan:
    return decoded(Piece("a", STOCK_SCOPE, stock_span(name, arrival_s, **values))).requests[0]


def spans_in(payload: bytes) -> int:
    request = ExportTraceServiceRequest.FromString(payload)
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def pieces_in(exports: Iterable[Export]) -> list[tuple[str, Piece]]:
    """(peer, span) of exports, with their resources' facts as they stand."""
    out = []
    for export in exports:
        for resource in ExportTraceServiceRequest.FromString(export.payload).resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            instance = attributes.get("service.instance.id", "")
            facts = tuple((k, v) for k, v in attributes.items() if k != "service.instance.id")
            for scope in resource.scope_spans:
                out += [(export.peer, Piece(instance, scope.scope.name, span, facts)) for span in scope.spans]
    return out
