"""A server's page of counters, Prometheus text or OpenMetrics, to readings of its engines.

    name{label="value",...} number [timestamp] [# exemplar]

``SERIES`` says which families mean what.

    vLLM      0.15 ... 0.33    iteration_tokens_total counts the steps
    SGLang    experimental     prompts count when their request ends, but in realtime_tokens_total; passes count in
                               cuda_graph_passes_total, of prompts and of answers apart

In a recording a page is one JSON object a line:

    {"unix_ns": ..., "sent_mono_ns": ..., "got_mono_ns": ..., "page": "..."}

Lines of other families are dropped unread, which are most of a page; prometheus_client reads the rest.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from collector.telemetry import PullOutcome

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_LINE_SIGNATURES = (b'"unix_ns"', b'"page"')
_KEYS_BYTES = 1024
"""Bytes of a line that are searched for its keys: the page is the last and longest value."""


class ScrapedPage(msgspec.Struct, frozen=True):
    """What one server said at one time. ``mono_ns`` is when it was asked, by a clock that never jumps."""

    instance: str
    unix_ns: int
    mono_ns: int
    engines: tuple[EngineReading, ...]
    recording: str = ""


class _Line(msgspec.Struct, frozen=True):
    unix_ns: Annotated[int, msgspec.Meta(gt=0, lt=1 << 62)]
    page: str
    sent_mono_ns: int = 0
    url: str = ""


_DECODER = msgspec.json.Decoder(_Line)


def is_page_line(line: bytes) -> bool:
    """Whether a JSON line is a page, by its first keys."""
    head = line[:_KEYS_BYTES]
    return all(mark in head for mark in _LINE_SIGNATURES)


def read_page_line(line: bytes, recording: str) -> ScrapedPage | PageProblem:
    """One line of a recording; recorded pages may lack the newline that a page ends with."""
    try:
        entry = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return PageProblem(PullOutcome.UNEXPECTED)
    page = entry.page.encode("utf-8", "replace")
    readings = parse_page(page if page.endswith(b"\n") else page + b"\n")
    if isinstance(readings, PageProblem):
        return readings
    return ScrapedPage(entry.url or recording, entry.unix_ns, entry.sent_mono_ns or entry.unix_ns, readings, recording)


class Meaning(enum.IntEnum):
    """Meaning of a number on the page: a counter since the server's start, unless marked as a gauge."""

    STEPS = 0
    """Engine steps that gave output."""
    STEP_TOKENS = 1
    """Tokens computed in those steps; a prompt in chunks counts whole with its last chunk, or chunk by chunk."""
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
    FIRST_TOKEN_SECONDS = 21
    """From arrival to first token, of the requests of ``FIRST_TOKENS``; what other models of a page learn from."""
    PREFILL_SECONDS = 22
    """From when they were scheduled to their first token, of the requests of ``E2E_COUNT``."""
    DECODE_STEPS = 23
    """Those of the steps in which requests decode, where others only prefill."""
    GPU_SECONDS = 24
    """For how long the GPU was busy with forward passes."""
    FLOPS = 25
    """Floating-point operations of one GPU as the engine estimates them."""
    MEMORY_BYTES = 26
    """Bytes that one GPU reads and writes, as the engine estimates them."""


ESTIMATES = frozenset({Meaning.FLOPS, Meaning.MEMORY_BYTES})
"""Estimates of an engine with --enable-mfu-metrics; they may exceed ``VALUE_MAX``."""


