"""A vLLM server on a GPU, simulated: a scheduler in outline on measured step times, its telemetry, and the truth.

``serve`` runs a continuous-batching scheduler (decodes first, prompts in chunks within a token budget) on the table of
``tests/data/gpu_step_times.json``, see :mod:`tests.support.gpu_step_times`. Noise is log-normal with a memory of one
step; the host adds a gap that grows with the batch. Nothing here knows what a learner makes of it.
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.clocks import T0_NS
from tests.support.paths import DATA
from tests.support.step_exports import attribute

TOKEN_BUDGET, BATCH_MAX, BLOCK_SIZE, BLOCKS = 2048, 256, 16, 31_250
MIXES = ((300, 150), (1500, 100), (150, 400), (700, 60), (500, 250))
"""Mean prompt and output tokens of the requests; every ten seconds another mix, at another share of the capacity."""
GAP_US, GAP_US_PER_REQUEST = 350.0, 4.0
FACTS = {
    "llama8b-h100": ("meta-llama/Meta-Llama-3.1-8B", "H100", 1),
    "qwen32b-h200": ("Qwen/Qwen3-32B", "H200", 2),
    "qwen30a3-h200": ("Qwen/Qwen3-30B-A3B", "H200", 1),
}
Slower = Callable[[float, float, bool], float]
"""(second, us, has prefill) -> us: what a step takes when something has happened to the machine."""


@dataclass(slots=True)
class Request:
    """One request; times in nanoseconds."""

    arrival: int
    prompt: int
    output: int
    done: int = 0
    made: int = 0
    scheduled: int = 0
    first: int = 0
    end: int = 0


@dataclass(slots=True)
class Step:
    """One step of the scheduler: when, how long, and what was in it."""

    start: int
    us: float
    prefill_tokens: int
    prefill_requests: int
    prefill_context: int
    decodes: int
    decode_context: int
    waiting: int
    running: int
    finished: int
    pairs: int


@dataclass(slots=True)
class Served:
    """What happened."""

    machine: str
    steps: list[Step] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


@cache
def _table() -> dict[str, object]:
    return json.loads((DATA / "gpu_step_times.json").read_text())


@cache
def kernels_us(machine: str, prefill_tokens: int, decodes: int, context: int) -> float:
    """Time of one forward pass, between the points of the table by straight lines; ``context`` of each decode."""
    table = _table()
    places = [
        _place(table["prefill_tokens"], prefill_tokens),
        _place(table["decodes"], decodes),
        _place(table["contexts"], context),
    ]
    total = 0.0
    for p, p_share in places[0]:
        for d, d_share in places[1]:
            for c, c_share in places[2]:
                total += p_share * d_share * c_share * table["step_us"][machine][p][d][c]
    return total


def _place(axis: list[int], value: float) -> list[tuple[int, float]]:
    """The points beside a value, with their shares; straight on beyond the last one."""
    index = min(max(np.searchsorted(axis, value, "right") - 1, 0), len(axis) - 2)
    share = (value - axis[index]) / (axis[index + 1] - axis[index])
    share = max(share, 0.0)
    return [(int(index), 1.0 - share), (int(index) + 1, share)]


def step_us(machine: str, prefill_tokens: int, decodes: int, decode_context: int, requests: int) -> float:
    """What such a step takes without noise, the host's gap included."""
    context = decode_context // decodes if decodes else 0
    return kernels_us(machine, prefill_tokens, decodes, context) + GAP_US + GAP_US_PER_REQUEST * requests


