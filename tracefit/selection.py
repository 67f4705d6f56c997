"""Which configuration is meant: by the beginning of its id, or by what people call it, ``model · GPU · TP n``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .faults import NotFoundError

_LISTED = 8
_DEGREE = re.compile(r"\btp[ =]*(\d+)\b")
Identity = tuple[str, Mapping[str, object]]


def find_config(identities: Sequence[Identity], which: str = "", *, model: str = "", gpu: str = "") -> int:
    """Index of the only configuration that fits.

    Args:
        identities: id and facts of each.
        which: the id or its beginning; else words in any case of letters, each a part of the model's or the GPU's name
            or of the id, or ``TP n``.
        model: a part of the model's name; the whole name of one leaves out those that only begin so.
        gpu: a part of the GPU's name.

    Raises:
        NotFoundError: none fits, or several; it lists them.
    """
    named = [
        index
        for index, (_, facts) in enumerate(identities)
        if model.lower() in _fact(facts, "model") and gpu.lower() in _fact(facts, "gpu")
    ]
    fitting = [index for index in named if identities[index][0].startswith(which)]
    words = [model.lower()] if model else []
    if which and not fitting:
        words += _DEGREE.sub(r"tp=\1", which.lower().replace("·", " ")).split()
        fitting = [index for index in named if words and all(_says(identities[index], word) for word in words)]
    exact = [
        index for index in fitting if identities[index][0] == which or _fact(identities[index][1], "model") in words
    ]
    fitting = exact or fitting
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(f"{config_id} ({_spoken(facts)})" for config_id, facts in identities[:_LISTED])
    more = f" and {len(identities) - _LISTED} more" if len(identities) > _LISTED else ""
    asked = "".join(f" {word[:100]!r}" for word in (which, model, gpu) if word)
    how = "several configurations fit" if fitting else "no configuration fits"
    raise NotFoundError(f"{how}{asked}; the snapshot has {listed or 'none'}{more}", several=bool(fitting))


def _says(identity: Identity, word: str) -> bool:
    config_id, facts = identity
    if word.startswith("tp="):
        return word == f"tp={_fact(facts, 'tensor_parallel_size')}"
    return word in _fact(facts, "model") or word in _fact(facts, "gpu") or config_id.startswith(word)


def _fact(facts: Mapping[str, object], name: str) -> str:
    return str(facts.get(name, "")).lower()


def _spoken(facts: Mapping[str, object]) -> str:
    degree = facts.get("tensor_parallel_size", "")
    return f"{facts.get('model') or '?'} on {facts.get('gpu') or '?'}{degree and f', TP {degree}'}"
