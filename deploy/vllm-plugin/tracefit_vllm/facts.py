"""Who is this engine: resource attributes from vLLM's configuration.

``vllm.<knob>`` with tracefit's names of the knobs, ``hw.gpu.name``, and the process. What cannot be read is absent;
what the user set in ``OTEL_RESOURCE_ATTRIBUTES`` wins.
"""

from __future__ import annotations

import importlib
import os
import socket
import uuid
from collections.abc import Mapping
from typing import Any, Final

from . import __version__
from .settings import Settings
from .wire import Value

KNOBS: Final = (
    ("vllm.tensor_parallel_size", ("parallel_config.tensor_parallel_size",)),
    ("vllm.pipeline_parallel_size", ("parallel_config.pipeline_parallel_size",)),
    ("vllm.expert_parallel", ("parallel_config.enable_expert_parallel",)),
    ("vllm.data_parallel_size", ("parallel_config.data_parallel_size",)),
    ("vllm.data_parallel_rank", ("parallel_config.data_parallel_index", "parallel_config.data_parallel_rank")),
    ("vllm.max_num_seqs", ("scheduler_config.max_num_seqs",)),
    ("vllm.max_num_batched_tokens", ("scheduler_config.max_num_batched_tokens",)),
    ("vllm.enable_chunked_prefill", ("scheduler_config.enable_chunked_prefill",)),
    ("vllm.max_model_len", ("model_config.max_model_len",)),
    ("vllm.block_size", ("cache_config.block_size",)),
    ("vllm.num_gpu_blocks", ("cache_config.num_gpu_blocks",)),
    ("vllm.enable_prefix_caching", ("cache_config.enable_prefix_caching",)),
    ("vllm.max_concurrent_batches", ("max_concurrent_batches",)),
    (
        "vllm.num_experts",
        tuple(
            f"model_config.{file}.{name}"
            for file in ("hf_text_config", "hf_config")
            for name in ("num_local_experts", "n_routed_experts", "num_experts")
        ),
    ),
    (
        "vllm.num_experts_per_tok",
        tuple(
            f"model_config.{file}.{name}"
            for file in ("hf_text_config", "hf_config")
            for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
        ),
    ),
)
"""Attribute and where it is in the VllmConfig: the first path that leads to a number or a flag."""


def dig(root: Any, path: str) -> Any:
    """Follow a dotted path; None where it ends early."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root


def resource_attributes(scheduler: Any, settings: Settings) -> dict[str, Value]:
    """Return the resource of one scheduler's telemetry."""
    config = getattr(scheduler, "vllm_config", None)
    found: dict[str, Value] = {
        "service.name": settings.service_name,
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "telemetry.source": f"tracefit-vllm/{__version__}",
    }
    version = _imported("vllm", "__version__")
    if isinstance(version, str):
        found["vllm.version"] = version
    for key, paths in KNOBS:
        value = next((v for v in (dig(config, path) for path in paths) if isinstance(v, bool | int)), None)
        if value is not None:
            found[key] = value
    found.update(_model(config))
    asynchronous = dig(config, "scheduler_config.async_scheduling")
    by_name = any(base.__name__ == "AsyncScheduler" for base in type(scheduler).__mro__)
    found["vllm.async_scheduling"] = bool(asynchronous) or by_name
    found["vllm.cpu_offload"] = _offloads(config)
    device = _device_name()
    if device:
        found["hw.gpu.name"] = device
    return _with_users(found, settings.resource, _data_parallel_rank(config))


def _imported(module: str, name: str) -> Any:
    """Return what a module of the host has; None without either. Who has a scheduler has imported all of them."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _model(config: Any) -> dict[str, Value]:
    found: dict[str, Value] = {}
    served = dig(config, "model_config.served_model_name")
    model = (served[0] if isinstance(served, list) and served else served) or dig(config, "model_config.model")
    if isinstance(model, str):
        found["vllm.model"] = model
    dtype = dig(config, "model_config.dtype")
    if dtype is not None:
        found["vllm.dtype"] = str(dtype).removeprefix("torch.")
    if dig(config, "model_config") is not None:
        found["vllm.quantization"] = str(dig(config, "model_config.quantization") or "none")
    return found


def _offloads(config: Any) -> bool:
    """Tell whether weights or KV blocks can move to the host's memory."""
    connector = str(dig(config, "kv_transfer_config.kv_connector") or "")
    sizes = ("cache_config.cpu_offload_gb", "cache_config.kv_offloading_size", "offload_config.uva.cpu_offload_gb")
    return "Offload" in connector or any(bool(dig(config, path)) for path in sizes)


def _device_name() -> str:
    """Ask vLLM's platform for the device's name, unless that would create a CUDA context in this process."""
    platform = _imported("vllm.platforms", "current_platform")
    if platform is None:
        return ""
    is_cuda = getattr(platform, "is_cuda", None)
    if is_cuda is not None and is_cuda() and "nvml" not in type(platform).__name__.lower():
        cuda = _imported("torch", "cuda")
        if cuda is None or not cuda.is_initialized():
            return ""
    try:
        return str(platform.get_device_name())
    except Exception:  # noqa: BLE001 a platform without names has none
        return ""


def _with_users(found: dict[str, Value], users: Mapping[str, str], rank: int | None) -> dict[str, Value]:
    merged: dict[str, Value] = {**found, **users}
    if "service.instance.id" in users and rank is not None:
        # One environment serves all ranks, and their step ids collide: the instance must tell them apart.
        merged["service.instance.id"] = f"{users['service.instance.id']}/dp{rank}"
    return merged


def _data_parallel_rank(config: Any) -> int | None:
    """Return the rank of this engine core among those of its server; None where it is the only one.

    A rank of a dense model is told by its core that it is alone (``reconfigure_for_independent_dp_rank``: size 1, rank
    0). What is left of the server it belongs to are its index and the ports drawn for the group.
    """
    parallel = getattr(config, "parallel_config", None)
    index = next((n for n in (dig(parallel, "data_parallel_index"), dig(parallel, "data_parallel_rank")) if n), 0)
    of_several = dig(parallel, "data_parallel_size") or 1
    drawn_ports = dig(parallel, "_data_parallel_master_port_list")
    return int(index) if index > 0 or of_several > 1 or drawn_ports else None
