"""Write ``tests/data/gpu_step_times.json``: how long a step takes on GPUs, by its batch.

Step times are composed from the kernel times that NVIDIA measured and ships in ``aiconfigurator-core`` (Apache-2.0). No
test needs that package: it is installed by hand, into an environment of its own, to write the table anew.

    pip install aiconfigurator-core==0.12.0
    python -m tests.support.gpu_step_times
"""

from __future__ import annotations

import json
from pathlib import Path

PREFILL_TOKENS = (0, 16, 64, 128, 256, 512, 1024, 2048)
DECODES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 1024, 4096)
"""Grid: prompt tokens of a step, requests that decode in it, tokens of context of each."""
MACHINES = {
    "llama8b-h100": ("meta-llama/Meta-Llama-3.1-8B", "h100_sxm", 1, None),
    "qwen32b-h200": ("Qwen/Qwen3-32B", "h200_sxm", 2, None),
    "qwen30a3-h200": ("Qwen/Qwen3-30B-A3B", "h200_sxm", 1, "bfloat16"),
}
"""By name: model, system, tensor-parallel size, type of the experts' weights where there are any."""


def measure() -> dict[str, object]:
    """Microseconds of each machine at each point of the grid, (prefill, decodes, contexts)."""
    return {
        "prefill_tokens": PREFILL_TOKENS,
        "decodes": DECODES,
        "contexts": CONTEXTS,
        "step_us": {name: _step_times(*machine) for name, machine in MACHINES.items()},
    }


def _step_times(model: str, system: str, degree: int, experts: str | None) -> list[list[list[float]]]:
    from aiconfigurator_core.sdk.rust_engine_step import RustForwardPassPerfModel

    times = RustForwardPassPerfModel.from_native(
        {
            "schema_version": 1,
            "model_name": model,
            "system_name": system,
            "backend": "vllm",
            "backend_version": None,
            "tp_size": degree,
            "pp_size": 1,
            "weight_dtype": "bfloat16",
            "activation_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "moe_dtype": experts,
            "moe_tp_size": degree if experts else None,
            "moe_ep_size": 1 if experts else None,
            "attention_dp_size": 1,
        }
    )

    def step_us(prefill_tokens: int, decodes: int, context: int) -> float:
        if not prefill_tokens and not decodes:
            return 0.0
        record = {
            "version": 1,
            "worker_id": "table",
            "dp_rank": 0,
            "counter_id": 0,
            "wall_time": 0.0,
            "scheduled_requests": {
                "num_prefill_requests": int(prefill_tokens > 0),
                "sum_prefill_tokens": prefill_tokens,
                "var_prefill_length": 0.0,
                "sum_prefill_kv_tokens": 0,
                "num_decode_requests": decodes,
                "sum_decode_kv_tokens": decodes * context,
                "var_decode_kv_tokens": 0.0,
            },
            "queued_requests": {
                "num_prefill_requests": 0,
                "sum_prefill_tokens": 0,
                "var_prefill_length": 0.0,
                "num_decode_requests": 0,
                "sum_decode_kv_tokens": 0,
                "var_decode_kv_tokens": 0.0,
            },
        }
        return round(1e3 * times.estimate_forward_pass_time_ms([record]), 1)

    return [[[step_us(p, d, c) for c in CONTEXTS] for d in DECODES] for p in PREFILL_TOKENS]


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "data" / "gpu_step_times.json"
    path.write_text(json.dumps(measure(), separators=(",", ":")) + "\n")
