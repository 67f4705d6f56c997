"""A vLLM server on a GPU for the tests that run everywhere: the simulated scheduler on a small table of step times.

The table is ``tests/data/gpu_step_times.json``, see :mod:`tests.support.gpu_step_times`. The scheduler is that of
:mod:`tests.support.vllm_scheduler`, what it sends is written by :mod:`tests.support.vllm_senders`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from tests.support import vllm_senders
from tests.support.paths import DATA
from tests.support.vllm_scheduler import BLOCK_SIZE, Engine, Limits, Traffic, Work

LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, kv_blocks=31_250, asynchronous=False)
MIXES = ((300, 150), (1500, 100), (150, 400), (700, 60), (500, 250))
"""Mean prompt and output tokens of the requests; every ten seconds another mix, at another share of the capacity."""
SHARES = (0.1, 0.3, 0.5, 0.7)
PHASE_S = 10.0
FACTS = {
    "llama8b-h100": ("meta-llama/Meta-Llama-3.1-8B", "H100", 1),
    "qwen32b-h200": ("Qwen/Qwen3-32B", "H200", 2),
    "qwen30a3-h200": ("Qwen/Qwen3-30B-A3B", "H200", 1),
}


class StepTimes:
    """The table: microseconds by prompt tokens, decoding requests and tokens of context of each."""

    def __init__(self, path: Path, machine: str) -> None:
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


@cache
def _times(machine: str) -> StepTimes:
    return StepTimes(DATA / "gpu_step_times.json", machine)


@cache
def kernels_us(machine: str, prefill_tokens: int, decodes: int, context: int) -> float:
    """Time of one forward pass; ``context`` of each decode."""
    return _times(machine).us(prefill_tokens, decodes, context)


def work_us(machine: str, work: Work) -> float:
    """The same for the work of one step."""
    return kernels_us(machine, work.prefill_tokens, work.decodes, work.decode_context // max(work.decodes, 1))


def open_loop(machine: str, seconds: float, seed: int) -> Traffic:
    """Requests that arrive at random, in mixes that change every ten seconds."""
    traffic, start = Traffic(seed), 0.0
    while start < seconds:
        prompt, output = traffic.rng.choice(MIXES)
        decode_us = kernels_us(machine, 0, 48, prompt + output // 2) * output / 48
        per_s = traffic.rng.choice(SHARES) * 1e6 / (decode_us + kernels_us(machine, prompt, 0, 0))
        stop = min(start + PHASE_S, seconds)
        traffic.poisson(int(start * 1e9), int(stop * 1e9), per_s, prompt, output)
        start = stop
    return traffic


def serve(
    machine: str,
    seconds: float,
    seed: int,
    *,
    slower: Callable[[float, float], float] = lambda _second, us: us,
    asynchronous: bool = False,
    traffic: Traffic | None = None,
) -> Engine:
    """Serve for so many seconds; ``slower`` says what a step takes when something happened to the machine.

    Args:
        machine: one of ``FACTS``.
        seconds: of traffic.
        seed: of arrivals and noise.
        slower: (second, us) -> us.
        asynchronous: the engine schedules a step while the one before runs.
        traffic: an open loop, if none is given.
    """

    def step_us(work: Work) -> float:
        return slower(engine.steps[-1].start / 1e9, work_us(machine, work))

    limits = LIMITS._replace(asynchronous=asynchronous)
    engine = Engine(step_us, traffic or open_loop(machine, seconds, seed), limits, seed=seed)
    return engine.run(int(seconds * 1e9))


def facts(machine: str, instance: str = "") -> dict[str, object]:
    """The attributes of its resource."""
    model, gpu, degree = FACTS[machine]
    return {
        "service.instance.id": instance or machine,
        "vllm.model": model,
        "hw.gpu.name": gpu,
        "vllm.tensor_parallel_size": degree,
        "vllm.version": "0.33.0",
        "vllm.max_num_seqs": LIMITS.max_num_seqs,
        "vllm.max_num_batched_tokens": LIMITS.max_num_batched_tokens,
        "vllm.block_size": BLOCK_SIZE,
    }


def step_exports(machine: str, engine: Engine) -> Iterator[bytes]:
    """As the producer plugin sends them."""
    return vllm_senders.step_exports(engine, facts(machine))


def request_exports(machine: str, engine: Engine) -> Iterator[bytes]:
    """As vLLM sends them without any plugin: one span for each finished request, nothing of the steps."""
    return vllm_senders.span_exports(engine, facts(machine))


def step_payloads(count: int, per_export: int = 100, seed: int = 1) -> list[bytes]:
    """So many exports of one engine, named by its seed."""
    machine = "llama8b-h100"
    engine = serve(machine, 10.0 + count * per_export * 0.012, seed)
    exports = vllm_senders.step_exports(engine, facts(machine, f"engine-{seed}"), per_export)
    return list(islice(exports, count))