class Flavour(enum.StrEnum):
    """Which engine writes the page."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Series(NamedTuple):
    """One family and what it means; ``mode``: how the label of that name begins, where only such series mean it."""

    flavour: Flavour
    meaning: Meaning
    mode: str


_BOTH = {
    Meaning.GENERATED_TOKENS: "generation_tokens_total",
    Meaning.PROMPT_TOKENS: "prompt_tokens_total",
    Meaning.FIRST_TOKENS: "time_to_first_token_seconds_count",
    Meaning.ITL_COUNT: "inter_token_latency_seconds_count",
    Meaning.ITL_SECONDS: "inter_token_latency_seconds_sum",
    Meaning.FLOPS: "estimated_flops_per_gpu_total",
    Meaning.MEMORY_BYTES: "estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total",
}

_VLLM = _BOTH | {
    Meaning.STEPS: "iteration_tokens_total_count",
    Meaning.STEP_TOKENS: "iteration_tokens_total_sum",
    Meaning.FINISHED: "request_success_total",
    Meaning.RUNNING: "num_requests_running",
    Meaning.WAITING: "num_requests_waiting",
    Meaning.KV_USAGE_RATIO: "kv_cache_usage_perc",
    Meaning.PREEMPTIONS: "num_preemptions_total",
    Meaning.FINISHED_PROMPT_TOKENS: "request_prompt_tokens_sum",
    Meaning.FINISHED_GENERATED_TOKENS: "request_generation_tokens_sum",
    Meaning.E2E_COUNT: "e2e_request_latency_seconds_count",
    Meaning.E2E_SECONDS: "e2e_request_latency_seconds_sum",
    Meaning.QUEUE_SECONDS: "request_queue_time_seconds_sum",
    Meaning.INFERENCE_SECONDS: "request_inference_time_seconds_sum",
    Meaning.FIRST_TOKEN_SECONDS: "time_to_first_token_seconds_sum",
    Meaning.PREFILL_SECONDS: "request_prefill_time_seconds_sum",
    Meaning.PREFIX_HIT_TOKENS: "prefix_cache_hits_total external_prefix_cache_hits_total",
}

_SGLANG = _BOTH | {
    Meaning.PREFIX_HIT_TOKENS: "cached_tokens_total",
    Meaning.FINISHED: "num_requests_total",
    Meaning.RUNNING: "num_running_reqs",
    Meaning.WAITING: "num_queue_reqs",
    Meaning.KV_USAGE_RATIO: "token_usage",
    Meaning.KV_USED_TOKENS: "num_used_tokens",
    Meaning.PREEMPTIONS: "num_retracted_requests_total",
    Meaning.STEPS: "cuda_graph_passes_total",
    Meaning.DECODE_STEPS: "cuda_graph_passes_total/decode",
    Meaning.PREFILL_TOKENS: "realtime_tokens_total/prefill_compute",
    Meaning.GPU_SECONDS: "forward_execution_seconds_total",
}
FAMILIES = {Flavour.VLLM: _VLLM, Flavour.SGLANG: _SGLANG}
"""Names of the families that mean it together, with the mode where only some of their series do."""


def _table() -> dict[bytes, tuple[Series, ...]]:
    found: dict[bytes, tuple[Series, ...]] = {}
    for flavour, meanings in FAMILIES.items():
        for meaning, names in meanings.items():
            for family in names.split():
                name, _, mode = family.partition("/")
                key = f"{flavour.value}:{name}".encode()
                found[key] = (*found.get(key, ()), Series(flavour, meaning, mode))
    return found


SERIES = _table()
"""Name on the page -> what it means."""

CACHE_INFO = b"vllm:cache_config_info"
"""Family whose labels carry facts."""
_READ = frozenset((*SERIES, CACHE_INFO))

_SPECULATION = b"\nvllm:spec_decode_num_drafts", b"\nsglang:spec_verify_calls_total"
"""Prefixes of lines that only servers with speculative decoding write."""

ENGINE_LABEL = "engine"
"""Which data-parallel rank a series of vLLM is of; series that differ in other labels add up."""

COPY_LABEL = "tp_rank"
"""Label of ranks that all report the same numbers; only the first rank is read."""

_COUNTED = {Meaning.STEPS, Meaning.ITL_COUNT, Meaning.ITL_SECONDS, Meaning.PROMPT_TOKENS, Meaning.FIRST_TOKENS}
_NEEDED = {
    Flavour.VLLM: {*_COUNTED, Meaning.GENERATED_TOKENS, Meaning.FINISHED, Meaning.RUNNING},
    Flavour.SGLANG: {*_COUNTED, Meaning.PREFILL_TOKENS, Meaning.KV_USED_TOKENS, Meaning.RUNNING},
}
"""Without these there are no rows; a page of the engine that lacks one says so by name."""


PAGE_BYTES_MAX = 8 * 2**20
ENGINES_MAX = 64
"""Data-parallel ranks on one page."""
SERIES_MAX = 16_384
"""Needed series on one page: 64 ranks have some 1,700."""
SERIES_BYTES_MAX = 2 * 2**20
"""Bytes of these series: 64 ranks have 0.2 MB; the densest labels take half a microsecond a byte."""
VALUE_MAX = 2.0**53
"""Beyond it a counter no longer counts by one."""
_ESTIMATE_MAX = 1e30
_TEXT_CHARS_MAX = 256
_DIGITS_MAX = 18
NAN = math.nan

Labels = dict[str, str]


class EngineReading(msgspec.Struct, frozen=True, gc=False):
    """What the page says of one engine: ``values[meaning]``, NaN where the page has no such family."""

    engine: str
    model: str
    flavour: Flavour
    values: tuple[float, ...]
    facts: dict[str, int | bool]


class PageProblem(msgspec.Struct, frozen=True, gc=False):
    """Why a page cannot be learned from; ``lacks``: names of the families that it needs and does not have."""

    outcome: PullOutcome
    lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.outcome.value}: {', '.join(self.lacks)}" if self.lacks else self.outcome.value


def parse_page(page: bytes) -> tuple[EngineReading, ...] | PageProblem:
    """Readings of each engine on a server's page, or why there are none."""
    if len(page) > PAGE_BYTES_MAX:
        return PageProblem(PullOutcome.TOO_LARGE)
    if not page.endswith(b"\n"):  # the last number may be the beginning of another one
        return PageProblem(PullOutcome.UNEXPECTED)
    engines = _engines_on(page)
    if isinstance(engines, PullOutcome):
        return PageProblem(engines)
    if lacks := engines[0].missing():
        return PageProblem(PullOutcome.MISSING_FAMILIES, lacks)
    readings = [engine.reading() for engine in engines]
    return PageProblem(PullOutcome.UNEXPECTED) if None in readings else tuple(filter(None, readings))


