"""Step times of GPUs that nobody here has: kernel times that NVIDIA measured, composed for the batch of a step.

``aiconfigurator-core`` (Apache-2.0, offline) ships the kernel times and composes them; nothing of it is copied. It is
imported only when a case is asked for, and only ``make bench WHAT=gpus`` has it, in an environment of its own
(``requirements-gpus.lock``). What it gives is no server's truth, but its shape over batch, context and prompt was
measured.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from online.features.columns import Fact
from online.features.sheets import architecture, model_sheet
from tests.support.vllm_scheduler import StepTimes, Work

CONTEXT_GRAIN, PAST_GRAIN = 256, 64
"""Contexts are rounded to so many tokens, of decodes and of prefills: batches repeat, and are looked up once."""


class Machine(NamedTuple):
    """A model on so many GPUs; ``dtype`` is of the weights, None: as config.json says; a dense model has no experts."""

    model: str
    tensor_parallel: int
    dtype: str | None = "bfloat16"
    experts: int = 0
    experts_per_token: int = 8


DENSE = {
    "qwen1.7b": Machine("Qwen/Qwen3-1.7B", 1),
    "llama8b": Machine("meta-llama/Meta-Llama-3.1-8B", 1),
    "qwen32b": Machine("Qwen/Qwen3-32B", 2),
    "qwen32b-fp8": Machine("Qwen/Qwen3-32B-FP8", 2, "fp8_block"),
    "llama70b": Machine("meta-llama/Meta-Llama-3.1-70B", 4),
}
MIXTURES = {
    "qwen30b-a3b": Machine("Qwen/Qwen3-30B-A3B", 1, experts=128),
    "qwen3.5-35b": Machine("Qwen/Qwen3.5-35B-A3B", 1, experts=256),  # linear attention in most layers
    "qwen235b": Machine("Qwen/Qwen3-235B-A22B", 4, experts=128),
    "minimax-m2.5": Machine("MiniMaxAI/MiniMax-M2.5", 4, "fp8_block", experts=256),
    "deepseek-v3": Machine("deepseek-ai/DeepSeek-V3", 4, "fp8_block", experts=256),  # multi-head latent attention
}
GPUS = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "L40S": "l40s",
    "B200": "b200_sxm",
    "A100": "a100_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "RTX PRO 6000": "rtx_pro_6000_server",
}
"""The package's names."""


def fpm_record(work: Work, wall_s: float = 0.0, **more: Any) -> dict[str, Any]:
    """One ForwardPassMetrics record; ``more``: number, prompt_variance, context_variance, waiting, waiting_tokens."""
    return {
        "version": 1,
        "worker_id": "bench",
        "dp_rank": 0,
        "counter_id": more.get("number", 0),
        "wall_time": wall_s,
        "scheduled_requests": {
            "num_prefill_requests": work.prefill_requests,
            "sum_prefill_tokens": work.prefill_tokens,
            "var_prefill_length": more.get("prompt_variance", 0.0),
            "sum_prefill_kv_tokens": work.prefill_context,
            "num_decode_requests": work.decodes,
            "sum_decode_kv_tokens": work.decode_context,
            "var_decode_kv_tokens": more.get("context_variance", 0.0),
        },
        "queued_requests": {
            "num_prefill_requests": more.get("waiting", 0),
            "sum_prefill_tokens": more.get("waiting_tokens", 0),
            "var_prefill_length": 0.0,
            "num_decode_requests": 0,
            "sum_decode_kv_tokens": 0,
            "var_decode_kv_tokens": 0.0,
        },
    }


def exact_step_times(machine: Machine, gpu: str) -> StepTimes:
    """Microseconds that a step of the machine computes."""
    # beyond two L40S, PCIe is all there is
    degree = min(machine.tensor_parallel, 2) if gpu == "L40S" else machine.tensor_parallel
    native = _perf_model().from_native(
        {
            "schema_version": 1,
            "model_name": machine.model,
            "system_name": GPUS[gpu],
            "backend": "vllm",
            "backend_version": None,
            "tp_size": degree,
            "pp_size": 1,
            "weight_dtype": machine.dtype,
            "activation_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "moe_dtype": machine.dtype if machine.experts else None,
            "moe_tp_size": degree if machine.experts else None,
            "moe_ep_size": 1 if machine.experts else None,
            "attention_dp_size": 1,
        }
    )
    return lambda work: 1e3 * native.estimate_forward_pass_time_ms([fpm_record(work)])


def step_times(machine: Machine, gpu: str) -> StepTimes:
    """The same, of rounded contexts, each of which is looked up once."""
    exact_us, known = exact_step_times(machine, gpu), dict[Work, float]()

    def us(work: Work) -> float:
        decode_context = round(work.decode_context / CONTEXT_GRAIN) * CONTEXT_GRAIN
        past = round(work.prefill_context / PAST_GRAIN) * PAST_GRAIN
        key = work._replace(prefill_context=past, decode_context=max(decode_context, work.decodes))
        if key not in known:
            known[key] = exact_us(key)
        return known[key]

    return us


def package_directory() -> Path:
    """Where the package lies, with model files and tables."""
    import aiconfigurator_core

    return Path(aiconfigurator_core.__file__).parent


def model_file(model: str) -> Path:
    """The ``config.json`` of a model, as the package ships it."""
    return package_directory() / "model_configs" / f"{model.replace('/', '--')}_config.json"


def model_facts(model: str) -> dict[str, Fact]:
    """What its ``config.json`` says."""
    return architecture(json.loads(model_file(model).read_text()))


def fits(machine: Machine, gpu: str) -> bool:
    """Whether the weights leave a tenth of the GPUs' memory, as far as config.json tells; the forty are not asked."""
    system = (package_directory() / "systems" / f"{GPUS[gpu]}.yaml").read_text()
    (memory,) = re.findall(r"mem_capacity: *(\d+)", system)
    sheet, _ = model_sheet(model_facts(machine.model))
    return sheet is None or sheet.weight_bytes < 0.9 * machine.tensor_parallel * int(memory)


class NvidiaRegression:
    """The regression that the package itself learns from ForwardPassMetrics: linear in a step's sums, per its kind."""

    def __init__(self) -> None:
        self._model = _perf_model().from_regression()

    def learn(self, records: list[Mapping[str, Any]]) -> None:
        """Steps with their times."""
        self._model.tune_with_fpms([[record] for record in records])

    def us(self, work: Work) -> float | None:
        """What it says of a step; None before it has seen enough of that kind."""
        milliseconds = self._model.estimate_forward_pass_time_ms([fpm_record(work)])
        return None if milliseconds is None else 1e3 * milliseconds


def _perf_model() -> Any:
    from aiconfigurator_core.sdk.rust_engine_step import RustForwardPassPerfModel

    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    return RustForwardPassPerfModel