def open_loop(machine: str, seconds: float, seed: int) -> list[Request]:
    """Requests that arrive at random, in mixes that change every ten seconds."""
    rng, requests, at = random.Random(seed), [], 0.0
    while at < seconds:
        prompt, output = rng.choice(MIXES)
        share = rng.choice((0.1, 0.3, 0.5, 0.7))
        alone_us = step_us(machine, 0, 48, 48 * (prompt + output // 2), 48) * output / 48
        per_s = share * 1e6 / (alone_us + step_us(machine, prompt, 0, 0, 1))
        until = at + 10.0
        while at < until:
            at += rng.expovariate(per_s)
            sizes = prompt * math.exp(rng.gauss(0, 0.5)), output * math.exp(rng.gauss(0, 0.4))
            requests.append(Request(int(at * 1e9), max(4, int(sizes[0])), max(2, int(sizes[1]))))
    return [request for request in requests if request.arrival < seconds * 1e9]


def serve(machine: str, seconds: float, seed: int, *, noise: float = 0.01, slower: Slower | None = None) -> Served:
    """Serve an open loop for so many seconds."""
    served, rng = Served(machine), np.random.default_rng(seed)
    pending, waiting = deque(open_loop(machine, seconds, seed)), deque[Request]()
    running: list[Request] = []
    now, wander, finished = 0, 0.0, 0
    while pending or waiting or running:
        while pending and pending[0].arrival <= now:
            waiting.append(pending.popleft())
        if not waiting and not running:
            if finished:  # the scheduler is called once more, finds nothing, and waits
                served.steps.append(Step(now, 40.0, 0, 0, 0, 0, 0, 0, 0, finished, 0))
                finished = 0
            now = max(pending[0].arrival, now + 40_000)
            continue
        plan = _plan(running, waiting, now)
        prefills = [(request, tokens) for request, tokens in plan if request.done < request.prompt]
        decodes = [request for request, _ in plan if request.done >= request.prompt]
        tokens = sum(tokens for _, tokens in prefills)
        context = sum(request.prompt + request.made for request in decodes)
        wander = 0.5 * wander + rng.normal(0.0, noise * math.sqrt(0.75))
        us = step_us(machine, tokens, len(decodes), context, len(plan)) * math.exp(wander)
        us = slower(now / 1e9, us, bool(prefills)) if slower is not None else us
        pairs = sum(n * r.done + n * (n + 1) // 2 for r, n in prefills) + context + len(decodes)
        past = sum(request.done for request, _ in prefills)
        served.steps.append(
            Step(
                now, us, tokens, len(prefills), past, len(decodes), context, len(waiting), len(running), finished, pairs
            )
        )
        now += int(us * 1e3)
        finished = _finish(plan, running, served.requests, now)
    return served


def _plan(running: list[Request], waiting: deque[Request], now: int) -> list[tuple[Request, int]]:
    """Who is in the step, with how many tokens; decodes first, in the order in which they came."""
    budget, plan = TOKEN_BUDGET, []
    for request in running:
        tokens = min(request.prompt - request.done, budget) if request.done < request.prompt else 1
        if 0 < tokens <= budget:
            plan.append((request, tokens))
            budget -= tokens
    while waiting and budget > 0 and len(running) < BATCH_MAX:
        request = waiting.popleft()
        request.scheduled = now
        running.append(request)
        tokens = min(request.prompt, budget)
        plan.append((request, tokens))
        budget -= tokens
    return plan


def _finish(plan: list[tuple[Request, int]], running: list[Request], done: list[Request], now: int) -> int:
    """Count the tokens of a step that ended now; how many requests are over."""
    gone = 0
    for request, tokens in plan:
        if request.done < request.prompt:
            request.done += tokens
            if request.done < request.prompt:
                continue
            request.first = now
        request.made += 1
        if request.made >= request.output:
            request.end = now
            running.remove(request)
            done.append(request)
            gone += 1
    return gone


# ------------------------------------------------------------------- as telemetry


def _export(machine: str, scope: str) -> tuple[ExportTraceServiceRequest, object]:
    model, gpu, degree = FACTS[machine]
    export = ExportTraceServiceRequest()
    resource = export.resource_spans.add()
    facts = {
        "service.instance.id": machine,
        "vllm.model": model,
        "hw.gpu.name": gpu,
        "vllm.tensor_parallel_size": degree,
        "vllm.version": "0.33.0",
        "vllm.max_num_seqs": BATCH_MAX,
        "vllm.max_num_batched_tokens": TOKEN_BUDGET,
        "vllm.block_size": BLOCK_SIZE,
    }
    resource.resource.attributes.extend(attribute(key, value) for key, value in facts.items())
    spans = resource.scope_spans.add()
    spans.scope.name = scope
    return export, spans.spans


def step_exports(served: Served, per_span: int = 250) -> Iterator[ExportTraceServiceRequest]:
    """As the producer plugin sends them: every step, with its exact context and its end."""
    for start in range(0, len(served.steps), per_span):
        export, spans = _export(served.machine, "vllm.scheduler.step")
        steps = served.steps[start : start + per_span]
        end_ns = T0_NS + steps[-1].start + int(steps[-1].us * 1e3)
        number = start // per_span + 1
        span = spans.add(
            name=f"scheduler_steps_{number}",
            trace_id=random.Random(number).randbytes(16),
            span_id=number.to_bytes(8, "big"),
            start_time_unix_nano=T0_NS + steps[0].start,
            end_time_unix_nano=end_ns,
        )
        for step_id, step in enumerate(steps, start + 1):
            event = span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=T0_NS + step.start + int(step.us * 1e3))
            event.attributes.extend(attribute(key, value) for key, value in _attributes(step_id, step).items())
        yield export


def step_payloads(count: int, per_span: int = 100) -> list[bytes]:
    """So many exports of one engine, as :func:`step_exports` makes them."""
    served = serve("llama8b-h100", 10.0 + count * per_span * 0.012, 1)
    return [export.SerializeToString() for export in islice(step_exports(served, per_span), count)]


def _attributes(step_id: int, step: Step) -> dict[str, object]:
    end, context = step.start + int(step.us * 1e3), step.decode_context + step.decodes
    several = step.prefill_context + step.prefill_tokens
    return {
        "step.id": step_id,
        "step.ts_start_ns": step.start,
        "step.ts_end_ns": step.start + 180_000,
        "step.duration_us": 180,
        "queue.running_depth": step.running,
        "queue.waiting_depth": step.waiting,
        "batch.num_prefill_reqs": step.prefill_requests,
        "batch.num_decode_reqs": step.decodes,
        "batch.scheduled_tokens": step.prefill_tokens + step.decodes,
        "batch.prefill_tokens": step.prefill_tokens,
        "batch.decode_tokens": step.decodes,
        "batch.num_finished": step.finished,
        "batch.num_preempted": 0,
        "kv.usage_gpu_ratio": min(1.0, (context + several) / (BLOCKS * BLOCK_SIZE)),
        "kv.blocks_total_gpu": BLOCKS,
        "kv.blocks_free_gpu": max(0, BLOCKS - (context + several) // BLOCK_SIZE),
        "step.ts_output_ns": end - 60_000,
        "step.ts_done_ns": end - 20_000,
        "batch.context_tokens": context + several,
        "batch.context_tokens_single": context,
        "batch.context_tokens_multi": several,
        "batch.num_multi_reqs": step.prefill_requests,
        "batch.multi_tokens": step.prefill_tokens,
        "batch.attn_pairs": step.pairs,
    }


def request_exports(served: Served, seed: int = 1, per_export: int = 64) -> Iterator[ExportTraceServiceRequest]:
    """As vLLM sends them without any plugin: one span for each finished request, nothing of the steps."""
    rng = random.Random(seed)
    for start in range(0, len(served.requests), per_export):
        export, spans = _export(served.machine, "vllm.tracing.otel")
        for request in served.requests[start : start + per_export]:
            arrived = request.arrival - 3_000_000
            span = spans.add(
                name="llm_request",
                kind=2,
                trace_id=rng.randbytes(16),
                span_id=rng.randbytes(8),
                start_time_unix_nano=T0_NS + arrived,
                end_time_unix_nano=T0_NS + request.end + 1_000_000,
            )
            times = {
                "time_to_first_token": request.first - arrived,
                "e2e": request.end - arrived,
                "time_in_queue": request.scheduled - request.arrival,
                "time_in_model_prefill": request.first - request.scheduled,
                "time_in_model_decode": request.end - request.first,
                "time_in_model_inference": request.end - request.scheduled,
            }
            attributes: dict[str, object] = {
                "gen_ai.request.id": f"cmpl-{rng.randbytes(8).hex()}",
                "gen_ai.usage.prompt_tokens": request.prompt,
                "gen_ai.usage.completion_tokens": request.made,
                **{f"gen_ai.latency.{name}": nanoseconds / 1e9 for name, nanoseconds in times.items()},
            }
            span.attributes.extend(attribute(key, value) for key, value in attributes.items())
        yield export
