"""A model on its hardware with its engine's knobs: what the feature formulas read.

    per GPU of a tensor-parallel group:   flops / tp   weights / tp   KV / min(tp, Hkv)   MLA: the latent on every GPU

All ``*_us`` are microseconds at the data-sheet limit: bytes / (B 1e-6), flops / (F 1e-6); a coefficient of 1 on such a
column says "as fast as the sheet". Knobs that are not known are None, and a set that needs one is not offered.

Hardware sheets are the data-sheet limits of a GPU. The table itself is ``hardware.json`` beside this file.

Peaks are dense (without structured sparsity), per GPU, per direction where a link is concerned as the maker counts it
(NVLink: both directions together).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from online.constants import VALUE_MAX
from online.features.columns import Fact, Facts, share_touched
from online.rows import Floats

from .model import ModelSheet, model_sheet


class HardwareSheet(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    ``tflops``: peak dense TFLOP/s by dtype (``bf16``, ``fp16``, ``fp8``, ``int8``, ``fp32``). ``sm_count``: streaming
    multiprocessors, or compute units. ``link_gb_s``: to the other GPUs of the node, None where the only way is the host
    link; that is PCIe or the like, both directions together. ``source``: where the numbers are from. ``aliases``: other
    spellings, as ``hw.gpu.name`` may have them.
    """

    name: str
    tflops: dict[str, float]
    memory_bandwidth_gb_s: float
    memory_gb: float
    source: str
    sm_count: int | None = None
    link_gb_s: float | None = None
    host_link_gb_s: float | None = None
    aliases: tuple[str, ...] = ()
    note: str = ""

    def peak_tflops(self, dtype: str) -> float:
        """Peak for a dtype; the nearest slower one the sheet has where it does not have it."""
        for name in _FALLBACK.get(dtype, (dtype,)):
            if name in self.tflops:
                return self.tflops[name]
        return min(self.tflops.values())

    def facts(self, dtype: str) -> dict[str, Fact]:
        """The sheet as facts of a configuration that computes in ``dtype``."""
        names = ("memory_bandwidth_gb_s", "memory_gb", "sm_count", "link_gb_s", "host_link_gb_s")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"peak_tflops": self.peak_tflops(dtype), **known}


_FALLBACK = {
    "bfloat16": ("bf16", "fp16"),
    "float16": ("fp16", "bf16"),
    "auto": ("bf16", "fp16"),
    "float32": ("tf32", "fp32"),
    "fp8": ("fp8", "int8", "bf16", "fp16"),
}


def hardware_sheets(table: Mapping[str, Mapping[str, Any]]) -> dict[str, HardwareSheet]:
    """Sheets by name, from the parsed table beside this file."""
    return {name: msgspec.convert({"name": name, **entry}, HardwareSheet) for name, entry in table.items()}


_ANOTHER = frozenset({"mig", "laptop", "d", "s"})
"""Words of a part of a GPU, and of one that is slower or faster than its namesake: ``RTX 4090 D``, ``V100S``."""


def find(sheets: Mapping[str, HardwareSheet], gpu: str) -> HardwareSheet | None:
    """The sheet a GPU's name means: ``NVIDIA H100 80GB HBM3`` is the H100 SXM; None for a name nobody knows."""
    wanted = _words(gpu)
    found = [
        (len(words), sheet, wanted.replace(words, " "))
        for sheet in sheets.values()
        for alias in (sheet.name, *sheet.aliases)
        if (words := _words(alias)).strip() and words in wanted
    ]
    _, sheet, others = max(found, key=lambda each: each[0], default=(0, None, ""))
    return None if _ANOTHER & set(others.split()) else sheet


def _words(text: str) -> str:
    """Letters and numbers apart, so that an L40 is no L4."""
    return f" {' '.join(re.findall('[a-z]+|[0-9]+', text.lower()[:256]))} "


# ------------------------------------------- a model on its hardware


