"""Mixtures of experts: whether a model is one, and how many experts it has, as far as its name tells.

A step of a mixture reads the experts that its tokens touch, 1 - (1 - k/E)^tokens of all E where each token picks k. So
E and k have to be known before a coefficient of ``active_experts`` can be learned. Most servers do not tell them, and
most models are called by their public names. What a file or the server says is stronger than a name.

The table, ``experts.json``, is of the ``config.json`` of each model's own public repository. The files that the bench
of GPUs installs (``requirements-gpus.lock``) say the same of those that they have. GLM-4.7 is held against
no file: it is taken to have the experts of GLM-4.6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

Fact = str | int | float | bool

_BY_NAME = msgspec.json.decode(Path(__file__).with_name("experts.json").read_bytes(), type=dict[str, tuple[int, int]])
"""Experts of a layer and how many of them a token goes through, by the part of a name that says which model it is."""
_LOOKS_LIKE_ONE = re.compile(r"(?<![a-z0-9])((ol)?moe|mixtral|reap|\d+x\d+(\.\d+)?b|a\d+(\.\d+)?[bm])(?![a-z0-9])")
"""``Qwen1.5-MoE``, ``Mixtral``, ``8x7B``, ``57B-A14B``, ``A800M``."""
_IS_ANOTHER = re.compile(r"distill|reap|pruned|r1-0528-qwen3|glm-4\.\d(v|-flash)")
"""Dense models that a mixture taught (``DeepSeek-R1-0528-Qwen3-8B``), mixtures that lost experts, other sizes."""


def experts_by_name(model: str) -> dict[str, Fact]:
    """E and k of a public model as facts; nothing for a name that is not known here."""
    name = model.lower()
    known = max((part for part in _BY_NAME if _is_in(part, name)), key=len, default="")
    if not known or _IS_ANOTHER.search(name):
        return {}
    return dict(zip(("num_experts", "num_experts_per_tok"), _BY_NAME[known], strict=True))


def _is_in(part: str, name: str) -> bool:
    """Whether a name has this part as a word or a version of it: ``glm-5`` is in ``GLM-5.1-FP8``, not in ``GLM-51``."""
    before, found, after = name.partition(part)
    return bool(found) and not (before[-1:].isalnum() or after[:1].isdigit())


def unknown_experts(facts: Mapping[str, Fact]) -> str:
    """Of a mixture whose experts are not known: why it is not usable and what to set; empty of any other model.

    Without a coefficient for the experts that a batch touches, steps of a mixture are 15 to 24 % off.
    """
    experts, per_token = facts.get("num_experts"), facts.get("num_experts_per_tok")
    is_counted = type(experts) is int and type(per_token) is int and 0 < per_token <= experts
    if is_counted or not _is_mixture(facts):
        return ""
    return (
        "the model is a mixture of experts, and it is not known how many there are and how many a token uses: set "
        "vllm.num_experts and vllm.num_experts_per_tok as resource attributes, or model_config"
    )


def _is_mixture(facts: Mapping[str, Fact]) -> bool:
    """Whether the model is one: its experts are counted, or spread over GPUs, or its name says so."""
    experts = facts.get("num_experts")
    if facts.get("expert_parallel") is True or facts.get("num_moe_layers") == 0:
        return facts.get("expert_parallel") is True
    if type(experts) is int:
        return experts > 1
    name = str(facts.get("model_root") or facts.get("model", "")).lower()
    return bool(_LOOKS_LIKE_ONE.search(name)) and "hidden_size" not in facts  # a config.json would count them
