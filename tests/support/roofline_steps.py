"""Streams of scheduler steps whose time is not linear in anything: rooflines, padded shapes, floors, stalls, slowdowns.

    device_us = layers . max(floor, linear(T) + attention + all-reduce) + head
    linear(T) = ((bytes / bandwidth)^3 + (2 T' weights / peak)^3)^(1/3),  T' = T padded as graphs and tiles pad it
    step_us   = host_us + device_us, or the greater of the two where scheduling is asynchronous

times white and slow multiplicative noise, plus stalls. Requests come at a share of what the seats can serve, are
prefilled in chunks behind the decodes, and grow their context by a token a step. Seeded and pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from online.features.sheets import architecture
from online.rows import STEP_FEATURES, RowBlock
from tests.support.sheet_cases import shipped_sheets

BLOCK_TOKENS = 16
WARM_UP_STEPS = 60

_LLAMA = {"model_type": "llama", "num_local_experts": 0}
MODELS = {
    "llama-2-7b": _LLAMA | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
                            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000},
    "llama-3-8b": _LLAMA | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
                            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "codellama-34b": _LLAMA | {"num_hidden_layers": 48, "hidden_size": 8192, "intermediate_size": 22016,
                               "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000},
    "llama-2-70b": _LLAMA | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
                             "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000},
    "mixtral-8x7b": {"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000,
                     "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
                     "num_local_experts": 8, "num_experts_per_tok": 2},
}  # fmt: skip
"""Shapes from the models' own config.json."""

WORKLOADS = {
    "chat": (500, 0.6, 250, 0.5),
    "code": (700, 0.4, 200, 0.4),
    "summaries": (1800, 0.4, 40, 0.5),
    "stories": (120, 0.5, 450, 0.4),
    "reasoning": (400, 0.5, 1100, 0.5),
}
"""Prompt tokens and output tokens: median and spread of the logarithm of each."""


@dataclass(frozen=True)
class Segment:
    """A part of a stream: its share of the steps, its workload, and how much of the seats it asks for."""

    share: float
    workload: str
    load: float


@dataclass(frozen=True)
class Slowdown:
    """From a share of the stream on, everything takes ``gain`` times as long."""

    since: float
    gain: float


@dataclass(frozen=True)
class Machine:
    """One served configuration."""

    model: str
    gpu: str
    tensor_parallel: int
    seats: int
    budget: int
    blocks: int
    host_us: float
    asynchronous: bool = False
    cached_share: float = 0.0

    def facts(self) -> dict:
        """What identity and sheets would say of it."""
        sheet = shipped_sheets()[self.gpu]
        return {
            **architecture(MODELS[self.model]),
            **sheet.facts("bfloat16"),
            "gpu": self.gpu,
            "tensor_parallel_size": self.tensor_parallel,
            "max_num_batched_tokens": self.budget,
            "max_num_seqs": self.seats,
            "max_model_len": 4096,
            "block_size": BLOCK_TOKENS,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": self.cached_share > 0,
        }


MACHINES = {
    "7b_h100": Machine("llama-2-7b", "H100-SXM", 1, 128, 2048, 7_000, 1800.0),
    "70b_h100_tp4": Machine("llama-2-70b", "H100-SXM", 4, 128, 2048, 25_000, 2300.0),
    "mixtral_h100_tp2": Machine("mixtral-8x7b", "H100-SXM", 2, 128, 2048, 24_000, 2100.0),
    "34b_h100_tp2": Machine("codellama-34b", "H100-SXM", 2, 128, 2048, 20_000, 2000.0),
    "8b_a100": Machine("llama-3-8b", "A100-80", 1, 256, 4096, 24_000, 2500.0, cached_share=0.3),
    "8b_h100_async": Machine("llama-3-8b", "H100-SXM", 1, 256, 8192, 26_000, 2200.0, True, 0.4),
}


