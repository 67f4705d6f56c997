"""Model sheet: what one token costs, derived from an architecture.

With L layers, d hidden, H heads, Hkv key-value heads, dh per head, f intermediate, g matrices per feed-forward (3
gated, 2 plain), V vocabulary, E experts of width fe, k of them per token in Lm of the layers, s shared width:

    attention  = d H dh + 2 d Hkv dh + H dh d                      weights of a layer: multi-head, GQA, MQA
    attention  = q + d (r + dr) + r H (dn + dv) + H dv d            MLA; q = d rq + rq H (dn + dr), or d H (dn + dr)
    mlp        = g d f        expert = g d fe        shared = g d s        router = d E
    active     = L attention + (L - Lm) mlp + Lm (k expert + shared + router)        a token is multiplied with
    flops_per_token      = 2 active             the head works once per request, not once per token
    attention_flops      = 4 L H dh            MLA: 2 L H (dn + dr + dv)             per query-key pair
    kv_bytes_per_token   = 2 L Hkv dh bytes    MLA: L (r + dr) bytes                 latent cache
    head                 = V d                 in weight_bytes once; embeddings are looked up, not read

The short forms of the sources leave out the layers; these do not. Units: flops, bytes, whole model (not per GPU).
Reference: Kaplan et al., Scaling Laws (2020), App. B for 2N; DeepSeek-V2 (2024), 2.1 for MLA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .architecture import Scalar

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelSheet:
    """Numbers of one model; the module's docstring defines them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    moe_layers: int
    latent: bool
    window_tokens: int
    window_layers: int
    flops_per_token: float
    expert_flops_per_token: float
    attention_flops_per_pair: float
    kv_bytes_per_token: float
    weight_bytes: float
    expert_bytes: float
    active_params: float
    total_params: float
    notes: tuple[str, ...] = ()

    @property
    def moe(self) -> bool:
        """Whether any layer has experts."""
        return self.experts > 0


def model_sheet(arch: Mapping[str, Scalar]) -> tuple[ModelSheet | None, tuple[str, ...]]:
    """The sheet of an architecture, or None and what is missing for one.

    Args:
        arch: from :func:`online.features.sheets.architecture.architecture`; more keys do no harm.

    Returns:
        The sheet and nothing, or None and the names of what could not be derived.
    """
    missing = [name for name in _NEEDED if name not in arch]
    if arch.get("recurrent"):
        missing.append("cost of its recurrent layers")
    if arch.get("weight_element_bytes") == 0.0:
        missing.append(f"bytes of a weight (quantization {arch.get('weight_quantization')!r} is not known here)")
    number = {
        name: int(value) for name, value in arch.items() if isinstance(value, int) and not isinstance(value, bool)
    }
    moe_layers = number.get("num_moe_layers", 0)
    if moe_layers < number.get("num_hidden_layers", 0) and "intermediate_size" not in arch:
        missing.append("intermediate_size")
    if moe_layers and "moe_intermediate_size" not in arch:
        missing.append("moe_intermediate_size")
    latent = "kv_lora_rank" in arch
    if latent:
        missing += [name for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if name not in arch]
    if missing:
        return None, tuple(missing)
    return _derive(arch, number, latent=latent), ()


def _derive(arch: Mapping[str, Scalar], number: Mapping[str, int], *, latent: bool) -> ModelSheet:
    layers, hidden, heads = number["num_hidden_layers"], number["hidden_size"], number["num_attention_heads"]
    kv_heads = number.get("num_key_value_heads", heads)
    head_dim = number.get("head_dim", hidden // heads)
    matrices = number.get("mlp_matrices", 3)
    moe_layers, experts = number.get("num_moe_layers", 0), number.get("num_experts", 0)
    active_experts = number.get("num_experts_per_tok", 0)
    element, weight = float(arch.get("element_bytes", 2.0)), float(arch.get("weight_element_bytes", 2.0))
    if latent:
        attention, pair, cached = _latent(number, hidden, heads)
    else:
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        pair, cached = 4 * heads * head_dim, 2 * kv_heads * head_dim
    expert = matrices * hidden * number.get("moe_intermediate_size", 0)
    shared = matrices * hidden * number.get("shared_expert_intermediate_size", 0)
    dense = layers * attention + (layers - moe_layers) * matrices * hidden * number.get("intermediate_size", 0)
    dense += moe_layers * (shared + hidden * experts)
    active = dense + moe_layers * active_experts * expert
    head = number["vocab_size"] * hidden
    stored = dense + moe_layers * experts * expert
    tied = arch.get("tie_word_embeddings") is True
    return ModelSheet(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        experts=experts if moe_layers else 0,
        experts_per_token=active_experts if moe_layers else 0,
        moe_layers=moe_layers,
        latent=latent,
        window_tokens=number.get("sliding_window", 0),
        window_layers=number.get("num_window_layers", 0),
        flops_per_token=2.0 * active,
        expert_flops_per_token=2.0 * moe_layers * active_experts * expert,
        attention_flops_per_pair=float(layers * pair),
        kv_bytes_per_token=layers * cached * element,
        weight_bytes=stored * weight + head * element,
        expert_bytes=expert * weight,
        active_params=float(active + head * (1 if tied else 2)),
        total_params=float(stored + head * (1 if tied else 2)),
        notes=_notes(arch),
    )


def _latent(number: Mapping[str, int], hidden: int, heads: int) -> tuple[int, int, int]:
    """Weights of a layer's attention, FLOPs per pair and cached elements per token of MLA."""
    rank, rope = number["kv_lora_rank"], number["qk_rope_head_dim"]
    nope, value = number["qk_nope_head_dim"], number["v_head_dim"]
    query_rank = number.get("q_lora_rank", 0)
    key = nope + rope
    query = hidden * query_rank + query_rank * heads * key if query_rank else hidden * heads * key
    weights = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    return weights, 2 * heads * (key + value), rank + rope


def _notes(arch: Mapping[str, Scalar]) -> tuple[str, ...]:
    if arch.get("unknown_family"):
        return (f"model_type {arch.get('model_type')!r} is not known here: read as a gated transformer",)
    return ()
