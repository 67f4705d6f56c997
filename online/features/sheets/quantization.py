"""Bytes of a stored weight, by what a checkpoint or an engine says of its quantization.

    int8, FP8  1        int4  0.5        4-bit floats with an 8-bit scale per group  0.5 + 1 / group

so NVFP4, whose groups are of 16, has 0.5625 and MXFP4, of 32, 0.53125. Scales of whole rows or of 128 weights are left
out. A method that is not known here has no bytes, and then there is no data sheet of the model: read as 16-bit weights,
a model of 4-bit weights would be bound to a step that takes four times as long as it does.

``compressed-tensors`` says it by group (``config_groups.*.weights``), ``modelopt`` by ``quant_algo``, in config.json or
in hf_quant_config.json beside it; the others by ``bits`` or by their name alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BYTE, _HALF = 1.0, 0.5
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32
_NVFP4, _MXFP4 = _HALF + 1.0 / _NVFP4_GROUP, _HALF + 1.0 / _MXFP4_GROUP
_BITS_MAX = 16

_BY_NAME = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "ptpc_fp8", "fp8_e4m3", "modelopt", "int8", "w8a8", "w8a16"), _BYTE),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "int4", "w4a16"), _HALF),
    **dict.fromkeys(("modelopt_fp4", "nvfp4"), _NVFP4),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), _MXFP4),
}
_BY_ALGORITHM = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "INT8_SQ", "W8A8_SQ_PER_CHANNEL"), _BYTE),
    **dict.fromkeys(("W4A16", "W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ"), _HALF),
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ"), _NVFP4),
}


def bytes_by_name(method: str) -> float | None:
    """Bytes of a weight by the name that an engine gives its quantization; None: not known here."""
    return _BY_NAME.get(method.lower())


def quantization_in(config: Mapping[str, Any]) -> tuple[str, float | None] | None:
    """What a config.json says: the method and bytes of a weight, None where not known; None where nothing is quantized.

    Args:
        config: the parsed file; ``hf_quant_config`` in it is the parsed file of that name beside it.
    """
    said = config.get("quantization_config")
    if isinstance(said, Mapping) and said:
        return _said(said, str(said.get("quant_method", "unnamed")).lower())
    beside = config.get("hf_quant_config")
    inner = beside.get("quantization") if isinstance(beside, Mapping) else None
    return _said(inner, "modelopt") if isinstance(inner, Mapping) else None


def _said(said: Mapping[str, Any], method: str) -> tuple[str, float | None] | None:
    algorithm, groups = said.get("quant_algo"), said.get("config_groups")
    if isinstance(algorithm, str) and (known := _BY_ALGORITHM.get(algorithm.upper())) is not None:
        return f"{method} {algorithm}", known
    if isinstance(groups, Mapping):
        return _by_groups(groups, method)
    if method.startswith("modelopt"):  # without an algorithm the KV cache alone is quantized
        return None if algorithm is None else (f"{method} {algorithm}", None)
    bits = said.get("bits", said.get("w_bit"))
    if isinstance(bits, int) and not isinstance(bits, bool):
        return method, bits / 8 if 0 < bits <= _BITS_MAX else None
    if method == "bitsandbytes":
        return method, _BYTE if said.get("load_in_8bit") is True else _HALF
    return method, bytes_by_name(method)


def _by_groups(groups: Mapping[str, Any], method: str) -> tuple[str, float | None] | None:
    """Of groups of layers; None bytes where they differ, since nobody says how many weights each has."""
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    found = {_of_group(each) for each in weights if isinstance(each, Mapping)}
    if not found:
        return None
    return method, found.pop() if len(found) == 1 else None


def _of_group(weights: Mapping[str, Any]) -> float | None:
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if not isinstance(bits, int) or isinstance(bits, bool) or not 0 < bits <= _BITS_MAX:
        return None
    scales = 1.0 / group if bits == 4 and kind == "float" and isinstance(group, int) and group > 0 else 0.0  # noqa: PLR2004
    return bits / 8 + scales