class Physics:
    """Time of one step of a machine, without noise."""

    def __init__(self, machine: Machine):
        model, sheet = MODELS[machine.model], shipped_sheets()[machine.gpu].facts("bfloat16")
        tp, heads = machine.tensor_parallel, model["num_attention_heads"]
        width, self._layers = model["hidden_size"], model["num_hidden_layers"]
        head = width // heads
        self._machine, self._width = machine, width
        self._bytes_us = 0.8e3 * sheet["memory_bandwidth_gb_s"]
        self._flop_us = 1e6 * sheet["peak_tflops"]
        self._attention = (2 * width * width + 2 * width * model["num_key_value_heads"] * head) / tp
        self._ffn = 3 * width * model["intermediate_size"] / tp
        self._experts, self._chosen = model["num_local_experts"], model.get("num_experts_per_tok", 1)
        self._kv_bytes = 4 * model["num_key_value_heads"] * head / tp
        self._pair_flop = 4 * heads * head / tp
        self._head_us = 2 * width * model["vocab_size"] / tp / self._bytes_us
        self._link_bytes_us = 0.2e3 * sheet["link_gb_s"]

    def step_us(self, prefill_tokens: int, pairs: float, decodes: int, context: float, requests: int) -> float:
        tokens = prefill_tokens + decodes
        tile = 8 if not prefill_tokens else 64
        padded = tile * math.ceil(tokens / tile)
        read = used = self._ffn
        if self._experts:
            read = self._ffn * self._experts * (1 - (1 - self._chosen / self._experts) ** padded)
            used = self._ffn * self._chosen
        layer = self._linear_us(self._attention, self._attention, padded) + self._linear_us(read, used, padded)
        layer += max(4.0, context * self._kv_bytes / self._bytes_us) if decodes else 0.0
        layer += 7.0 + pairs * self._pair_flop / (0.45 * self._flop_us) if prefill_tokens else 0.0
        if self._machine.tensor_parallel > 1:
            layer += 2 * (9.0 + tokens * self._width * 2 / self._link_bytes_us)
        if prefill_tokens:
            layer = max(layer, 40.0)  # kernels are launched one by one
        device = self._layers * layer + self._head_us + 25.0
        host = self._machine.host_us + 12.0 * requests + 0.1 * tokens
        return max(device, host) + 250.0 if self._machine.asynchronous else device + host

    def _linear_us(self, read: float, used: float, tokens: int) -> float:
        memory_us, compute_us = 2 * read / self._bytes_us, 2 * used * tokens / (0.6 * self._flop_us)
        return (memory_us**3 + compute_us**3) ** (1 / 3)


@dataclass(frozen=True)
class Stream:
    """Rows of one step each; what was no ordinary step; and the segment of each, all (n,)."""

    machine: Machine
    rows: RowBlock
    outlier: np.ndarray
    segment: np.ndarray


