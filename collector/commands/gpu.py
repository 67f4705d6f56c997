"""What vLLM on an H100 would send, for ``tracefit demo --gpu``: batches by vLLM's rules, times from a table.

``gpu_step_times.json`` has how long a step of Llama 3.1 8B takes there, by its prompt tokens, the requests that decode
in it, and the context of each. The times are composed of the kernel times that NVIDIA measured and ships in
aiconfigurator-core 0.12.0 (Apache-2.0). Between the points of the table they follow straight lines, and the noise of a
step is 2 %. What a host adds is not in it. The events are those of the producer plugin (deploy/vllm-plugin).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

MACHINE = "llama8b-h100"
FACTS = {"service.instance.id": "h100-0", "vllm.model": "meta-llama/Llama-3.1-8B", "hw.gpu.name": "H100"}
PHASES = ((1, 300, 150), (16, 1500, 100), (48, 150, 400), (128, 300, 150), (4, 900, 200), (96, 500, 250), (8, 200, 100))
"""Clients, and their mean prompt and output tokens; each for PHASE_S, in turns."""
SECONDS, PHASE_S, SPREAD = 180, 9, 0.5
"""How long it serves; the spread of the logarithms of tokens."""
TOKENS_MAX, BLOCKS, BLOCK_SIZE = 2048, 31_250, 16
_SECOND_NS = 1_000_000_000


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


def served(times: StepTimes, seed: int = 1) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Serve clients that send again as soon as they are answered: start and end in ns from 0, and the batch, by step.

    A request is [prompt tokens to compute, tokens of context, tokens to make]; all of them run at once.
    """
    rng, running, start_ns = random.Random(seed), list[list[int]](), 0  # noqa: S311 -- traffic, no secret
    while start_ns < SECONDS * _SECOND_NS:
        clients, *means = PHASES[start_ns // (PHASE_S * _SECOND_NS) % len(PHASES)]
        for _ in range(len(running), clients):
            prompt, output = (max(1, round(mean * math.exp(rng.gauss(-0.125, SPREAD)))) for mean in means)
            running.append([prompt, 0, output])
        decoding, prefilling, budget = [each for each in running if not each[0]], [], TOKENS_MAX
        budget -= len(decoding)
        for each in running:
            if each[0] and budget:
                tokens = min(each[0], budget)
                budget -= tokens
                prefilling.append((each, tokens))
        prefill, context = sum(tokens for _, tokens in prefilling), sum(each[1] for each in decoding)
        us = times.us(prefill, len(decoding), context / max(len(decoding), 1)) * math.exp(rng.gauss(0.0, 0.02))
        for each, tokens in (*prefilling, *((each, 1) for each in decoding)):
            gives_token = tokens >= each[0]
            each[:] = max(each[0] - tokens, 0), each[1] + tokens, each[2] - gives_token
        left = [each for each in running if each[0] or each[2] > 0]
        end_ns, single, multi = start_ns + round(us * 1e3), context + len(decoding), sum(e[1] for e, _ in prefilling)
        free = BLOCKS - sum(-(-each[1] // BLOCK_SIZE) for each in running)
        yield (
            start_ns,
            end_ns,
            {
                "queue.running_depth": len(running),
                "queue.waiting_depth": 0,
                "batch.num_prefill_reqs": len(prefilling),
                "batch.num_multi_reqs": len(prefilling),
                "batch.prefill_tokens": prefill,
                "batch.multi_tokens": prefill,
                "batch.num_decode_reqs": len(decoding),
                "batch.decode_tokens": len(decoding),
                "batch.scheduled_tokens": prefill + len(decoding),
                "batch.context_tokens": single + multi,
                "batch.context_tokens_single": single,
                "batch.context_tokens_multi": multi,
                "batch.num_finished": len(running) - len(left),
                "batch.num_preempted": 0,
                "kv.blocks_total_gpu": BLOCKS,
                "kv.blocks_free_gpu": free,
                "kv.usage_gpu_ratio": 1.0 - free / BLOCKS,
            },
        )
        running, start_ns = left, end_ns


def exports(path: Path, unix_ns: int, mono_ns: int) -> Iterator[tuple[int, bytes]]:
    """What is sent in each second: when its last step ends, in ns from 0, and an export with these times at 0."""
    request, last_ns = ExportTraceServiceRequest(), 0
    for number, (start_ns, end_ns, batch) in enumerate(served(StepTimes(path)), 1):
        if start_ns // _SECOND_NS > last_ns // _SECOND_NS:
            yield last_ns, request.SerializeToString()
            request = ExportTraceServiceRequest()
        if not request.resource_spans:
            resource = request.resource_spans.add()
            resource.resource.attributes.extend(_attribute(*fact) for fact in FACTS.items())
            scope = resource.scope_spans.add()
            scope.scope.name = "vllm.scheduler.step"
            span = scope.spans.add(trace_id=number.to_bytes(16, "big"), span_id=number.to_bytes(8, "big"))
            span.name, span.start_time_unix_nano = f"scheduler_steps_{number}", unix_ns + start_ns
        stamps = {"step.id": number, "step.ts_start_ns": mono_ns + start_ns, "step.duration_us": 100}
        stamps |= {"step.ts_end_ns": mono_ns + start_ns + 100_000}
        stamps |= dict.fromkeys(("step.ts_output_ns", "step.ts_done_ns"), mono_ns + end_ns)
        event = span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=unix_ns + start_ns)
        event.attributes.extend(_attribute(*each) for each in (stamps | batch).items())
        span.end_time_unix_nano, last_ns = unix_ns + end_ns, start_ns


def _attribute(key: str, value: float | str) -> KeyValue:
    kind = {str: "string_value", float: "double_value", int: "int_value"}[type(value)]
    return KeyValue(key=key, value=AnyValue(**{kind: value}))  # type: ignore[arg-type]  # the kind is the value's
