"""A model in numbers: its config.json as a flat table, the bytes of its weights, and what one token costs.

**Architecture.** A Hugging Face config.json as a flat table of checked numbers.

Families name one thing in many ways (``n_embd``, ``n_layer``; ``num_local_experts``, ``num_experts``,
``n_routed_experts``); here each has one name, the one Llama uses, and the numbers travel as facts of a configuration.
A multimodal file counts by its ``text_config``.

An impossible number is refused with its key. A file with too few numbers is accepted: :func:`model_sheet` says which
ones it lacks.

**Quantization.** Bytes of a stored weight, by what a checkpoint or an engine says of its quantization.

    int8, FP8  1        int4  0.5        4-bit floats with an 8-bit scale per group  0.5 + 1 / group

so NVFP4, whose groups are of 16, has 0.5625 and MXFP4, of 32, 0.53125. Scales of whole rows or of 128 weights are left
out. A method that is not known here has no bytes, and then there is no data sheet of the model: read as 16-bit weights,
a model of 4-bit weights would be bound to a step that takes four times as long as it does.

``compressed-tensors`` says it by group (``config_groups.*.weights``; its older checkpoints under the key
``compression_config``), ``modelopt`` by ``quant_algo``, in config.json or
in hf_quant_config.json beside it; the others by ``bits`` or by their name alone.

**Model sheet.** What one token costs, derived from an architecture.

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
from typing import Any

from online.features.columns import Fact, Facts, experts_in

_LIMIT = 2**31
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_NAMES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        *("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
        *("moe_topk", "moe_top_k", "top_k_experts", "moe_k"),
    ),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "seq_length"),
    **{name: (name,) for name in ("kv_lora_rank", "q_lora_rank", *_LATENT)},
}
"""Our name: the names it goes by; the first one present counts."""

_PLAIN = frozenset({"gpt2", "opt", "gpt_neox", "mpt", "phi", "starcoder2"})
"""Families whose feed-forward layers have two matrices."""

_RECURRENT = ("ssm_", "mamba_", "state_size", "linear_num_", "linear_conv_", "rwkv", "time_step_", "conv_kernel")
"""Keys of state-space and linear-attention layers, whose cost is not that of attention."""

_DTYPES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}


def architecture(config: Mapping[str, Any]) -> dict[str, Fact]:
    """The numbers of a config.json under one set of names, checked.

    Args:
        config: the parsed file; ``hf_quant_config`` in it is the parsed file of that name beside it.

    Raises:
        ValueError: a number is not a positive integer of believable size; the text begins with its key.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config.json: expected an object, got {type(config).__name__}")  # noqa: TRY004  as every fault of a file
    inner = config.get("text_config")
    values: dict[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    out: dict[str, Fact] = {}
    for name, aliases in _NAMES.items():
        value = next((values[each] for each in aliases if values.get(each) is not None), None)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is not None and not (value == 0 and name in ("num_experts", "q_lora_rank")):
            out[name] = _positive(name, value)
    kind = values.get("model_type")
    kind = kind[:64] if isinstance(kind, str) else ""
    if kind:
        out["model_type"] = kind
    out["mlp_matrices"] = 2 if kind in _PLAIN else 3
    if any(str(key).startswith(_RECURRENT) for key in values):
        out["recurrent"] = True
    _experts(values, out)
    # Unknown is two bytes, what serving engines load.
    width = _DTYPES.get(str(values.get("torch_dtype") or values.get("dtype")), 2.0)
    quantization = _quantization_in(values)
    out |= {"element_bytes": width, "weight_element_bytes": width}
    return out if quantization is None else out | quantized(*quantization)


def _positive(name: str, value: object) -> int:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _LIMIT or value % 1:
        raise ValueError(f"{name}: expected an integer from 1 to {_LIMIT - 1}, got {value!r:.60}")
    return int(value)


def _experts(values: Mapping[str, Any], out: dict[str, Fact]) -> None:
    if "num_experts" not in out or int(out["num_experts"]) == 1:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            out.pop(name, None)
        return
    if "moe_intermediate_size" not in out and "intermediate_size" in out:
        out["moe_intermediate_size"] = out["intermediate_size"]
    width = int(out.get("moe_intermediate_size", 0))
    shared = values.get("shared_expert_intermediate_size")
    if shared is None and values.get("n_shared_experts"):
        shared = _positive("n_shared_experts", values["n_shared_experts"]) * width
    out["shared_expert_intermediate_size"] = 0 if not shared else _positive("shared_expert_intermediate_size", shared)
    out["num_moe_layers"] = _moe_layers(values, int(out.get("num_hidden_layers", 0)))


def _moe_layers(values: Mapping[str, Any], layers: int) -> int:
    """DeepSeek: the first k layers are dense, then every f-th; Qwen: every step-th, except those listed."""
    dense = values.get("first_k_dense_replace")
    first = 0 if not dense else _positive("first_k_dense_replace", dense)
    every = values.get("moe_layer_freq")
    every = _positive("moe_layer_freq", every) if isinstance(every, int) else 1
    step = values.get("decoder_sparse_step") or values.get("interleave_moe_layer_step") or 1
    step = _positive("decoder_sparse_step", step)
    listed = values.get("mlp_only_layers")
    only = set(listed) if isinstance(listed, list) and all(isinstance(i, int) for i in listed) else set()
    among = range(first, min(layers, 100_000))
    return sum(layer % every == 0 and (layer + 1) % step == 0 and layer not in only for layer in among)


def quantized(method: str, weight_bytes: float | None) -> dict[str, Fact]:
    """What is known of weights that this method quantized to so many bytes; 0 bytes where None: not known here."""
    return {"weight_quantization": method[:64], "weight_element_bytes": weight_bytes or 0.0}


# ------------------------------------------------------ quantization

_NVFP4, _MXFP4 = 0.5 + 1.0 / 16, 0.5 + 1.0 / 32
# Guard: no quantized weight has more bits.
_BITS_MAX = 16

_EIGHT_BITS = (
    *("fp8", "fbgemm_fp8", "ptpc_fp8", "fp8_e4m3", "modelopt", "fp8_per_channel_per_token", "fp8_pb_wo"),
    *("int8", "int8_sq", "w8a8", "w8a16", "w8a8_sq_per_channel"),
)
_FOUR_BITS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "int4", "int4_awq", "w4a16", "w4a16_awq", "w4a8_awq")
_BY_NAME = {
    **dict.fromkeys(_EIGHT_BITS, 1.0),
    **dict.fromkeys(_FOUR_BITS, 0.5),
    **dict.fromkeys(("modelopt_fp4", "nvfp4", "nvfp4_awq"), _NVFP4),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), _MXFP4),
}
"""Names of engines and of modelopt's algorithms: bytes of a weight."""