@dataclass
class _Seats:
    """Who is being served: decodes as arrays, prefills as [computed, prompt, outputs] in order."""

    context: np.ndarray
    left: np.ndarray
    prefills: list[list[int]]
    waiting: list[list[int]]

    def running(self) -> int:
        return len(self.context) + len(self.prefills)

    def blocks(self) -> int:
        held = sum(-(-prefill[1] // BLOCK_TOKENS) for prefill in self.prefills)
        return int(np.ceil(self.context / BLOCK_TOKENS).sum()) + held


def simulate(
    name: str, n: int, seed: int, segments: Sequence[Segment], slowdowns: Sequence[Slowdown] = ()
) -> Stream:  # fmt: skip
    """n busy steps of a machine."""
    machine, rng = MACHINES[name], np.random.default_rng([seed, *name.encode()])
    physics, seats = Physics(machine), _Seats(np.zeros(0), np.zeros(0), [], [])
    ends = np.cumsum([segment.share for segment in segments])
    segment_of = np.minimum(np.searchsorted(ends / ends[-1], np.arange(n) / n, side="right"), len(segments) - 1)
    lines = np.full((n, len(STEP_FEATURES)), np.nan)
    clean_us, outlier = np.empty(n), np.zeros(n, bool)
    shapes: set[int] = set()
    for step in range(n):
        _arrive(seats, machine, segments[segment_of[step]], rng)
        values = _advance(seats, machine)
        requests = int(values["requests"])
        clean_us[step] = physics.step_us(
            int(values["prefill_tokens"]), values["prefill_attention"], int(values["decode_requests"]),
            values["decode_context_tokens"], requests,
        )  # fmt: skip
        for feature, value in values.items():
            lines[step, STEP_FEATURES.index(feature)] = value
        shape = -int(values["prefill_tokens"] // 512) - 1 if values["prefill_tokens"] else requests // 8
        outlier[step] = shape not in shapes  # the first step of a shape compiles
        shapes.add(shape)
    elapsed_us, odd = _disturbed(clean_us, outlier, rng)
    for slowdown in slowdowns:
        elapsed_us[int(slowdown.since * n) :] *= slowdown.gain
    rows = RowBlock.of_lines(lines, elapsed_us, end_ns=np.cumsum(elapsed_us * 1e3).astype(np.int64))
    return Stream(machine, rows, odd, segment_of)


def _arrive(seats: _Seats, machine: Machine, segment: Segment, rng: np.random.Generator) -> None:
    prompt, prompt_spread, outputs, outputs_spread = WORKLOADS[segment.workload]
    room = min(machine.seats, 0.8 * machine.blocks * BLOCK_TOKENS / (prompt + outputs))
    per_step = segment.load * min(room / outputs, 0.9 * machine.budget / prompt)
    count = rng.poisson(per_step) if len(seats.waiting) < 2 * machine.seats else 0
    for _ in range(max(count, int(not seats.running() and not seats.waiting))):
        tokens = int(np.clip(prompt * math.exp(prompt_spread * rng.standard_normal()), 4, 3500))
        cached = 0
        if machine.cached_share and rng.random() < 2 * machine.cached_share:
            cached = min(int(rng.random() * tokens) // BLOCK_TOKENS * BLOCK_TOKENS, tokens - 1)
        produced = int(np.clip(outputs * math.exp(outputs_spread * rng.standard_normal()), 1, 3000))
        seats.waiting.append([cached, tokens, produced])


def _advance(seats: _Seats, machine: Machine) -> dict[str, float]:
    """One step: decodes first, then prefills in order, then whoever waits and fits; its raw features."""
    free = machine.blocks - seats.blocks()
    while seats.waiting and seats.running() < machine.seats and free > -(-seats.waiting[0][1] // BLOCK_TOKENS) + 8:
        seats.prefills.append(seats.waiting.pop(0))
        free -= -(-seats.prefills[-1][1] // BLOCK_TOKENS)
    decodes, running = len(seats.context), seats.running()
    seats.context += 1
    context = float(seats.context.sum())
    budget, tokens, pairs, prefilling = machine.budget - decodes, 0, 0.0, 0
    for prefill in seats.prefills:
        now = min(budget, prefill[1] - prefill[0])
        if now <= 0:
            break
        pairs += now * (prefill[0] + now / 2)
        prefill[0] += now
        tokens, budget, prefilling = tokens + now, budget - now, prefilling + 1
    used = seats.blocks()
    seats.left -= 1
    ready = [prefill for prefill in seats.prefills if prefill[0] >= prefill[1]]
    seats.prefills = [prefill for prefill in seats.prefills if prefill[0] < prefill[1]]
    going = seats.left > 0
    more = [prefill for prefill in ready if prefill[2] > 1]
    seats.context = np.concatenate([seats.context[going], [prefill[1] for prefill in more]])
    seats.left = np.concatenate([seats.left[going], [prefill[2] - 1 for prefill in more]])
    return {
        "prefill_tokens": tokens, "prefill_requests": prefilling, "decode_requests": decodes, "decode_tokens": decodes,
        "decode_context_tokens": context, "prefill_attention": pairs, "requests": decodes + prefilling,
        "running": running, "waiting": len(seats.waiting), "kv_blocks_used": used,
        "kv_usage_ratio": used / machine.blocks,
    }  # fmt: skip


def _disturbed(clean_us: np.ndarray, odd: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Times with noise, and which are outliers: compiling, stalled, collecting garbage, or warming up."""
    n = len(clean_us)
    slow, drift = np.empty(n), 0.0
    for step, shock in enumerate(rng.standard_normal(n)):
        drift = 0.995 * drift + 0.0006 * shock
        slow[step] = drift
    elapsed_us = clean_us * np.exp(0.01 * rng.standard_normal(n) + slow) + rng.exponential(60.0, n)
    stalled, collected = rng.random(n) < 0.004, rng.random(n) < 0.0002
    elapsed_us += stalled * 1500.0 * (1 + rng.pareto(1.8, n)) + collected * rng.uniform(30e3, 90e3, n)
    elapsed_us += odd * rng.uniform(15e3, 250e3, n)
    warm_up = np.arange(n) < WARM_UP_STEPS
    elapsed_us *= np.where(warm_up, 1 + 3 * np.exp(-np.arange(n) / 15), 1.0)
    return elapsed_us, odd | stalled | collected | warm_up
