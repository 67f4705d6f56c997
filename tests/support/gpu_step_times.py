"""Write ``tests/data/gpu_step_times.json``: how long a step takes on GPUs, by its batch.

Step times are composed from the kernel times that NVIDIA measured (:mod:`tests.support.gpu_kernels`). No test needs
that package: in the environment of ``make bench WHAT=gpus`` the table is written anew.

    python -m tests.support.gpu_step_times
"""

from __future__ import annotations

import json

from tests.support.gpu_kernels import DENSE, MIXTURES, Machine, exact_step_times
from tests.support.paths import DATA
from tests.support.vllm_scheduler import Work

PREFILL_TOKENS = (0, 16, 64, 128, 256, 512, 1024, 2048)
DECODES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 1024, 4096)
"""Grid: prompt tokens of a step, requests that decode in it, tokens of context of each."""
MACHINES = {
    "llama8b-h100": (DENSE["llama8b"], "H100"),
    "qwen32b-h200": (DENSE["qwen32b"], "H200"),
    "qwen30a3-h200": (MIXTURES["qwen30b-a3b"], "H200"),
}


def measure() -> dict[str, object]:
    """Microseconds of each machine at each point of the grid, (prefill, decodes, contexts)."""
    return {
        "prefill_tokens": PREFILL_TOKENS,
        "decodes": DECODES,
        "contexts": CONTEXTS,
        "step_us": {name: _grid(*machine) for name, machine in MACHINES.items()},
    }


def _grid(machine: Machine, gpu: str) -> list[list[list[float]]]:
    us = exact_step_times(machine, gpu)

    def step_us(prefill_tokens: int, decodes: int, context: int) -> float:
        work = Work(prefill_tokens, int(prefill_tokens > 0), 0, decodes, decodes * context)
        return round(us(work), 1) if prefill_tokens or decodes else 0.0

    return [[[step_us(p, d, c) for c in CONTEXTS] for d in DECODES] for p in PREFILL_TOKENS]


if __name__ == "__main__":
    (DATA / "gpu_step_times.json").write_text(json.dumps(measure(), separators=(",", ":")) + "\n")
