"""What vLLM on an H100 would send, for ``tracefit demo --gpu``: batches by vLLM's rules, times from a table.

``gpu_step_times.json`` has how long a step of Llama 3.1 8B takes there, by its prompt tokens, the requests that decode
in it, and the context of each. The times are composed of the kernel times that NVIDIA measured and ships in
aiconfigurator-core 0.12.0 (Apache-2.0). Between the points of the table they follow straight lines, and the noise of a
step is 2 %. What a host adds is not in it. The events have what a sidecar reads of those
of the producer plugin (deploy/vllm-plugin).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MACHINE = "llama8b-h100"
FACTS = {"vllm.model": "meta-llama/Llama-3.1-8B", "hw.gpu.name": "H100"}
PHASES = ((1, 300, 150), (16, 1500, 100), (48, 150, 400), (128, 300, 150), (4, 900, 200), (96, 500, 250), (8, 200, 100))
"""Clients, and their mean prompt and output tokens; each for PHASE_S, in turns."""
SECONDS, PHASE_S, SPREAD = 180, 9, 0.5
"""How long it serves; the spread of the logarithms of tokens."""
TOKENS_MAX, BLOCKS, BLOCK_SIZE = 2048, 31_250, 16
_SECOND_NS = 1_000_000_000
_KINDS: dict[type, str] = {str: "string_value", float: "double_value", int: "int_value"}


class StepTimes:
    """The table: microseconds by prompt tokens, decoding requests and tokens of context of each."""

    def __init__(self, path: Path, machine: str = MACHINE) -> None:
        table = json.loads(path.read_bytes())
        self._axes = [np.array(table[name], np.float64) for name in ("prefill_tokens", "decodes", "contexts")]
        self._us = np.array(table["step_us"][machine])

    def us(self, prefill_tokens: float, decodes: float, context: float) -> float:
        """Time of one step, by straight lines between the points and beyond them."""
        us = self._us
        for axis, value in zip(self._axes, (prefill_tokens, decodes, context), strict=True):
            below = min(max(int(np.searchsorted(axis, value, "right")) - 1, 0), len(axis) - 2)
            share = (value - axis[below]) / (axis[below + 1] - axis[below])
            us = (1.0 - share) * us[below] + share * us[below + 1]
        return float(us)


@dataclass(slots=True)
class _Request:
    """Prompt tokens that are not computed yet, tokens of context, tokens still to make."""

    prompt: int
    context: int
    output: int


class _Step(NamedTuple):
    """From 0, in ns; ``batch`` has the attributes of its event."""

    start_ns: int
    end_ns: int
    batch: dict[str, float]


def served(times: StepTimes, seed: int = 1) -> Iterator[_Step]:
    """Serve clients that send again as soon as they are answered; all of their requests run at once."""
    rng, running, start_ns = random.Random(seed), list[_Request](), 0  # noqa: S311 -- traffic, no secret
    while start_ns < SECONDS * _SECOND_NS:
        clients, *means = PHASES[start_ns // (PHASE_S * _SECOND_NS) % len(PHASES)]
        while len(running) < clients:
            prompt, output = (max(1, round(mean * math.exp(rng.gauss(-0.125, SPREAD)))) for mean in means)
            running.append(_Request(prompt, 0, output))
        decoding = [each for each in running if not each.prompt]
        context, budget, prefills = sum(each.context for each in decoding), TOKENS_MAX - len(decoding), 0
        for each in running:
            tokens = min(each.prompt, budget) if each.prompt else 1
            if each.prompt:
                budget, prefills = budget - tokens, prefills + (tokens > 0)
            each.output -= tokens >= each.prompt
            each.prompt, each.context = max(each.prompt - tokens, 0), each.context + tokens
        prefill = TOKENS_MAX - len(decoding) - budget
        us = times.us(prefill, len(decoding), context / max(len(decoding), 1)) * math.exp(rng.gauss(0.0, 0.02))
        free = BLOCKS - sum(-(-each.context // BLOCK_SIZE) for each in running)
        left = [each for each in running if each.prompt or each.output > 0]
        step = _Step(
            start_ns,
            start_ns + round(us * 1e3),
            {
                "queue.running_depth": len(running),
                "queue.waiting_depth": 0,
                "batch.num_prefill_reqs": prefills,
                "batch.prefill_tokens": prefill,
                "batch.num_decode_reqs": len(decoding),
                "batch.decode_tokens": len(decoding),
                "batch.scheduled_tokens": prefill + len(decoding),
                "batch.context_tokens_single": context + len(decoding),
                "batch.num_finished": len(running) - len(left),
                "batch.num_preempted": 0,
                "kv.blocks_total_gpu": BLOCKS,
                "kv.blocks_free_gpu": free,
                "kv.usage_gpu_ratio": 1.0 - free / BLOCKS,
            },
        )
        yield step
        running, start_ns = left, step.end_ns


def exports(path: Path, instance: str, unix_ns: int, mono_ns: int) -> Iterator[tuple[int, bytes]]:
    """What an engine sends of each second: when its last step ends, in ns from 0, and an export with that 0 there."""
    numbered = enumerate(served(StepTimes(path)), 1)
    for second, steps in groupby(numbered, lambda each: each[1].start_ns // _SECOND_NS):
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        _describe(resource.resource, {"service.instance.id": instance, **FACTS})
        scope = resource.scope_spans.add()
        scope.scope.name = "vllm.scheduler.step"
        identity = second + 1
        span = scope.spans.add(trace_id=identity.to_bytes(16, "big"), span_id=identity.to_bytes(8, "big"))
        end_ns = 0
        for number, (start_ns, end_ns, batch) in steps:
            stamps: dict[str, float] = {
                "step.id": number,
                "step.ts_start_ns": mono_ns + start_ns,
                "step.ts_end_ns": mono_ns + start_ns + 100_000,
                "step.duration_us": 100,
                "step.ts_done_ns": mono_ns + end_ns,
            }
            event = span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=unix_ns + start_ns)
            _describe(event, stamps | batch)
        span.name = f"scheduler_steps_{identity}"
        span.start_time_unix_nano, span.end_time_unix_nano = span.events[0].time_unix_nano, unix_ns + end_ns
        yield end_ns, request.SerializeToString()


def _describe(thing: Resource | Span.Event, values: Mapping[str, float | str]) -> None:
    """Give it these attributes."""
    for key, value in values.items():
        setattr(thing.attributes.add(key=key).value, _KINDS[type(value)], value)
