"""A model on its hardware with its engine's knobs: what the feature formulas read.

    per GPU of a tensor-parallel group:   flops / tp   weights / tp   KV / min(tp, Hkv)   MLA: the latent on every GPU

All ``*_us`` are microseconds at the data-sheet limit: bytes / (B 1e-6), flops / (F 1e-6); a coefficient of 1 on such a
column says "as fast as the sheet". Knobs that are not known are None, and a set that needs one is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from online.rows import Floats

from .architecture import Scalar, SheetError, architecture
from .model import ModelSheet, model_sheet

_SANE = 1e15


@dataclass(frozen=True, slots=True)
class Sheet:
    """One configuration in numbers; see the module's docstring.

    Attributes:
        model: the model's sheet.
        flops_per_us: F of one GPU.
        bytes_per_us: B of one GPU.
        tp: tensor parallel size.
        sm: SMs, or None.
        link_bytes_per_us: between the GPUs, or None.
        host_bytes_per_us: to the host, or None.
        max_batched_tokens: Nb, or None.
        max_seqs: Ns, or None.
        max_model_len: Lmax, or None.
        block_size: tokens per KV block.
        memory_gb: capacity of a GPU, or None.
        expert_parallel: GPUs over which experts are spread, tensor times data parallel; 0 where they are sliced.
        chunked: chunked prefill.
        prefix: prefix caching.
        offload: KV offload to the host.
    """

    model: ModelSheet
    flops_per_us: float
    bytes_per_us: float
    tp: int
    sm: int | None
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
        share = 1.0 - self.model.experts_per_token / max(self.model.experts, 1)
        touched = self.model.experts * (1.0 - np.power(share, np.maximum(tokens, 0.0)))
        return np.asarray(touched * self.expert_us)

    def weight_us(self, tokens: Floats) -> Floats:
        """Time to read the weights a step of so many tokens reads."""
        return self.dense_weight_us + (self.experts_us(tokens) if self.model.moe else np.zeros_like(tokens))

    def kv_us(self, context_tokens: Floats, requests: Floats) -> Floats:
        """Time to read a decode context; layers with a window read at most the window of each request.

        Only the sum of the contexts is known: sum min(c, W) <= min(sum c, n W), with equality for equal contexts.
        """
        if not self.model.window_layers:
            return np.asarray(context_tokens * self.kv_token_us)
        share = self.model.window_layers / self.model.layers
        inside = np.minimum(context_tokens, requests * float(self.model.window_tokens))
        return np.asarray((share * inside + (1.0 - share) * context_tokens) * self.kv_token_us)

    @property
    def all_reduce_us(self) -> float | None:
        """Two all-reduces a layer of one token over the link, both directions at once; None without a link, 0 alone."""
        if self.tp == 1:
            return 0.0
        link = self.link_bytes_per_us or self.host_bytes_per_us
        if link is None:
            return None
        return 2.0 * self.model.layers * self.model.hidden * 2.0 * 2.0 * (self.tp - 1) / self.tp / link


def sheet_of(facts: Mapping[str, Scalar]) -> tuple[Sheet | None, tuple[str, ...]]:
    """The sheet of a configuration's facts, or None and what is missing for one; never raises.

    Args:
        facts: names of the identity, of an architecture, and of :meth:`HardwareSheet.facts`.
    """
    try:
        model, missing = model_sheet(architecture(facts))
    except SheetError as error:
        return None, (str(error),)
    peak, bandwidth = _number(facts, "peak_tflops"), _number(facts, "memory_bandwidth_gb_s")
    missing += tuple(n for n, v in (("peak_tflops", peak), ("memory_bandwidth_gb_s", bandwidth)) if v is None)
    if model is None or peak is None or bandwidth is None:
        return None, missing
    tp, dp = (int(_number(facts, name) or 1) for name in ("tensor_parallel_size", "data_parallel_size"))
    link, host, sm = _number(facts, "link_gb_s"), _number(facts, "host_link_gb_s"), _number(facts, "sm_count")
    return (
        Sheet(
            model=model,
            flops_per_us=peak * 1e6,
            bytes_per_us=bandwidth * 1e3,
            tp=tp,
            sm=None if sm is None else int(sm),
            link_bytes_per_us=None if link is None else link * 1e3,
            host_bytes_per_us=None if host is None else host * 1e3,
            max_batched_tokens=_number(facts, "max_num_batched_tokens"),
            max_seqs=_number(facts, "max_num_seqs"),
            max_model_len=_number(facts, "max_model_len") or _number(facts, "max_position_embeddings"),
            block_size=_number(facts, "block_size") or 16.0,
            memory_gb=_number(facts, "memory_gb"),
            expert_parallel=tp * dp if facts.get("expert_parallel") is True else 0,
            chunked=facts.get("enable_chunked_prefill") is True,
            prefix=facts.get("enable_prefix_caching") is True,
            offload=facts.get("cpu_offload") is True,
        ),
        (),
    )


def _number(facts: Mapping[str, Scalar], name: str) -> float | None:
    value = facts.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0.0 < float(value) < _SANE else None
