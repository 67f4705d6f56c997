"""What is read from outside: the plugin's own variables, and who this engine is.

Where steps go, and with which headers and certificate, only ``TRACEFITVLLM_*`` says. The general
``OTEL_EXPORTER_OTLP_ENDPOINT`` names the collector of a company's traces: it would get an event for every step, and
the sidecar would get the credentials that were meant for it.
"""

from __future__ import annotations

import logging
import re
import socket
import uuid
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

LOG: Final = logging.getLogger("vllm.plugins.tracefit")
"""Below ``vllm``, whose loggers are the only ones that vLLM configures: a line of another would not be printed."""
DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:20380"
_ENDPOINT: Final = re.compile(
    r"(?P<scheme>tcp|https?)://(?P<host>\[[0-9a-fA-F:.]+\]|[^\s/:@]+)(:(?P<port>\d{1,5}))?(/.*)?"
)
Value = str | bool | int


class SettingError(ValueError):
    """A variable of the environment that cannot be used; the text names it."""


class Settings(NamedTuple):
    """Where steps go."""

    endpoint: str = DEFAULT_ENDPOINT  # tcp://: ForwardPassMetrics are published here; http(s)://: OTLP is sent there
    headers: tuple[tuple[str, str], ...] = ()  # of each OTLP export
    certificate: str = ""  # path of the authority of an https endpoint; empty: those of the system
    resource: Mapping[str, str] = {}  # what the user says of this process


def read_settings(env: Mapping[str, str]) -> Settings:
    """Read the environment.

    Raises:
        SettingError: a value cannot be used.
    """
    resource = _pairs("OTEL_RESOURCE_ATTRIBUTES", env)
    if service := env.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = service
    return Settings(
        _endpoint("TRACEFITVLLM_ENDPOINT", env),
        tuple((key.lower(), value) for key, value in _pairs("TRACEFITVLLM_HEADERS", env).items()),
        env.get("TRACEFITVLLM_CERTIFICATE", ""),
        resource,
    )


def _pairs(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Parse ``k=v,k=v`` with percent-encoded values (W3C baggage, as the OTel variables use it)."""
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in env.get(name, "").split(","))):
        key, sign, value = part.partition("=")
        if not sign or not key.strip():
            raise SettingError(f"{name}: expected key=value pairs, got {part!r}")
        pairs[key.strip()] = unquote(value.strip())
    return pairs


def _endpoint(name: str, env: Mapping[str, str]) -> str:
    """Check an endpoint; OTLP has a port of its own, a publisher must name one."""
    text = env.get(name, "").strip() or DEFAULT_ENDPOINT
    found = _ENDPOINT.fullmatch(text)
    port = int(found["port"] or (0 if found["scheme"] == "tcp" else 4317)) if found else 0
    if not found or not 0 < port < 1 << 16:
        raise SettingError(f"{name}: expected tcp://host:port or http(s)://host:port, got {text!r}")
    return f"{found['scheme']}://{found['host']}:{port}"


def dig(root: Any, path: str) -> Any:
    """Follow a dotted path; None where it ends early."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root


def data_parallel_rank(scheduler: Any) -> int | None:
    """Return the rank of this engine core among those of its server; None where it is the only one.

    A rank of a dense model is told by its core that it is alone (``reconfigure_for_independent_dp_rank``: size 1, rank
    0). What is left of the server it belongs to are its index and the ports drawn for the group.
    """
    parallel = dig(scheduler, "vllm_config.parallel_config")
    index = dig(parallel, "data_parallel_index") or dig(parallel, "data_parallel_rank") or 0
    one_of_several = (dig(parallel, "data_parallel_size") or 1) > 1 or dig(parallel, "_data_parallel_master_port_list")
    return int(index) if index > 0 or one_of_several else None


_KNOBS: Final = {
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "expert_parallel": "parallel_config.enable_expert_parallel",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "data_parallel_rank": "parallel_config.data_parallel_index",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "async_scheduling": "scheduler_config.async_scheduling",
    "max_model_len": "model_config.max_model_len",
    "block_size": "cache_config.block_size",
    "num_gpu_blocks": "cache_config.num_gpu_blocks",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
}
"""Knob and where it is in the VllmConfig."""
_IN_MODEL: Final = {
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        *("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
        *("moe_topk", "moe_top_k", "top_k_experts", "moe_k"),
    ),
}
"""Fact and what models' configurations call it."""
_OFFLOADED: Final = (
    "cache_config.cpu_offload_gb",
    "cache_config.kv_offloading_size",
    "offload_config.uva.cpu_offload_gb",
)


def resource_attributes(scheduler: Any, settings: Settings) -> dict[str, Value]:
    """Who sends, for a resource: ``vllm.<knob>``, ``hw.gpu.name`` and the process.

    What cannot be read is absent; what the user set in ``OTEL_RESOURCE_ATTRIBUTES`` wins.
    """
    config = getattr(scheduler, "vllm_config", None)
    model = dig(config, "model_config")
    served, dtype = dig(model, "served_model_name"), dig(model, "dtype")
    connector = str(dig(config, "kv_transfer_config.kv_connector") or "")
    found: dict[str, Any] = {
        "service.name": "vllm",
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
        "vllm.model": (served[0] if isinstance(served, list) and served else served) or dig(model, "model"),
        "vllm.dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "vllm.quantization": None if model is None else str(dig(model, "quantization") or "none"),
        "vllm.cpu_offload": "Offload" in connector or any(dig(config, path) for path in _OFFLOADED),
        **{f"vllm.{knob}": dig(config, path) for knob, path in _KNOBS.items()},
        **_of_vllm(),
    }
    files = [dig(model, "hf_text_config"), dig(model, "hf_config")]
    for fact, names in _IN_MODEL.items():
        numbers = (dig(file, name) for file in files for name in names)
        found[f"vllm.{fact}"] = next((number for number in numbers if isinstance(number, int)), None)
    told: dict[str, Value] = {key: value for key, value in found.items() if type(value) in (str, bool, int)}
    told |= settings.resource
    rank = data_parallel_rank(scheduler)
    if "service.instance.id" in settings.resource and rank is not None:
        # One environment serves all ranks, and their step ids collide: the instance must tell them apart.
        told["service.instance.id"] = f"{told['service.instance.id']}/dp{rank}"
    return told


def _of_vllm() -> dict[str, Any]:
    """Return vLLM's version and the name of the device, unless asking for it would create a CUDA context here."""
    found: dict[str, Any] = {}
    try:
        import vllm  # type: ignore[import-not-found]  # noqa: PLC0415

        found["vllm.version"] = getattr(vllm, "__version__", None)
        from vllm.platforms import current_platform as platform  # type: ignore[import-not-found]  # noqa: PLC0415

        if not platform.is_cuda() or "nvml" in type(platform).__name__.lower():
            found["hw.gpu.name"] = platform.get_device_name()
    except Exception:
        LOG.debug("tracefit: the device has no name", exc_info=True)
    return found
