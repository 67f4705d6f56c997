"""The wire vocabulary: which scopes, events and attributes are read, into which field, with which bounds, and by whom.

Names as seen on the wire (they differ from the fork's prose docs); every attribute of a table is an int.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from collector.telemetry import Skip

STEP_SCOPE: Final = "vllm.scheduler.step"
CORE_SCOPE: Final = "vllm.scheduler"
API_SCOPE: Final = "vllm.api"

API_SPAN: Final = "llm_request"

SUMMARY_EVENT: Final = "step.BATCH_SUMMARY"
SNAPSHOT_EVENT: Final = "step.REQUEST_SNAPSHOT"
JOURNEY_PREFIX: Final = "journey."

FACTS_MAX: Final = 128
"""Attributes of a resource, behind the prefix of facts, that are read; vLLM's plugin sends at most 24."""

SPAN_ID_BYTES: Final = 8
TRACE_ID_BYTES: Final = 16
ID_MAX: Final = 1 << 53
TIME_MAX: Final = 1 << 62
COUNT_MAX: Final = (1 << 30) - 1
"""Largest count; two of them add up to an int32."""
SPAN_SLACK_S: Final = 1.0
"""The last token may not be later than the end of its span by more: that ends when the token was handed out."""
UNIX_MIN: Final = 946_684_800 * 10**9  # 2000-01-01: a wall clock before it was never set
UNIX_MAX: Final = 4_102_444_800 * 10**9  # 2100-01-01
AHEAD_MAX_NS: Final = 300 * 10**9
"""How far a sender's clock may be ahead of the receiver's."""


MISSING: Final = -1
"""Value of an integer that was not sent, or is none; every valid value is >= 0."""


class Field(NamedTuple):
    """One attribute: where it goes, and what it may hold; ``least`` is MISSING of one that need not be sent."""

    name: str
    limit: int
    least: int = 0


SUMMARY_FIELDS: Final[dict[str, Field]] = {
    "step.id": Field("step_id", ID_MAX),
    "step.ts_start_ns": Field("ts_start_ns", TIME_MAX),
    "step.ts_end_ns": Field("ts_end_ns", TIME_MAX),
    "step.duration_us": Field("duration_us", ID_MAX),
    "queue.running_depth": Field("running", COUNT_MAX),
    "queue.waiting_depth": Field("waiting", COUNT_MAX),
    "batch.num_prefill_reqs": Field("prefill_requests", COUNT_MAX),
    "batch.num_decode_reqs": Field("decode_requests", COUNT_MAX),
    "batch.scheduled_tokens": Field("scheduled_tokens", COUNT_MAX),
    "batch.prefill_tokens": Field("prefill_tokens", COUNT_MAX),
    "batch.decode_tokens": Field("decode_tokens", COUNT_MAX),
    "batch.num_finished": Field("finished", COUNT_MAX),
    "batch.num_preempted": Field("preempted", COUNT_MAX),
    "kv.blocks_total_gpu": Field("kv_blocks_total", COUNT_MAX),
    "kv.blocks_free_gpu": Field("kv_blocks_free", COUNT_MAX),
    "step.ts_done_ns": Field("ts_done_ns", TIME_MAX, MISSING),
    "batch.context_tokens_single": Field("context_tokens_single", ID_MAX, MISSING),
    "batch.attn_pairs": Field("attention_pairs", ID_MAX, MISSING),
}
KV_USAGE: Final = "kv.usage_gpu_ratio"
"""Double, 0 to 1, of every summary."""

SNAPSHOT_FIELDS: Final[dict[str, Field]] = {
    "step.id": Field("step_id", ID_MAX),
    "request.num_computed_tokens": Field("computed_tokens", COUNT_MAX),
    "request.scheduled_tokens_this_step": Field("scheduled_tokens", COUNT_MAX),
    "request.num_output_tokens": Field("output_tokens", COUNT_MAX),
}

JOURNEY_FIELDS: Final[dict[str, Field]] = {
    "scheduler.step": Field("step_id", ID_MAX),
    "ts.monotonic_ns": Field("ts_ns", TIME_MAX),
    "decode.done_tokens": Field("output_tokens", COUNT_MAX),
    "prefill.total_tokens": Field("prompt_tokens", COUNT_MAX),
}


class SpanEventKind(enum.IntEnum):
    """Kinds of ``journey.*`` events of an engine-core request."""

    QUEUED = 0
    SCHEDULED = 1
    FIRST_TOKEN = 2
    PREEMPTED = 3
    FINISHED = 4


