"""Who a server is: what vLLM says of itself where it is asked, off the hot path, and never waited for.

    GET /v1/models   data[0].id -> model    data[0].root -> model_root    data[0].max_model_len
    GET /version     version -> vllm_version
    GET /metrics     vllm:cache_config_info{block_size, num_gpu_blocks, enable_prefix_caching, ...}

Each is optional: what answers is taken. Bounded in time (per call, headers and body together) and in bytes; redirects
are refused, for they could send us anywhere; an answer of another kind is counted by reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Annotated, Final, TypeVar

import msgspec

from collector.decode.pages import facts_in
from collector.runtime.http import FetchError, HttpClient
from collector.telemetry import PullOutcome

BODY_BYTES_MAX: Final = 2 * 2**20
_ACCEPT: Final = "application/json, text/plain"

Facts = Mapping[str, str | int | bool]
"""What is known of a server, by name."""
Text = Annotated[str, msgspec.Meta(max_length=256)]
T = TypeVar("T")


class _Card(msgspec.Struct):
    id: Text = ""
    root: Text | None = None
    parent: Text | None = None
    max_model_len: Annotated[int, msgspec.Meta(gt=0)] | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: Text


def read_models(body: bytes) -> Facts:
    """The first served model, what was loaded under its name, and whether adapters, which come after it, are served."""
    models = _read(body, _Models)
    if models is None or not models.data:
        return {}
    first, *others = models.data
    told = {
        "model": first.id,
        "model_root": first.root if first.root != first.id else None,
        "enable_lora": any(card.parent for card in others),
        "max_model_len": first.max_model_len,
    }
    return {name: fact for name, fact in told.items() if fact}


def read_version(body: bytes) -> Facts:
    """The version of vLLM, out of what ``/version`` answered."""
    told = _read(body, _Version)
    return {"vllm_version": told.version} if told is not None and told.version else {}


def _read(body: bytes, kind: type[T]) -> T | None:
    """Parse an answer as JSON; None if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


Questions = Mapping[str, Callable[[bytes], Facts]]
"""Paths, and the readers of their answers."""
BESIDE_PAGES: Final[Questions] = {"/v1/models": read_models, "/version": read_version}
"""Questions to a server whose page is scraped, which answers the other one."""
QUESTIONS: Final[Questions] = {**BESIDE_PAGES, "/metrics": facts_in}


async def request_facts(
    client: HttpClient, url: str, questions: Questions, count: Callable[[PullOutcome], None], token: str = ""
) -> Facts:
    """Ask one server for its facts; the result is empty if it answers nothing."""
    answers: dict[str, str | int | bool] = {}
    for path, read in questions.items():
        body = BytesIO()
        try:
            await client.get(url + path, body, BODY_BYTES_MAX, accept=_ACCEPT, token=token)
        except FetchError as error:
            count(PullOutcome(error.outcome))
            continue
        facts = read(body.getvalue())
        count(PullOutcome.READ if facts else PullOutcome.UNEXPECTED)
        answers |= facts
    return answers
