"""A small vLLM that tells what it does: jobs in, the wire's spans and the truth per step out.

Scheduling follows vLLM's documented order: running requests first (one token each, unfinished prefills what the
budget leaves), then the waiting queue. A step takes beta . (1, prefill tokens, decode context, requests) microseconds,
exactly. Asynchronous: schedule(n + 1) runs while step n executes, and a request's first decode step counts as a
one-token prefill.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from google.protobuf.internal.decoder import _DecodeVarint
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.config.schema import Config
from collector.decode.plain import decode
from collector.decode.records import ApiSpan, CoreSpan, RequestSpan, StepColumns, Telemetry
from collector.receive.export_request import Export
from collector.telemetry import Counts, table
from collector.worker.pipeline import Pipeline
from tests.support.paths import ROOT

SHARED = ROOT.parent / "shared"
UNIX_NS = 1_795_000_000_000_000_000
MONO_NS = 10**12
BETA_US = (7000.0, 45.0, 0.12, 160.0)
STEP_SCOPE, CORE_SCOPE, API_SCOPE = "vllm.scheduler.step", "vllm.scheduler", "vllm.api"
STOCK_SCOPE = "vllm.tracing.otel"


class Piece(NamedTuple):
    """One span as it goes over the wire, with who sends it."""

    instance: str
    scope: str
    span: Span
    facts: tuple[tuple[str, str], ...] = ()


@dataclass
class Job:
    """One request. Steps are those of the engine: it is queued just before ``queued_step``."""

    name: str
    prompt: int
    outputs: int
    queued_step: int = 1
    preempted_step: int | None = None
    resumed_step: int | None = None
    aborted_step: int | None = None
    arrived_before_us: float = 1500.0
    streams: bool = True
    samples: int = 1
    marks: list[tuple[str, int, int, int]] = field(default_factory=list)
    done: int = 0
    computed: int = 0
    status: str = "length"

    def mark(self, kind: str, step: int, ns: int) -> None:
        self.marks.append((kind, step, ns, self.done))

    def step_of(self, kind: str) -> int:
        return next(step for name, step, *_ in self.marks if name == kind)

    def ns_of(self, kind: str) -> int:
        return next(ns for name, _, ns, _ in self.marks if name == kind)


@dataclass
class Run:
    """What an engine did: summaries as the wire has them, jobs with their marks, and the truth per step."""

    jobs: list[Job]
    summaries: list[dict[str, int | float]]
    snapshots: list[list[dict[str, object]]]
    prefill_tokens: list[int]
    context_tokens: list[int]
    recomputed_tokens: list[int]
    step_us: list[float]
    offset_ns: int

    def unix(self, mono_ns: int) -> int:
        return mono_ns + self.offset_ns

    def truth(self, name: str) -> np.ndarray:
        return np.array([s[name] for s in self.summaries], float)


def run_engine(  # noqa: C901 one loop, as an engine has one
    jobs: Sequence[Job],
    *,
    budget: int = 512,
    asynchronous: bool = False,
    beta_us: Sequence[float] = BETA_US,
    start_ns: int = MONO_NS,
    offset_ns: int = UNIX_NS - MONO_NS,
    idle_us: float = 2e6,
    steps_max: int = 20_000,
) -> Run:
    """Run all jobs to their end; the engine idles ``idle_us`` when nothing is left to do before the next one."""
    run = Run(list(jobs), [], [], [], [], [], [], offset_ns)
    waiting: list[Job] = []
    running: list[Job] = []
    jobs = [dataclasses.replace(job, marks=[]) for job in jobs]
    run.jobs = jobs
    todo = sorted(jobs, key=lambda j: j.queued_step)
    now, previous_us, finished = float(start_ns), 0.0, 0
    for step in range(1, steps_max):
        if not running and not waiting:
            if not todo:
                break
            if todo[0].queued_step > step and finished == 0 and run.summaries:
                now += idle_us * 1e3
                skipped = todo[0].queued_step - step  # nothing happens while idle: step ids do not advance
                for job in todo:
                    job.queued_step -= skipped
        for job in [j for j in todo if j.queued_step <= step]:
            todo.remove(job)
            job.mark("QUEUED", step - 1, int(now) - 30_000)
            waiting.append(job)
        begin = int(now)
        for job in [j for j in (*running, *waiting) if j.aborted_step is not None and j.aborted_step < step]:
            (running if job in running else waiting).remove(job)
            job.status = "aborted"
            job.mark("FINISHED", step - 1, begin - 10_000)
            finished += 1
        batch, preempted = _schedule(step, begin, running, waiting, budget)
        took_us = _record(run, step, begin, batch, running, waiting, finished, preempted, asynchronous, beta_us)
        finished = 0
        gap_us = previous_us if asynchronous else took_us
        previous_us = took_us if batch else 0.0
        now += (gap_us if batch or (asynchronous and gap_us) else 200.0) * 1e3
        if asynchronous and not gap_us:
            now += 200e3
        ends = int(now + (took_us * 1e3 if asynchronous else 0.0)) - 150_000
        for job, tokens in batch:
            job.computed += tokens
            if job.computed < job.prompt + job.done:
                continue
            job.done += 1
            if job.done == 1:
                job.mark("FIRST_TOKEN", step, ends)
            if job.done >= job.outputs:
                job.mark("FINISHED", step, ends)
                running.remove(job)
                finished += 1
    return run


def _schedule(step, begin, running, waiting, budget):
    preempted = [j for j in running if j.preempted_step == step]
    for job in preempted:
        running.remove(job)
        job.mark("PREEMPTED", step, begin + 100_000)
        job.computed = 0
        waiting.insert(0, job)
    batch = []
    for job in list(running):
        tokens = min(job.prompt + job.done - job.computed, budget)
        if tokens > 0:
            batch.append((job, tokens))
            budget -= tokens
    for job in list(waiting):
        held = job.preempted_step is not None and job.preempted_step <= step < (job.resumed_step or 0)
        if budget <= 0 or held:
            continue
        waiting.remove(job)
        running.append(job)
        tokens = min(job.prompt + job.done - job.computed, budget)
        job.mark("SCHEDULED", step, begin + 120_000)
        batch.append((job, tokens))
        budget -= tokens
    return batch, len(preempted)


def _record(run, step, begin, batch, running, waiting, finished, preempted, asynchronous, beta_us):
    first = [j for j, _ in batch if asynchronous and j.done == 1 and j.computed == j.prompt]
    prefill = [(j, t) for j, t in batch if j.done == 0]
    decode = [(j, t) for j, t in batch if j.done > 0]
    context = sum(j.computed + t for j, t in decode if j not in first)
    recomputed = sum(t - 1 for j, t in decode)
    tokens = sum(t for _, t in prefill)
    took_us = 0.0
    if batch:
        work = tokens + len(first) + recomputed
        took_us = beta_us[0] + beta_us[1] * work + beta_us[2] * context + beta_us[3] * len(batch)
    run.prefill_tokens.append(tokens + len(first))
    run.context_tokens.append(context)
    run.recomputed_tokens.append(recomputed)
    run.step_us.append(took_us)
    blocks = sum(-(-(j.computed + t) // 16) for j, t in batch)
    run.summaries.append(
        {
            "step.id": step,
            "step.ts_start_ns": begin,
            "step.ts_end_ns": begin + 150_000,
            "step.duration_us": 150,
            "queue.running_depth": len(running),
            "queue.waiting_depth": len(waiting),
            "batch.num_prefill_reqs": len(prefill) + len(first),
            "batch.num_decode_reqs": len(decode) - len(first),
            "batch.scheduled_tokens": sum(t for _, t in batch),
            "batch.prefill_tokens": tokens + len(first),
            "batch.decode_tokens": sum(t for _, t in decode) - len(first),
            "batch.num_finished": finished,
            "batch.num_preempted": preempted,
            "kv.usage_gpu_ratio": min(1.0, blocks / 4096),
            "kv.blocks_total_gpu": 4096,
            "kv.blocks_free_gpu": max(0, 4096 - blocks),
        }
    )
    run.snapshots.append(
        [
            {
                "step.id": step,
                "request.id": f"{j.name}-0a1b2c3d",
                "request.num_computed_tokens": j.computed,
                "request.scheduled_tokens_this_step": t,
                "request.num_output_tokens": j.done,
            }
            for j, t in batch
        ]
    )
    return took_us


# --- the wire -------------------------------------------------------------------------------------------------------


def attribute(key: str, value: object) -> KeyValue:
    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value", bytes: "bytes_value"}
    return KeyValue(key=key, value=AnyValue(**{kinds[type(value)]: value}))


def put(event: Span.Event | Span, attributes: dict[str, object]) -> None:
    event.attributes.extend(attribute(key, value) for key, value in attributes.items())


def span_id(name: str) -> bytes:
    return abs(hash_of(name)).to_bytes(8, "big")


def hash_of(name: str) -> int:
    """The same on every run, unlike hash()."""
    out = 1469598103934665603
    for byte in name.encode():
        out = (out ^ byte) * 1099511628211 % 2**64
    return out


def step_span(run: Run, first: int, last: int, *, snapshots: bool = False, keep=lambda _step: True) -> Span:
    """Summaries of steps first..last (ids) in one span."""
    picked = [s for s in run.summaries[first - 1 : last] if keep(s["step.id"])]
    newest = run.unix(run.summaries[min(last, len(run.summaries)) - 1]["step.ts_end_ns"])
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


def api_span(run: Run, job: Job, *, post_decode_us: float = 900.0, response_us: float = 2500.0) -> Span:
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
        moments["FIRST_RESPONSE_FROM_CORE"] = first + int(response_us * 1e3)
    moments["ABORTED" if job.status == "aborted" else "DEPARTED"] = finished + int(post_decode_us * 1e3)
    for kind, ns in moments.items():
        put(span.events.add(name=f"api.{kind}", time_unix_nano=run.unix(ns)), {"event.ts.monotonic": ns / 1e9})
    return span


def stock_span(
    name: str, arrival_s: float, *, prompt: int, outputs: int, ttft_s: float, decode_s: float, **more
) -> Span:
    """A finished request of an un-forked vLLM; ``more``: queue_s, prefill_s."""
    arrival = UNIX_NS + int(arrival_s * 1e9)
    span = Span(
        name="llm_request",
        span_id=span_id(f"stock {name}"),
        trace_id=b"t" * 16,
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


def pieces(
    run: Run, *, instance: str = "engine-0", api: str = "api-0", closure: int = 100, steps=True, **kinds
) -> list[Piece]:
    """All an instrumented engine sends of a run, in order of span end; ``kinds``: keep, snapshots, apis, facts."""
    facts = kinds.get("facts", ())
    out = []
    if steps:
        for first in range(1, len(run.summaries) + 1, closure):
            last = min(first + closure - 1, len(run.summaries))
            extra = {k: kinds[k] for k in ("keep", "snapshots") if k in kinds}
            out.append(Piece(instance, STEP_SCOPE, step_span(run, first, last, **extra), facts))
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
            resource = request.resource_spans.add(resource=Resource())
            if piece.instance:
                resource.resource.attributes.append(attribute("service.instance.id", piece.instance))
            resource.resource.attributes.extend(attribute(k, v) for k, v in piece.facts)
            scope = resource.scope_spans.add()
            scope.scope.name = piece.scope
            last = key
        scope.spans.add().CopyFrom(piece.span)
    return request


def exports_of(all_pieces: Sequence[Piece], size: int = 20) -> list[Export]:
    out = []
    for start in range(0, len(all_pieces), size):
        group = all_pieces[start : start + size]
        out.append(Export(export_of(group).SerializeToString(), "peer", "test", len(group)))
    return out


def decoded(*group: Piece, counts: Counts | None = None) -> Telemetry:
    """What decoding one export of one emitter gives."""
    counts = Counts() if counts is None else counts
    (telemetry,) = decode(export_of(group).SerializeToString(), "peer", lambda *_: None, counts)
    return telemetry


def columns_of(run: Run, **kinds) -> StepColumns:
    return decoded(Piece("e", STEP_SCOPE, step_span(run, 1, len(run.summaries), **kinds))).steps


def core_of(run: Run, job: Job) -> CoreSpan:
    return decoded(Piece("e", CORE_SCOPE, core_span(run, job))).core[0]


def api_of(run: Run, job: Job, **times) -> ApiSpan:
    return decoded(Piece("a", API_SCOPE, api_span(run, job, **times))).api[0]


def stock_of(name: str, arrival_s: float, **values) -> RequestSpan:
    return decoded(Piece("a", STOCK_SCOPE, stock_span(name, arrival_s, **values))).requests[0]


def many_jobs(count: int, *, seed: int = 0, spacing: int = 12, prompt: tuple[int, int] = (16, 400)) -> list[Job]:
    """An open load of jobs of mixed size."""
    random = np.random.default_rng(seed)
    return [
        Job(
            f"job{index}",
            prompt=int(random.integers(*prompt)),
            outputs=int(random.integers(2, 120)),
            queued_step=1 + int(index * spacing + random.integers(0, spacing)),
        )
        for index in range(count)
    ]


# --- recordings -----------------------------------------------------------------------------------------------------


def recording(path: Path) -> list[Export]:
    """Exports of a recording, with the peer each came from."""
    data, position, out = gzip.decompress(path.read_bytes()), 0, []
    index = path.with_name("otlp.idx.jsonl.gz")
    lines = gzip.decompress(index.read_bytes()).splitlines() if index.exists() else []
    peers = [json.loads(line)["peer"] for line in lines]
    while position < len(data):
        size, position = _DecodeVarint(data, position)
        payload = data[position : position + size]
        peer = peers[len(out)] if peers else path.parent.name
        out.append(Export(payload, peer, "file", spans_in(payload), str(path)))
        position += size
    return out


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


def new_pipeline(**settings) -> Pipeline:
    return Pipeline(Config(**settings, learners=("rls",), live_sets=()), "0")


def replayed(exports: Iterable[Export], batch: int = 1, **settings) -> Pipeline:
    pipeline, everything = new_pipeline(**settings), list(exports)
    for start in range(0, len(everything), batch):
        pipeline.process(everything[start : start + batch])
    pipeline.flush()
    return pipeline


def coefficients(pipeline: Pipeline) -> dict[tuple[str, str, str], float]:
    return {
        (config.config_id, name, feature.name): feature.coefficient
        for config in pipeline.snapshot(0, 1).configs
        for name, target in config.targets.items()
        for feature in target.models["portable"].features
    }


def assert_accounted(counts: Counts) -> None:
    """received = accepted + the sum of what was skipped, for spans and for events."""
    assert counts[table.DECODED_SPANS] == counts[table.DECODED_SPANS_OK] + counts.total(table.SKIPPED_SPANS)
    assert counts[table.DECODED_EVENTS] == counts[table.DECODED_EVENTS_OK] + counts.total(table.SKIPPED_EVENTS)