EVENT_KINDS: Final = {f"{JOURNEY_PREFIX}{kind.name}": kind for kind in SpanEventKind}

API_EVENTS: Final = {
    "api.ARRIVED": "arrived_ns",
    "api.HANDOFF_TO_CORE": "handoff_ns",
    "api.FIRST_RESPONSE_FROM_CORE": "first_response_ns",
    "api.DEPARTED": "departed_ns",
    "api.ABORTED": "aborted_ns",
}
API_TIME: Final = "event.ts.monotonic"
"""Double, seconds of CLOCK_MONOTONIC."""

LATENCY_FIELDS: Final = {
    "gen_ai.latency.time_to_first_token": "first_token_s",
    "gen_ai.latency.e2e": "e2e_s",
    "gen_ai.latency.time_in_queue": "queue_s",
    "gen_ai.latency.time_in_model_prefill": "prefill_s",
    "gen_ai.latency.time_in_model_decode": "decode_s",
}
"""Doubles, seconds, on the request spans of vLLM, SGLang and TensorRT-LLM."""

PROMPT_TOKENS: Final = "gen_ai.usage.prompt_tokens"
TOKEN_FIELDS: Final = {
    PROMPT_TOKENS: "prompt_tokens",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.completion_tokens": "output_tokens",
    "gen_ai.usage.output_tokens": "output_tokens",
    "gen_ai.usage.cached_tokens": "cached_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
}
"""Counts of a request's tokens: as the engines spell them, and as OpenTelemetry's convention has since renamed them."""
SAMPLES: Final = "gen_ai.request.n"
MODEL: Final = "gen_ai.response.model"
MODELS: Final = dict.fromkeys((MODEL, "gen_ai.request.model"))
"""Attributes that name a model, the better one first."""
REQUEST_ATTRIBUTES: Final = LATENCY_FIELDS.keys() | TOKEN_FIELDS.keys() | MODELS.keys()
FINISH: Final = "finish.status"

INSTANCE: Final = "service.instance.id"
POD: Final = "k8s.pod.uid"
SERVICE: Final = "service.name"
ROLES: Final = ("prefill", "decode")
"""What the name of a service ends with, behind a hyphen, where different servers compute prompts and answers."""
HOST: Final = "host.name"
FACT_PREFIX: Final = "vllm."
GPU_NAME: Final = "hw.gpu.name"
FACT_LENGTH_MAX: Final = 256
NAME_LENGTH_MAX: Final = 256
"""Of an emitter's name, which is kept, and in every snapshot; who has a longer one is left out, since a cut name may be
another's."""


# --- attributes as numbers within their bounds ------------------------------------------------------------------------

Value = bool | int | float | str


class RejectedError(Exception):
    """One span or event cannot be used; never leaves the decoder."""

    def __init__(self, reason: Skip) -> None:
        super().__init__(reason)
        self.reason = reason


def scalars(attributes: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Value]:
    """Scalar attributes of these keys; arrays, maps, bytes and empty ones are left out."""
    return {key: value for key in keys if key in attributes for _, value in attributes[key].ListFields()}


_LOOPBACK: Final = re.compile(r"[^:]*:(127\.0\.0\.1|\[::1\]|%5B::1%5D):")


def is_here(peer: str) -> bool:
    """Whether a sender is on this machine, by its address behind the kind of it."""
    return _LOOPBACK.match(peer) is not None


def instance_of(attributes: Mapping[str, Value], peer: str) -> str:
    """What an emitter is called: its id; its pod behind a gateway, whose address is that of all pods; else its address.

    On this machine it may be the one or the other: processes of a pod, which share its uid, or a gateway for pods.
    """
    pod = attributes.get(POD, "")
    return str(attributes.get(INSTANCE) or (f"{pod} {peer}" if pod and is_here(peer) else pod or peer))


def read_count(value: Value) -> int:
    """A count of requests or tokens."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RejectedError(Skip.INVALID)
    if not 0 <= value <= COUNT_MAX:
        raise RejectedError(Skip.OUT_OF_RANGE)
    return value


def read_seconds(value: Value) -> float:
    """A latency in seconds."""
    if isinstance(value, bool | str) or not math.isfinite(value):
        raise RejectedError(Skip.INVALID)
    if not 0 <= value < TIME_MAX / 1e9:
        raise RejectedError(Skip.OUT_OF_RANGE)
    return float(value)
