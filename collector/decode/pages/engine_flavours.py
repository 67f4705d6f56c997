"""Which families of a server's ``/metrics`` page mean what, per engine: a table, nothing else.

A family that was renamed is listed under both names, the better one first: where a page has both (one release overlaps
the old name with the new one), only the better one is read. Counters are written as they stand on the page.

    vLLM V1   0.8 ... 0.32     iteration_tokens_total counts the steps
    vLLM V0   0.6 ... 0.8      no step counter in the older ones; the gauge of the KV cache was named after the GPU
    SGLang    experimental     no step counter; prompts count when their request ends, but in realtime_tokens_total
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Meaning(enum.IntEnum):
    """What a number of the page says; counters since the server started, unless they are named after a gauge."""

    STEPS = 0
    """Engine steps that gave output."""
    STEP_TOKENS = 1
    """Tokens computed in them; a prompt in chunks is credited whole with its last one."""
    GENERATED_TOKENS = 2
    PROMPT_TOKENS = 3
    FIRST_TOKENS = 4
    """Requests that got their first token."""
    FINISHED = 5
    """Requests that ended and were not aborted."""
    ITL_COUNT = 6
    """Decoding requests, summed over the steps."""
    ITL_SECONDS = 7
    """Step times those requests sat through."""
    RUNNING = 8
    """Gauge."""
    WAITING = 9
    """Gauge."""
    KV_USAGE_RATIO = 10
    """Gauge."""
    KV_USED_TOKENS = 11
    """Gauge."""
    PREEMPTIONS = 12
    FINISHED_PROMPT_TOKENS = 13
    FINISHED_GENERATED_TOKENS = 14
    PREFIX_HIT_TOKENS = 15
    PREFILL_TOKENS = 16
    """Prompt tokens computed, where the engine counts them as such."""
    E2E_COUNT = 17
    E2E_SECONDS = 18
    QUEUE_SECONDS = 19
    INFERENCE_SECONDS = 20
    ITL_SECONDS_SQUARED = 21
    """Sum of the squares of the latencies, each at the middle of its bucket."""
    FIRST_TOKEN_SECONDS = 22
    """From arrival to first token, of the requests of ``FIRST_TOKENS``; what other models of a page learn from."""


class Flavour(enum.StrEnum):
    """Which engine writes the page."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Series(NamedTuple):
    """One family: what it means, how good a source it is (0 best), and the label it is taken for, if only for one."""

    flavour: Flavour
    meaning: Meaning
    rank: int = 0
    only: tuple[str, str] | None = None


_VLLM: dict[Meaning, tuple[str, ...]] = {
    Meaning.STEPS: ("iteration_tokens_total_count",),
    Meaning.STEP_TOKENS: ("iteration_tokens_total_sum",),
    Meaning.GENERATED_TOKENS: ("generation_tokens_total",),
    Meaning.PROMPT_TOKENS: ("prompt_tokens_total",),
    Meaning.FIRST_TOKENS: ("time_to_first_token_seconds_count",),
    Meaning.FINISHED: ("request_success_total",),
    Meaning.ITL_COUNT: ("inter_token_latency_seconds_count", "time_per_output_token_seconds_count"),
    Meaning.ITL_SECONDS: ("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum"),
    Meaning.RUNNING: ("num_requests_running",),
    Meaning.WAITING: ("num_requests_waiting",),
    Meaning.KV_USAGE_RATIO: ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    Meaning.PREEMPTIONS: ("num_preemptions_total",),
    Meaning.FINISHED_PROMPT_TOKENS: ("request_prompt_tokens_sum",),
    Meaning.FINISHED_GENERATED_TOKENS: ("request_generation_tokens_sum",),
    Meaning.E2E_COUNT: ("e2e_request_latency_seconds_count",),
    Meaning.E2E_SECONDS: ("e2e_request_latency_seconds_sum",),
    Meaning.QUEUE_SECONDS: ("request_queue_time_seconds_sum",),
    Meaning.INFERENCE_SECONDS: ("request_inference_time_seconds_sum",),
    Meaning.FIRST_TOKEN_SECONDS: ("time_to_first_token_seconds_sum",),
    Meaning.ITL_SECONDS_SQUARED: ("inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket"),
}

_SGLANG: dict[Meaning, tuple[str, ...]] = {
    Meaning.GENERATED_TOKENS: ("generation_tokens_total",),
    Meaning.PROMPT_TOKENS: ("prompt_tokens_total",),
    Meaning.PREFIX_HIT_TOKENS: ("cached_tokens_total",),
    Meaning.FIRST_TOKENS: ("time_to_first_token_seconds_count",),
    Meaning.FINISHED: ("num_requests_total",),
    Meaning.ITL_COUNT: ("inter_token_latency_seconds_count",),
    Meaning.ITL_SECONDS: ("inter_token_latency_seconds_sum",),
    Meaning.RUNNING: ("num_running_reqs",),
    Meaning.WAITING: ("num_queue_reqs",),
    Meaning.KV_USAGE_RATIO: ("token_usage",),
    Meaning.KV_USED_TOKENS: ("num_used_tokens",),
    Meaning.PREEMPTIONS: ("num_retracted_requests_total",),
}


def _table() -> dict[bytes, Series]:
    found: dict[bytes, Series] = {}
    for flavour, meanings in ((Flavour.VLLM, _VLLM), (Flavour.SGLANG, _SGLANG)):
        for meaning, names in meanings.items():
            for rank, name in enumerate(names):
                found[f"{flavour.value}:{name}".encode()] = Series(flavour, meaning, rank)
    # Hits on the device and in a connector's store add up; V1 first counted them by the device's name.
    hits = Meaning.PREFIX_HIT_TOKENS
    for name in ("prefix_cache_hits_total", "external_prefix_cache_hits_total"):
        found[f"vllm:{name}".encode()] = Series(Flavour.VLLM, hits)
    found[b"vllm:gpu_prefix_cache_hits_total"] = Series(Flavour.VLLM, hits, 1)
    realtime = Series(Flavour.SGLANG, Meaning.PREFILL_TOKENS, only=("mode", "prefill_compute"))
    found[b"sglang:realtime_tokens_total"] = realtime
    return found


SERIES: dict[bytes, Series] = _table()
"""Name on the page -> what it means."""

CACHE_INFO = b"vllm:cache_config_info"
"""Carries facts in its labels."""

BOUND_LABEL = "le"
"""Upper bound of a histogram's bucket, which counts all that is below."""

ENGINE_LABEL = "engine"
"""Which data-parallel rank a series of vLLM is of; series that differ in other labels add up."""

COPY_LABEL = "tp_rank"
"""Ranks of one engine that all tell the same: the first one is heard."""

NEEDED: dict[Flavour, frozenset[Meaning]] = {
    Flavour.VLLM: frozenset(
        {Meaning.GENERATED_TOKENS, Meaning.PROMPT_TOKENS, Meaning.FIRST_TOKENS, Meaning.FINISHED, Meaning.RUNNING}
    ),
    Flavour.SGLANG: frozenset(
        {
            Meaning.PROMPT_TOKENS,
            Meaning.FIRST_TOKENS,
            Meaning.ITL_COUNT,
            Meaning.ITL_SECONDS,
            Meaning.RUNNING,
            Meaning.KV_USED_TOKENS,
        }
    ),
}
"""Without these there are no rows; a page of the engine that lacks one says so by name."""


def family(flavour: Flavour, meaning: Meaning) -> str:
    """The name under which a page of this engine is expected to have it."""
    return next(
        name.decode() for name, series in SERIES.items() if (series.flavour, series.meaning) == (flavour, meaning)
    )
