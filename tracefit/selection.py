"""Which configuration is meant: by the beginning of its id, or by what people call it, ``model · GPU · TP n``.

Where several fit, those whose engines are alive are meant. A snapshot also holds what was learned of engines that are
gone: after a restart of vLLM with another flag the old configuration stands beside the new one for good. Where both
ran on one machine, the snapshot says that the new one has replaced it. Else silence tells: a configuration is silent if
another one that fits was heard of more than ``IDLE_NS`` later. No clock is read, so the same snapshot always gives
the same answer.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .exceptions import NotFoundError

IDLE_NS = 600_000_000_000
"""Ten minutes. Telemetry of an engine that serves comes every few seconds, request spans at the latest when the longest
request ends. Clocks of two machines may differ by five minutes, beyond which their events are not taken."""

_LISTED = 8
_YEAR_9999_S = 253_402_300_799
_DIFFERENCES_MAX = 3
_DEGREE = re.compile(r"\btp[ =]*(\d+)\b")
_TELLING = {
    "max_num_batched_tokens": "{} batched tokens",
    "max_num_seqs": "{} sequences",
    "max_model_len": "at most {} tokens long",
    "dtype": "{}",
    "quantization": "{}",
    "vllm_version": "vLLM {}",
    "expert_parallel": "expert parallel {}",
    "data_parallel_size": "DP {}",
    "block_size": "blocks of {}",
    "enable_chunked_prefill": "chunked prefill {}",
    "enable_prefix_caching": "prefix caching {}",
    "cpu_offload": "CPU offload {}",
    "async_scheduling": "asynchronous scheduling {}",
    "role": "{} only",
    "pipeline_parallel_size": "PP {}",
    "speculative_decoding": "speculative decoding {}",
    "enable_lora": "LoRA {}",
    "model_root": "loaded from {}",
    "instance": "instance {}",
    "recording": "recording {}",
}
"""Facts that may tell two configurations of one model on one GPU apart, and how people say them."""


class Identity(NamedTuple):
    """What one configuration is chosen and named by.

    ``last_seen_unix_nano``: when it was last seen, 0 where nobody knows. ``replaced``: its server sends another now.
    """

    config_id: str
    facts: Mapping[str, object]
    last_seen_unix_nano: int = 0
    replaced: bool = False


def find_config(identities: Sequence[Identity], which: str = "", *, model: str = "", gpu: str = "") -> int:
    """Index of the only configuration that fits, or of the only one of them that is alive.

    Args:
        identities: of each.
        which: the id or its beginning; else words in any case of letters, each a part of the model's or the GPU's name
            or of the id, or ``TP n``, or a word of what an error calls it.
        model: a part of the model's name; the whole name of one leaves out those that only begin so.
        gpu: a part of the GPU's name.

    Raises:
        NotFoundError: none fits, or several; it lists them.
    """
    names, words = names_of(identities), _words(which)
    fitting = [
        index
        for index, each in enumerate(identities)
        if model.lower() in _fact(each, "model")
        and gpu.lower() in _fact(each, "gpu")
        and (each.config_id.startswith(which) or (words and all(_says(each, names[index], word) for word in words)))
    ]
    whole = {which, model.lower(), *words} - {""}
    exact = [i for i in fitting if not whole.isdisjoint((identities[i].config_id, _fact(identities[i], "model")))]
    fitting = exact or fitting
    silent = _silent({index: identities[index] for index in fitting})
    alive = [index for index in fitting if index not in silent] or fitting
    if len(alive) == 1:
        return alive[0]
    those = [f"{identities[index].config_id} ({names[index]})" for index in alive or range(len(identities))]
    listed = ", ".join(those[:_LISTED]) + ", …" * (len(those) > _LISTED)
    asked = "".join(f" {word[:100]!r}" for word in (which, model, gpu) if word)
    how = "several configurations fit" if fitting else "no configuration fits"
    raise NotFoundError(f"{how}{asked}; the snapshot has {listed or 'none'}", several=bool(fitting))


def names_of(identities: Sequence[Identity]) -> list[str]:
    """What people call each: model, GPU, TP; then what tells it from others of that name, since when it is silent."""
    return [", ".join((_spoken(each), *more)) for each, more in zip(identities, distinctions(identities), strict=True)]


def distinctions(identities: Sequence[Identity]) -> list[tuple[str, ...]]:
    """What tells each from others of one model, GPU and TP, and since when it is silent."""
    alike: dict[str, list[Mapping[str, object]]] = {}
    for each in identities:
        alike.setdefault(_spoken(each), []).append(each.facts)
    telling, silent = {name: _telling(every) for name, every in alike.items()}, _silent(dict(enumerate(identities)))
    return [
        (
            *(_TELLING[key].format(each.facts[key]) for key in telling[_spoken(each)] if key in each.facts),
            *((f"silent since {minute(each.last_seen_unix_nano)}",) if index in silent else ()),
        )
        for index, each in enumerate(identities)
    ]


def _telling(alike: Sequence[Mapping[str, object]]) -> list[str]:
    """Facts of which they have different values, the first few."""
    differing = (key for key in _TELLING if len({str(each.get(key)) for each in alike}) > 1)
    return list(itertools.islice(differing, _DIFFERENCES_MAX))


def _silent(among: Mapping[int, Identity]) -> set[int]:
    newest = max((each.last_seen_unix_nano for each in among.values()), default=0)
    return {
        index
        for index, each in among.items()
        if each.replaced or (each.last_seen_unix_nano and newest - each.last_seen_unix_nano > IDLE_NS)
    }


def minute(unix_nano: int) -> str:
    """A moment in words: ``2026-11-24 14:03 UTC``."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(max(unix_nano // 1_000_000_000, 0), _YEAR_9999_S)))


def _words(text: str) -> list[str]:
    return _DEGREE.sub(r"tp=\1", re.sub(r"[·,]", " ", text.lower())).split()


def _says(identity: Identity, name: str, word: str) -> bool:
    parts = (_fact(identity, "model"), _fact(identity, "gpu"))
    return any(word in part for part in parts) or identity.config_id.startswith(word) or word in _words(name)


def _fact(identity: Identity, name: str) -> str:
    return str(identity.facts.get(name, "")).lower()


def _spoken(identity: Identity) -> str:
    facts = identity.facts
    degree = facts.get("tensor_parallel_size", "")
    who = f"{facts.get('model') or 'unknown model'} on {facts.get('gpu') or 'unknown GPU'}"
    return f"{who}{degree and f', TP {degree}'}"
