"""A Hugging Face config.json as a flat table of checked numbers: the architecture.

Families name one thing in many ways (``n_embd``, ``n_layer``; ``num_local_experts``, ``num_experts``,
``n_routed_experts``); here each has one name, the one Llama uses, so that the numbers can travel as facts of a
configuration and be read back. A multimodal file counts by its ``text_config``.

A file that contradicts itself is refused with the key at fault. A file that says too little is not refused: what is
missing is missing, and :mod:`online.features.sheets.model` says what cannot be derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .quantization import quantization_in

Scalar = str | int | float | bool

_LIMIT = 2**31

_NAMES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size"),
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "sliding_window": ("sliding_window",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "seq_length"),
}
"""Our name: the names it goes by; the first one present counts."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GATED = _words(
    "llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3 gemma3_text phi3 deepseek deepseek_v2 "
    "deepseek_v3 internlm2 baichuan chatglm stablelm olmo olmo2 olmoe cohere cohere2 granite granitemoe glm glm4 yi "
    "exaone minicpm dbrx llama4_text gpt_oss"
)
_PLAIN = _words("gpt2 opt bloom falcon gpt_neox gptj gpt_bigcode mpt phi starcoder2 codegen")
_FOURFOLD = _words("gpt2 bloom falcon gptj gpt_bigcode codegen")
"""Families whose feed-forward width is four times the hidden size when the file does not say."""

_RECURRENT = ("ssm_", "mamba_", "state_size", "linear_num_", "linear_conv_", "rwkv", "time_step_", "conv_kernel")
"""Keys of state-space and linear-attention layers, whose cost is not that of attention."""

_DTYPES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}


class SheetError(ValueError):
    """The file contradicts itself; the text begins with the key at fault."""