@dataclass(frozen=True, slots=True)
class Sheet:
    """One configuration in numbers; see the module's docstring.

    ``flops_per_us``, ``bytes_per_us``: F and B of one GPU. ``block_size``: tokens per KV block. ``expert_parallel``:
    GPUs over which experts are spread, tensor times data parallel; 0 where they are sliced. ``chunked`` prefill,
    ``prefix`` caching and KV ``offload`` to the host.
    """

    model: ModelSheet
    flops_per_us: float
    bytes_per_us: float
    tp: int
    sm: float | None
    link_bytes_per_us: float | None
    host_bytes_per_us: float | None
    max_batched_tokens: float | None
    max_seqs: float | None
    max_model_len: float | None
    block_size: float
    memory_gb: float | None
    expert_parallel: int
    chunked: bool
    prefix: bool
    offload: bool

    @property
    def token_us(self) -> float:
        """Matrix time of one token at peak."""
        return self.model.flops_per_token / self.tp / self.flops_per_us

    @property
    def pair_us(self) -> float:
        """Attention time of one query-key pair at peak."""
        return self.model.attention_flops_per_pair / self.tp / self.flops_per_us

    @property
    def kv_token_us(self) -> float:
        """Time to move the keys and values of one token, all layers, at full bandwidth."""
        shards = 1 if self.model.latent else min(self.tp, self.model.kv_heads)
        return self.model.kv_bytes_per_token / shards / self.bytes_per_us

    @property
    def dense_weight_us(self) -> float:
        """Time to read what every step reads: all weights but the experts'."""
        experts = self.model.expert_bytes * self.model.experts * self.model.moe_layers
        return (self.model.weight_bytes - experts) / self.tp / self.bytes_per_us

    @property
    def expert_us(self) -> float:
        """Time to read one expert in every MoE layer."""
        return self.model.expert_bytes * self.model.moe_layers / self.tp / self.bytes_per_us

    def experts_us(self, tokens: Floats) -> Floats:
        """Time to read the experts that ``tokens`` touch: E (1 - (1 - k/E)^T) of them, if routing is even."""
        experts, per_token = self.model.experts, self.model.experts_per_token
        return np.asarray(experts * share_touched(max(experts, 1), per_token, tokens) * self.expert_us)

    def weight_us(self, tokens: Floats) -> Floats:
        """Time to read the weights a step of so many tokens reads."""
        return self.dense_weight_us + self.experts_us(tokens)

    @property
    def all_reduce_us(self) -> float | None:
        """Two all-reduces a layer of one token over the link, both directions at once; None without a link, 0 alone."""
        if self.tp == 1:
            return 0.0
        link = self.link_bytes_per_us or self.host_bytes_per_us
        if link is None:
            return None
        return 2.0 * self.model.layers * self.model.hidden * 2.0 * 2.0 * (self.tp - 1) / self.tp / link


def sheet_of(facts: Facts) -> tuple[Sheet | None, tuple[str, ...]]:
    """The sheet of a configuration's facts, or None and what is missing for one; never raises.

    Args:
        facts: names of the identity, of an architecture, and of :meth:`HardwareSheet.facts`.
    """
    model, missing = model_sheet(facts)
    peak, bandwidth = _number(facts, "peak_tflops"), _number(facts, "memory_bandwidth_gb_s")
    missing += tuple(n for n, v in (("peak_tflops", peak), ("memory_bandwidth_gb_s", bandwidth)) if v is None)
    if model is None or peak is None or bandwidth is None:
        return None, missing
    tp, dp = (int(_number(facts, name) or 1) for name in ("tensor_parallel_size", "data_parallel_size"))
    sheet = Sheet(
        model=model,
        flops_per_us=peak * 1e6,
        bytes_per_us=bandwidth * 1e3,
        tp=tp,
        sm=_number(facts, "sm_count"),
        link_bytes_per_us=_number(facts, "link_gb_s", 1e3),
        host_bytes_per_us=_number(facts, "host_link_gb_s", 1e3),
        max_batched_tokens=_number(facts, "max_num_batched_tokens"),
        max_seqs=_number(facts, "max_num_seqs"),
        max_model_len=_number(facts, "max_model_len") or _number(facts, "max_position_embeddings"),
        block_size=_number(facts, "block_size") or 16.0,
        memory_gb=_number(facts, "memory_gb"),
        expert_parallel=tp * dp if facts.get("expert_parallel") is True else 0,
        chunked=facts.get("enable_chunked_prefill") is True,
        prefix=facts.get("enable_prefix_caching") is True,
        offload=facts.get("cpu_offload") is True,
    )
    return sheet, ()


def _number(facts: Facts, name: str, unit: float = 1.0) -> float | None:
    value = facts.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) * unit if 0.0 < float(value) < VALUE_MAX else None