def bytes_by_name(method: str) -> float | None:
    """Bytes of a weight by the name that an engine gives its quantization; None: not known here."""
    return _BY_NAME.get(method.lower())


def _quantization_in(config: Mapping[str, Any]) -> tuple[str, float | None] | None:
    """The method and bytes of a weight, None where not known; None where nothing is quantized."""
    said = config.get("quantization_config") or config.get("compression_config")
    if isinstance(said, Mapping) and said:
        return _said(said, str(said.get("quant_method", "unnamed")).lower())
    beside = config.get("hf_quant_config")
    inner = beside.get("quantization") if isinstance(beside, Mapping) else None
    return _said(inner, "modelopt") if isinstance(inner, Mapping) else None


def _said(said: Mapping[str, Any], method: str) -> tuple[str, float | None] | None:
    algorithm, groups = said.get("quant_algo"), said.get("config_groups")
    if isinstance(algorithm, str) and (known := bytes_by_name(algorithm)) is not None:
        return f"{method} {algorithm}", known
    if isinstance(groups, Mapping):
        return _by_groups(groups, method)
    if method.startswith("modelopt"):  # without an algorithm the KV cache alone is quantized
        return None if algorithm is None else (f"{method} {algorithm}", None)
    bits = said.get("bits", said.get("w_bit"))
    if type(bits) is int:
        return method, bits / 8 if 0 < bits <= _BITS_MAX else None
    if method == "bitsandbytes":
        return method, 1.0 if said.get("load_in_8bit") is True else 0.5
    return method, bytes_by_name(method)