def architecture(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """The numbers of a config.json under one set of names, checked.

    Args:
        config: the parsed file, or a table that this function returned before.

    Raises:
        SheetError: a number is not a positive integer of believable size, heads do not divide, or more experts are
            active than there are.
    """
    if not isinstance(config, Mapping):
        raise SheetError(f"config.json: expected an object, got {type(config).__name__}")
    inner = config.get("text_config")
    values: dict[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    out: dict[str, Scalar] = {}
    for name, aliases in _NAMES.items():
        value = next((values[a] for a in aliases if values.get(a) is not None), None)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is not None and not (value == 0 and name in ("num_experts", "q_lora_rank", "sliding_window")):
            out[name] = _positive(name, value)
    model_type = values.get("model_type")
    if isinstance(model_type, str):
        out["model_type"] = model_type[:64]
    kind = str(out.get("model_type", ""))
    if "mlp_matrices" in values:
        out["mlp_matrices"] = _positive("mlp_matrices", values["mlp_matrices"])
    else:
        out["mlp_matrices"] = 2 if kind in _PLAIN else 3
    if "intermediate_size" not in out and kind in _FOURFOLD and "hidden_size" in out:
        out["intermediate_size"] = 4 * int(out["hidden_size"])
    if values.get("recurrent") is True or any(str(key).startswith(_RECURRENT) for key in values):
        out["recurrent"] = True
    elif kind and kind not in _GATED | _PLAIN:
        out["unknown_family"] = True
    out["tie_word_embeddings"] = values.get("tie_word_embeddings") is True
    _falcon(values, out)
    _experts(values, out)
    _windows(values, out)
    _bytes(values, out)
    _check(out)
    return out


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:  # NaN and infinity included
        raise SheetError(f"{name}: expected a positive integer, got {value!r:.60}")
    if not 0 < value < _LIMIT:
        raise SheetError(f"{name}: expected an integer from 1 to {_LIMIT - 1}, got {value!r:.60}")
    return int(value)


def _falcon(values: Mapping[str, Any], out: dict[str, Scalar]) -> None:
    if values.get("multi_query") is True and not values.get("new_decoder_architecture"):
        out["num_key_value_heads"] = 1


def _experts(values: Mapping[str, Any], out: dict[str, Scalar]) -> None:
    if "num_experts" not in out or int(out["num_experts"]) == 1:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            out.pop(name, None)
        return
    layers = int(out.get("num_hidden_layers", 0))
    out.setdefault("num_experts_per_tok", 1)
    if "moe_intermediate_size" not in out and "intermediate_size" in out:
        out["moe_intermediate_size"] = out["intermediate_size"]
    width = int(out.get("moe_intermediate_size", 0))
    shared = values.get("shared_expert_intermediate_size")
    if shared is None and values.get("n_shared_experts"):
        shared = _positive("n_shared_experts", values["n_shared_experts"]) * width
    out["shared_expert_intermediate_size"] = 0 if not shared else _positive("shared_expert_intermediate_size", shared)
    if "num_moe_layers" in values:
        moe = values["num_moe_layers"]
        moe = 0 if moe == 0 else _positive("num_moe_layers", moe)
    else:
        moe = _moe_layers(values, layers)
    if moe > layers:
        raise SheetError(f"num_moe_layers: {moe} of {layers} layers")
    out["num_moe_layers"] = moe


def _moe_layers(values: Mapping[str, Any], layers: int) -> int:
    """DeepSeek: the first k layers are dense, then every f-th; Qwen: every step-th, except those listed."""
    dense = values.get("first_k_dense_replace")
    first = 0 if not dense else _positive("first_k_dense_replace", dense)
    every = (
        _positive("moe_layer_freq", values["moe_layer_freq"]) if isinstance(values.get("moe_layer_freq"), int) else 1
    )
    step = values.get("decoder_sparse_step") or values.get("interleave_moe_layer_step") or 1
    step = _positive("decoder_sparse_step", step)
    listed = values.get("mlp_only_layers")
    only = set(listed) if isinstance(listed, list) and all(isinstance(i, int) for i in listed) else set()
    count = 0
    for layer in range(min(layers, 100_000)):
        count += layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in only
    return count


def _windows(values: Mapping[str, Any], out: dict[str, Scalar]) -> None:
    """How many layers see a sliding window only."""
    if "sliding_window" not in out or values.get("use_sliding_window") is False:
        out.pop("sliding_window", None)
        return
    layers = int(out.get("num_hidden_layers", 0))
    kinds, pattern = values.get("layer_types"), values.get("sliding_window_pattern")
    if "num_window_layers" in values:
        count = _positive("num_window_layers", values["num_window_layers"])
    elif isinstance(kinds, list):
        count = sum(kind == "sliding_attention" for kind in kinds)
    elif isinstance(pattern, int) and pattern > 1:
        count = layers - layers // pattern  # Gemma 3: every sixth layer is global
    elif out.get("model_type") == "gemma2":
        count = layers - layers // 2
    elif isinstance(values.get("max_window_layers"), int):
        count = max(0, layers - int(values["max_window_layers"]))  # Qwen 2: the layers above it
    else:
        count = layers
    if count > layers:
        raise SheetError(f"num_window_layers: {count} of {layers} layers")
    if count:
        out["num_window_layers"] = count
    else:
        del out["sliding_window"]


def _bytes(values: Mapping[str, Any], out: dict[str, Scalar]) -> None:
    """Bytes of a stored weight and of a computed element; unknown is two, what serving engines load.

    ``weight_quantization`` names how weights are quantized. They have 0 bytes where that is not known here.
    """
    dtype = values.get("torch_dtype") or values.get("dtype")
    width = _DTYPES.get(str(dtype), 2.0)
    out["element_bytes"] = float(values["element_bytes"]) if "element_bytes" in values else width
    quantization = quantization_in(values)
    if "weight_element_bytes" in values:
        out["weight_element_bytes"] = float(values["weight_element_bytes"])
        if isinstance(method := values.get("weight_quantization"), str):
            out["weight_quantization"] = method
    elif quantization is not None:
        out |= quantized(*quantization)
    else:
        out["weight_element_bytes"] = width
    unknown = "weight_quantization" in out and out["weight_element_bytes"] == 0.0
    for name in ("element_bytes",) if unknown else ("element_bytes", "weight_element_bytes"):
        if not 0.0 < float(out[name]) <= 16.0:  # noqa: PLR2004  no element is wider
            raise SheetError(f"{name}: expected 0 to 16 bytes, got {out[name]!r}")


def quantized(method: str, weight_bytes: float | None) -> dict[str, Scalar]:
    """What an architecture says of weights that this method quantized to so many bytes; None: not known here."""
    return {"weight_quantization": method[:64], "weight_element_bytes": weight_bytes or 0.0}


def _check(out: Mapping[str, Scalar]) -> None:
    heads, kv_heads = out.get("num_attention_heads"), out.get("num_key_value_heads")
    hidden = out.get("hidden_size")
    if heads and kv_heads and int(heads) % int(kv_heads):
        raise SheetError(f"num_key_value_heads: {heads} heads do not divide by {kv_heads}")
    if heads and hidden and "head_dim" not in out and "kv_lora_rank" not in out and int(hidden) % int(heads):
        raise SheetError(f"num_attention_heads: hidden_size {hidden} does not divide by {heads} heads")
    experts, active = out.get("num_experts"), out.get("num_experts_per_tok")
    if experts and active and int(active) > int(experts):
        raise SheetError(f"num_experts_per_tok: {active} active of {experts} experts")
