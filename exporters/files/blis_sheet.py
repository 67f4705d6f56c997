"""What BLIS knows of models and GPUs, as far as the size of the KV cache goes.

    kv_us_per_token = layers * 2 * (kv_heads * head_dim / TP) * 2 bytes / (BwPeakTBs * 1e6)

BLIS's own figures and its own reading of config.json, also where they are not the truth (head_dim is always
hidden_size // num_attention_heads): the exported coefficients are divided by this number and BLIS multiplies by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

BYTES_PER_KV_ELEMENT = 2.0

BANDWIDTH_TB_S: dict[str, float] = {"H100": 3.35, "A100-SXM": 2.039, "A100-80": 2.039, "L40S": 0.864}
"""BwPeakTBs in BLIS's hardware_config.json, by its GPU names."""


class AttentionShape(NamedTuple):
    """What BLIS needs to know of a model to size its KV cache."""

    layers: int
    kv_heads: int
    head_dim: int

    def kv_us_per_token(self, tensor_parallel_size: int, bandwidth_tb_s: float) -> float:
        """Microseconds to move one token's keys and values of one GPU, by BLIS's formula."""
        elements = self.layers * 2 * (self.kv_heads * self.head_dim / tensor_parallel_size)
        return elements * BYTES_PER_KV_ELEMENT / (bandwidth_tb_s * 1e6)


def shape_of(model_config: Mapping[str, Any]) -> AttentionShape | None:
    """Read a Hugging Face config.json, or configuration facts with the same names, as BLIS does.

    Args:
        model_config: the parsed file; values of a ``text_config`` inside win, as in BLIS.

    Returns:
        The shape, or None if a needed number is missing or not a positive integer.
    """
    inner = model_config.get("text_config")
    values = {**model_config, **inner} if isinstance(inner, Mapping) else model_config

    def number(*names: str) -> int:
        given = (values.get(name) for name in names)
        return next((int(v) for v in given if isinstance(v, int | float) and not isinstance(v, bool) and v >= 1), 0)

    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", "num_kv_heads", "multi_query_group_num") or heads
    if not (layers and hidden and heads and hidden // heads):
        return None
    return AttentionShape(layers, kv_heads, hidden // heads)


def bandwidth_of(hardware: str) -> float | None:
    """Memory bandwidth in TB/s that BLIS uses for a GPU.

    Args:
        hardware: a BLIS GPU name, a longer name that contains one (``NVIDIA H100 80GB HBM3``), or the number itself.
    """
    try:
        number = float(hardware)
    except ValueError:
        name = blis_name_of(hardware)
        return None if name is None else BANDWIDTH_TB_S[name]
    return number if math.isfinite(number) and number > 0 else None


def blis_name_of(hardware: str) -> str | None:
    """BLIS's name of a GPU by this or a longer name."""
    squeezed = re.sub(r"[^A-Z0-9]", "", hardware.upper())
    return next((name for name in BANDWIDTH_TB_S if name.replace("-", "") in squeezed), None)