def _by_groups(groups: Mapping[str, Any], method: str) -> tuple[str, float | None] | None:
    """Of groups of layers; None bytes where they differ, since nobody says how many weights each has."""
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    found = {_of_group(each) for each in weights if isinstance(each, Mapping)}
    return (method, found.pop() if len(found) == 1 else None) if found else None


def _of_group(weights: Mapping[str, Any]) -> float | None:
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if type(bits) is not int or not 0 < bits <= _BITS_MAX:
        return None
    scales = 1.0 / group if bits == 4 and kind == "float" and isinstance(group, int) and group > 0 else 0.0  # noqa: PLR2004
    return bits / 8 + scales


# ------------------------------------------------------- model sheet

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelSheet:
    """Numbers of one model; the module's docstring defines them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    experts_per_token: int
    moe_layers: int
    latent: bool
    flops_per_token: float
    expert_flops_per_token: float
    attention_flops_per_pair: float
    kv_bytes_per_token: float
    weight_bytes: float
    expert_bytes: float

    @property
    def moe(self) -> bool:
        """Whether any layer has experts."""
        return self.experts > 0


def model_sheet(arch: Facts) -> tuple[ModelSheet | None, tuple[str, ...]]:
    """The sheet made of facts that :func:`architecture` gave, or None and the names of the missing facts."""
    missing = [name for name in _NEEDED if name not in arch]
    if arch.get("recurrent"):
        missing.append("cost of its recurrent layers")
    if arch.get("weight_element_bytes") == 0.0:
        missing.append(f"bytes of a weight (quantization {arch.get('weight_quantization')!r} is not known here)")
    number = {name: value for name, value in arch.items() if type(value) is int}
    moe_layers = number.get("num_moe_layers", 0)
    if moe_layers and experts_in(arch) is None:
        missing.append("num_experts_per_tok" if "num_experts" in arch else "num_experts")
    if moe_layers < number.get("num_hidden_layers", 0) and "intermediate_size" not in arch:
        missing.append("intermediate_size")
    if moe_layers and "moe_intermediate_size" not in arch:
        missing.append("moe_intermediate_size")
    if "kv_lora_rank" in arch:
        missing += [name for name in _LATENT if name not in arch]
    return (None, tuple(missing)) if missing else (_derive(arch, number, moe_layers), ())


def _derive(arch: Facts, number: Mapping[str, int], moe_layers: int) -> ModelSheet:
    layers, hidden, heads = number["num_hidden_layers"], number["hidden_size"], number["num_attention_heads"]
    kv_heads = number.get("num_key_value_heads", heads)
    head_dim = number.get("head_dim", hidden // heads)
    matrices, latent = number.get("mlp_matrices", 3), "kv_lora_rank" in arch
    experts, active_experts = (number["num_experts"], number["num_experts_per_tok"]) if moe_layers else (0, 0)
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
    stored = dense + moe_layers * experts * expert
    return ModelSheet(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        experts_per_token=active_experts,
        moe_layers=moe_layers,
        latent=latent,
        flops_per_token=2.0 * (dense + moe_layers * active_experts * expert),
        expert_flops_per_token=2.0 * moe_layers * active_experts * expert,
        attention_flops_per_pair=float(layers * pair),
        kv_bytes_per_token=layers * cached * element,
        weight_bytes=stored * weight + number["vocab_size"] * hidden * element,
        expert_bytes=expert * weight,
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
