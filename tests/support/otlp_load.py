"""An endless OTLP stream of one busy engine with known coefficients, as the plugin sends it; a function of its seed.

    step_us = BETA_US . (1, prefill tokens, decode context tokens, requests), times 1 % of noise

Steps come from a small engine: requests are prefilled whole in the step that admits them, then decode one token a step,
so that summaries, exact decode context and journeys agree. A lap of exports is encoded once. Every further lap is the
same bytes with step ids, clocks and span ids moved on in place: at these magnitudes a varint keeps its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.support import otlp_bytes as otlp
from tests.support.moving_bytes import (
    MONOTONIC_BYTES,
    STEP_BYTES,
    Wire,
    event,
    identity,
    move_varints,
    moving,
    nested,
    span,
)

BETA_US = {"intercept": 5200.0, "prefill_tokens": 21.5, "decode_context_tokens": 0.035, "requests": 14.0}
STEPS_PER_SPAN, SPANS_PER_RPC = 100, 10
FIRST_STEP = 3 << 20
MONOTONIC_NS = 1 << 50
UNIX_NS = 1_790_000_000_000_000_000
BLOCKS, BLOCK_TOKENS = 1 << 16, 16
BUDGET_TOKENS, SEATS = 2048, 256
ARRIVALS_PER_STEP, OUTPUTS_MEAN = 0.02, 1200


# --- the engine -----------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """A request: prefilled in step ``first`` (of the lap, from 0), its last token made in step ``last``."""

    prompt: int
    outputs: int
    first: int
    last: int


@dataclass
class Lap:
    """What the engine did in n steps; all columns (n,)."""

    columns: dict[str, np.ndarray]
    start_ns: np.ndarray
    cycle_ns: np.ndarray
    served: list[Served] = field(default_factory=list)

    @property
    def duration_ns(self) -> int:
        return int(self.cycle_ns.sum())


def run_engine(n: int, seed: int, arrivals_per_step: float = ARRIVALS_PER_STEP) -> Lap:
    """n steps that begin and end with an idle engine, so that laps follow each other like bursts of one server."""
    rng = np.random.default_rng(seed)
    arrivals = rng.poisson(arrivals_per_step, n)
    outputs_mean = min(OUTPUTS_MEAN, n // 8)
    names = ("prefill_requests", "prefill_tokens", "pairs", "decodes", "context", "waiting", "finished")
    columns = {name: np.zeros(n, np.int64) for name in names}
    finishing = np.zeros(n + 1, np.int64)
    leaving_context = np.zeros(n + 1, np.int64)
    queue: list[tuple[int, int]] = []
    served: list[Served] = []
    decodes = context = 0
    for step in range(n):
        decodes -= int(finishing[step])
        context -= int(leaving_context[step])
        count = max(int(arrivals[step]), int(not decodes and not queue))
        queue += [(int(rng.integers(16, 1500)), 1 + int(rng.exponential(outputs_mean))) for _ in range(count)]
        context += decodes  # each decodes one more token
        columns["decodes"][step], columns["context"][step] = decodes, context
        columns["finished"][step] = finishing[step]
        budget = BUDGET_TOKENS - decodes
        while queue and queue[0][0] <= budget and decodes < SEATS and step < n - 1:
            prompt, wanted = queue.pop(0)
            outputs = min(wanted, n - 1 - step)  # nothing runs when the lap ends
            last = step + outputs - 1
            served.append(Served(prompt, outputs, step, last))
            budget -= prompt
            columns["prefill_requests"][step] += 1
            columns["prefill_tokens"][step] += prompt
            columns["pairs"][step] += prompt * (prompt + 1) // 2
            if outputs > 1:
                decodes += 1
                context += prompt
            finishing[last + 1] += outputs > 1
            leaving_context[last + 1] += (prompt + outputs - 1) * (outputs > 1)
        columns["waiting"][step] = len(queue)
    x = np.stack([np.ones(n), columns["prefill_tokens"], columns["context"], columns["decodes"]
                  + columns["prefill_requests"]], axis=1)  # fmt: skip
    cycle_us = x @ np.array(list(BETA_US.values())) * np.exp(0.01 * rng.standard_normal(n))
    cycle_ns = (cycle_us * 1e3).astype(np.int64)
    start_ns = MONOTONIC_NS + np.concatenate([[0], np.cumsum(cycle_ns)[:-1]])
    return Lap(columns, start_ns, cycle_ns, served)


# --- exports --------------------------------------------------------------------------------------------------------


class Export(NamedTuple):
    """One call: its bytes, and how many summaries and spans are in it."""

    payload: bytes
    steps: int
    spans: int


class Stream:
    """Exports of one engine, without end; ``export(number)`` is a pure function of the arguments and the number."""

    def __init__(
        self, seed: int = 1, *, instance: str = "load-0", spans_per_rpc: int = SPANS_PER_RPC, pool_rpcs: int = 20,
        sample_rate: float = 1.0, requests: bool = False, steps_per_span: int = STEPS_PER_SPAN, model: str = "",
        arrivals_per_step: float = ARRIVALS_PER_STEP, lap_s: float = 0.0,
    ):  # fmt: skip
        """``lap_s``: between the beginnings of two laps, if that is longer than a lap; the engine idles meanwhile."""
        self._steps_per_span = steps_per_span
        self._steps_per_rpc = steps_per_span * spans_per_rpc
        self._steps = self._steps_per_rpc * pool_rpcs
        self.lap = run_engine(self._steps, seed, arrivals_per_step)
        self._lap_ns = max(self.lap.duration_ns, int(lap_s * 1e9))
        rng = np.random.default_rng([seed, 1])
        self._sampled = rng.random(self._steps) < sample_rate
        self._instance, self._model = instance, model
        self._random = rng
        ended: list[list[Served]] = [[] for _ in range(pool_rpcs)]
        for one in self.lap.served if requests else ():
            ended[one.last // self._steps_per_rpc].append(one)
        self._pool = [self._encode(number, finished) for number, finished in enumerate(ended)]

    def export(self, number: int) -> Export:
        """The bytes of one call; every lap over the pool moves ids and clocks on."""
        lap, index = divmod(number, len(self._pool))
        export, places = self._pool[index]
        if not lap:
            return export
        data = np.frombuffer(export.payload, np.uint8).copy()
        move_varints(data, places["step"], lap * self._steps, STEP_BYTES)
        move_varints(data, places["monotonic"], lap * self._lap_ns, MONOTONIC_BYTES)
        for what, move, dtype in (("unix", lap * self._lap_ns, "<u8"), ("id", lap, "<u8"),
                                  ("seconds", lap * self._lap_ns / 1e9, "<f8")):  # fmt: skip
            cells = places[what][:, None] + np.arange(8)
            data[cells] = (data[cells].view(dtype) + np.dtype(dtype).type(move)).view(np.uint8)
        return export._replace(payload=data.tobytes())

    def _encode(self, number: int, finished: Sequence[Served]) -> tuple[Export, dict[str, np.ndarray]]:
        begin = number * self._steps_per_rpc
        firsts = range(begin, begin + self._steps_per_rpc, self._steps_per_span)
        scopes = [_scope("vllm.scheduler.step", [self._step_span(first) for first in firsts])]
        journeys = [self._journey(one) for one in finished]
        if journeys:
            scopes.append(_scope("vllm.scheduler", [core for core, _ in journeys]))
            scopes.append(_scope("vllm.api", [api for _, api in journeys]))
        said = {"service.instance.id": self._instance, **({"vllm.model": self._model} if self._model else {})}
        resource = otlp.field(1, b"".join(otlp.attribute(key, value, number=1) for key, value in said.items()))
        whole = nested(1, resource, *scopes)
        steps = int(self._sampled[begin : begin + self._steps_per_rpc].sum())
        places = {what: np.array([at for kind, at in whole.marks if kind == what], np.int64)
                  for what in ("step", "monotonic", "unix", "id", "seconds")}  # fmt: skip
        return Export(whole.data, steps, len(firsts) + 2 * len(journeys)), places

    def _ids(self, *numbers: int) -> list[Wire]:
        return [identity(number, self._random.bytes(16 if number == 1 else 8)) for number in numbers]

    def _step_span(self, first: int) -> Wire:
        last = first + self._steps_per_span - 1
        summaries = [self._summary(step) for step in range(first, last + 1) if self._sampled[step]]
        bounds = [moving("scheduler.step_range_start", FIRST_STEP + first, "step", 9),
                  moving("scheduler.step_range_end", FIRST_STEP + last, "step", 9)]  # fmt: skip
        times = (_unix(self.lap.start_ns[first]), _unix(self.lap.start_ns[last]))
        name = f"scheduler_steps_{first // self._steps_per_span + 1}"
        return span(self._ids(1, 2), name, *times, [*bounds, *summaries])

    def _summary(self, step: int) -> Wire:
        column = {name: int(values[step]) for name, values in self.lap.columns.items()}
        start_ns, requests = int(self.lap.start_ns[step]), column["decodes"] + column["prefill_requests"]
        done_ns = start_ns + int(self.lap.cycle_ns[step]) - 200_000
        used = min(BLOCKS, (column["context"] + column["prefill_tokens"]) // BLOCK_TOKENS + requests)
        schedule_us = 60 + 2 * requests
        end_ns = start_ns + schedule_us * 1000
        moved = {"step.id": (FIRST_STEP + step, "step"), "step.ts_start_ns": (start_ns, "monotonic"),
                 "step.ts_end_ns": (end_ns, "monotonic"), "step.ts_output_ns": (done_ns - 150_000, "monotonic"),
                 "step.ts_done_ns": (done_ns, "monotonic")}  # fmt: skip
        values = {
            "step.duration_us": schedule_us,
            "queue.running_depth": requests,
            "queue.waiting_depth": column["waiting"],
            "batch.num_prefill_reqs": column["prefill_requests"],
            "batch.num_decode_reqs": column["decodes"],
            "batch.scheduled_tokens": column["decodes"] + column["prefill_tokens"],
            "batch.prefill_tokens": column["prefill_tokens"],
            "batch.decode_tokens": column["decodes"],
            "batch.num_finished": column["finished"],
            "batch.num_preempted": 0,
            "batch.context_tokens": column["context"] + column["prefill_tokens"],
            "batch.context_tokens_multi": column["prefill_tokens"],
            "batch.context_tokens_single": column["context"],
            "batch.num_multi_reqs": column["prefill_requests"],
            "batch.multi_tokens": column["prefill_tokens"],
            "batch.attn_pairs": column["context"] + column["pairs"],
            "plugin.prev_hook_ns": 30_195,
            "plugin.hook_ns": 28_933,
            "kv.blocks_total_gpu": BLOCKS,
            "kv.blocks_free_gpu": BLOCKS - used,
            "kv.usage_gpu_ratio": used / BLOCKS,
        }
        attributes = [moving(key, *moved[key]) if key in moved else otlp.attribute(key, values[key])
                      for key in otlp.PLUGIN_KEYS]  # fmt: skip
        return event("step.BATCH_SUMMARY", _unix(end_ns), attributes)

    def _journey(self, request: Served) -> tuple[Wire, Wire]:
        """The two spans of a finished request: the engine core's and the API process's."""
        trace, core_id, api_id = self._ids(1, 2, 2)
        name = f"chatcmpl-{self._random.bytes(8).hex()}"
        start_ns, cycle_ns = self.lap.start_ns, self.lap.cycle_ns
        queued_ns = int(start_ns[request.first]) - 30_000
        first_ns = int(start_ns[request.first] + cycle_ns[request.first]) - 200_000
        last_ns = int(start_ns[request.last] + cycle_ns[request.last]) - 200_000
        stamps = (
            ("QUEUED", request.first - 1, queued_ns, 0, ()),
            ("SCHEDULED", request.first, queued_ns + 150_000, 0, (("schedule.kind", "FIRST"),)),
            ("FIRST_TOKEN", request.first, first_ns, 1, ()),
            ("FINISHED", request.last, last_ns, request.outputs, (("finish.status", "length"),)),
        )
        core = [event(f"journey.{kind}", _unix(ns), [
            otlp.attribute("event.type", kind), moving("ts.monotonic_ns", ns, "monotonic"),
            moving("scheduler.step", FIRST_STEP + step, "step"),
            otlp.attribute("prefill.total_tokens", request.prompt), otlp.attribute("decode.done_tokens", done),
            otlp.attribute("num_preemptions", 0), *(otlp.attribute(*one) for one in more),
        ]) for kind, step, ns, done, more in stamps]  # fmt: skip
        api_stamps = (("ARRIVED", queued_ns - 2_000_000), ("HANDOFF_TO_CORE", queued_ns - 1_000_000),
                      ("FIRST_RESPONSE_FROM_CORE", first_ns + 1_000_000), ("DEPARTED", last_ns + 900_000))  # fmt: skip
        api = [event(f"api.{kind}", _unix(ns), [moving("event.ts.monotonic", ns / 1e9, "seconds")])
               for kind, ns in api_stamps]  # fmt: skip
        facts = [otlp.attribute(key, value, number=9) for key, value in (
            ("gen_ai.request.id", name), ("gen_ai.response.model", "toy"), ("gen_ai.request.n", 1),
            ("gen_ai.usage.prompt_tokens", request.prompt), ("gen_ai.usage.completion_tokens", request.outputs),
        )]  # fmt: skip
        parent = Wire(otlp.field(4, api_id.data[2:]), (("id", 2),))
        core_name = otlp.attribute("gen_ai.request.id", f"{name}-0a1b2c3d", number=9)
        return (
            span([trace, core_id, parent], "llm_core", _unix(queued_ns), _unix(last_ns + 70_000), [core_name, *core]),
            span([trace, api_id], "llm_request", _unix(api_stamps[0][1]), _unix(last_ns + 10**6), [*facts, *api]),
        )


def _scope(name: str, spans: Sequence[Wire]) -> Wire:
    return nested(2, otlp.field(1, otlp.field(1, name.encode())), *spans)


def _unix(monotonic_ns: int) -> int:
    return int(monotonic_ns) - MONOTONIC_NS + UNIX_NS