def facts_in(page: bytes) -> dict[str, int | bool]:
    """Facts of the first engine on a page, which may lack families that rows need."""
    engines = _engines_on(page)
    return {} if isinstance(engines, PullOutcome) else engines[0].facts


def _samples(page: bytes) -> list[Sample] | PullOutcome:
    """Samples of the known families."""
    # a replay of spans does not need it, and it takes 10 ms
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    lines = [line for line in page.split(b"\n") if line.partition(b"{")[0].partition(b" ")[0] in _READ]
    text = b"\n".join(lines)
    if len(lines) > SERIES_MAX or len(text) > SERIES_BYTES_MAX:
        return PullOutcome.TOO_LARGE
    try:
        families = text_string_to_metric_families(text.decode("utf-8", "replace"))
        return [sample for family in families for sample in family.samples]
    except ValueError:
        return PullOutcome.UNEXPECTED


def _engines_on(page: bytes) -> list[_Engine] | PullOutcome:
    samples = _samples(page)
    if isinstance(samples, PullOutcome):
        return samples
    engines: dict[str, _Engine] = {}
    infos: list[Labels] = []
    facts: dict[str, int | bool] = {"speculative_decoding": True} if any(mark in page for mark in _SPECULATION) else {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for name, labels, value, *_ in samples:
        labels.pop(COPY_LABEL, None)
        identity = name, frozenset(labels.items())
        if identity in seen:  # of another rank, or simply there twice
            continue
        seen.add(identity)
        every = SERIES.get(name.encode())
        if every is None:
            infos.append(labels)
            continue
        engine = labels.get(ENGINE_LABEL, "0")[:_TEXT_CHARS_MAX]
        if engine not in engines:
            model = labels.get("model_name", "")[:_TEXT_CHARS_MAX]
            engines[engine] = _Engine(engine, model, every[0].flavour, facts)
            if len(engines) > ENGINES_MAX:
                return PullOutcome.TOO_LARGE
        engines[engine].add(labels, every, value)
    for own, told in engines.items():
        for info in infos:
            if info.get(ENGINE_LABEL, own) == own:
                told.facts |= _cache_facts(info, len(engines))
    return [*engines.values()] or PullOutcome.UNEXPECTED


class _Engine:
    """What is read of one engine so far."""

    def __init__(self, name: str, model: str, flavour: Flavour, facts: dict[str, int | bool]) -> None:
        self._name, self._model, self._flavour = name, model, flavour
        self.facts = dict(facts)
        self._values: defaultdict[Meaning, float] = defaultdict(float)

    def add(self, labels: Labels, every: tuple[Series, ...], value: float) -> None:
        """Add a sample of a family to every meaning that the family has."""
        for _, meaning, mode in every:
            if not labels.get("mode", "").startswith(mode):
                continue
            good = 0.0 <= value <= (_ESTIMATE_MAX if meaning in ESTIMATES else VALUE_MAX)
            self._values[meaning] += value if good else NAN

    def missing(self) -> tuple[str, ...]:
        """Names of families without which there are no rows."""
        lacking = sorted(_NEEDED[self._flavour] - self._values.keys())
        return tuple(f"{self._flavour.value}:{FAMILIES[self._flavour][meaning]}" for meaning in lacking)

    def reading(self) -> EngineReading | None:
        """The reading of this engine; None where a value is not a number."""
        if any(map(math.isnan, self._values.values())):
            return None
        values = tuple([self._values.get(meaning, NAN) for meaning in Meaning])
        return EngineReading(self._name, self._model, self._flavour, values, self.facts)


def _cache_facts(labels: Labels, engines: int) -> dict[str, int | bool]:
    """Facts of one engine; vLLM gives each engine the blocks of all ``engines`` on the page together."""
    out: dict[str, int | bool] = {}
    for name, shared_by in (("block_size", 1), ("num_gpu_blocks", engines)):
        text = labels.get(name, "")
        if text.isascii() and text.isdigit() and (own := int(text[:_DIGITS_MAX]) // shared_by) > 0:
            out[name] = own
    if labels.get("enable_prefix_caching") in ("True", "False"):
        out["enable_prefix_caching"] = labels["enable_prefix_caching"] == "True"
    return out
