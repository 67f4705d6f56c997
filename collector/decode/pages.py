"""A server's page of counters, Prometheus text or OpenMetrics, to readings of its engines.

    name{label="value",...} number [timestamp] [# exemplar]

``SERIES`` says which families mean what; the rest of a page is stepped over. A family that was renamed is listed under
both names, the better one first: where a page has both (one release overlaps the old name with the new one), only the
better one is read. Counters are written as they stand on the page.

    vLLM V1   0.8 ... 0.33     iteration_tokens_total counts the steps
    vLLM V0   0.6 ... 0.8      no step counter in the older ones; the gauge of the KV cache was named after the GPU
    SGLang    experimental     prompts count when their request ends, but in realtime_tokens_total; the newer ones
                               count their passes in cuda_graph_passes_total, of prompts and of answers apart

In a recording a page is one JSON object a line:

    {"unix_ns": ..., "sent_mono_ns": ..., "got_mono_ns": ..., "page": "..."}

The parser is ours because it is bounded, says why it refuses a page, and is 15 to 200 times as fast as client_python's,
which reads every family.
"""

from __future__ import annotations

import enum
import math
import re
from typing import NamedTuple

import msgspec

from collector.telemetry import Asked

_LINE_MARKS = (b'"unix_ns"', b'"page"')
_KEYS_BYTES = 1024
"""The page is the last and longest key."""
_UNIX_NS_MAX = 1 << 62


class ScrapedPage(msgspec.Struct, frozen=True):
    """What one server said at one time. ``mono_ns`` is when it was asked, by a clock that never jumps."""

    instance: str
    unix_ns: int
    mono_ns: int
    engines: tuple[EngineReading, ...]
    recording: str = ""


class _Line(msgspec.Struct, frozen=True):
    unix_ns: int
    page: str
    sent_mono_ns: int = 0
    url: str = ""


_DECODER = msgspec.json.Decoder(_Line)


def is_page_line(line: bytes) -> bool:
    """Whether a JSON line is a page, by its first keys."""
    head = line[:_KEYS_BYTES]
    return all(mark in head for mark in _LINE_MARKS)


def read_page_line(line: bytes, parser: PageParser, recording: str) -> ScrapedPage | Asked:
    """One line of a recording; recorded pages may lack the newline that a page ends with."""
    try:
        entry = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Asked.UNEXPECTED
    if not 0 < entry.unix_ns < _UNIX_NS_MAX:
        return Asked.UNEXPECTED
    page = entry.page.encode("utf-8", "replace")
    readings = parser.parse(page if page.endswith(b"\n") else page + b"\n")
    if isinstance(readings, Asked):
        return readings
    return ScrapedPage(entry.url or recording, entry.unix_ns, entry.sent_mono_ns or entry.unix_ns, readings, recording)


class Meaning(enum.IntEnum):
    """What a number of the page says; counters since the server started, unless they are named after a gauge."""

    STEPS = 0
    """Engine steps that gave output."""
    STEP_TOKENS = 1
    """Tokens computed in them; a prompt in chunks is credited whole with its last one, or each chunk as it runs."""
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
    PREFILL_SECONDS = 23
    """From when they were scheduled to their first token, of the requests of ``E2E_COUNT``."""
    DECODE_STEPS = 24
    """Those of the steps in which requests decode, where others only prefill."""
    GPU_SECONDS = 25
    """For how long the GPU was busy with forward passes."""
    FLOPS = 26
    """Floating-point operations of one GPU as the engine estimates them."""
    MEMORY_BYTES = 27
    """Bytes that one GPU reads and writes, as the engine estimates them."""


ESTIMATES = frozenset({Meaning.FLOPS, Meaning.MEMORY_BYTES})
"""Of an engine with --enable-mfu-metrics; they do not count by one, and are soon larger than what does."""


class Flavour(enum.StrEnum):
    """Which engine writes the page."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Series(NamedTuple):
    """One family: what it means, and how good a source it is (0 best).

    ``only``: a label, and what its value begins with, if the family means this for some of its series only.
    """

    flavour: Flavour
    meaning: Meaning
    rank: int = 0
    only: tuple[str, str] = ("", "")


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
    Meaning.PREFILL_SECONDS: ("request_prefill_time_seconds_sum",),
    Meaning.ITL_SECONDS_SQUARED: ("inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket"),
    Meaning.FLOPS: ("estimated_flops_per_gpu_total",),
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
    Meaning.STEPS: ("cuda_graph_passes_total",),
    Meaning.GPU_SECONDS: ("forward_execution_seconds_total",),
    Meaning.FLOPS: ("estimated_flops_per_gpu_total",),
}


def _table() -> dict[bytes, tuple[Series, ...]]:
    found: dict[bytes, tuple[Series, ...]] = {}

    def add(name: str, series: Series) -> None:
        key = f"{series.flavour.value}:{name}".encode()
        found[key] = (*found.get(key, ()), series)

    for flavour, meanings in ((Flavour.VLLM, _VLLM), (Flavour.SGLANG, _SGLANG)):
        for meaning, names in meanings.items():
            for rank, name in enumerate(names):
                add(name, Series(flavour, meaning, rank))
        for name in ("estimated_read_bytes_per_gpu_total", "estimated_write_bytes_per_gpu_total"):
            add(name, Series(flavour, Meaning.MEMORY_BYTES))
    # Hits on the device and in a connector's store add up; V1 first counted them by the device's name.
    for name, rank in (("prefix_cache", 0), ("external_prefix_cache", 0), ("gpu_prefix_cache", 1)):
        add(f"{name}_hits_total", Series(Flavour.VLLM, Meaning.PREFIX_HIT_TOKENS, rank))
    add("realtime_tokens_total", Series(Flavour.SGLANG, Meaning.PREFILL_TOKENS, only=("mode", "prefill_compute")))
    add("cuda_graph_passes_total", Series(Flavour.SGLANG, Meaning.DECODE_STEPS, only=("mode", "decode")))
    return found


SERIES: dict[bytes, tuple[Series, ...]] = _table()
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
        name.decode()
        for name, every in SERIES.items()
        if any((series.flavour, series.meaning) == (flavour, meaning) for series in every)
    )


PAGE_BYTES_MAX = 8 * 2**20
ENGINES_MAX = 64
"""Data-parallel ranks on one page."""
SERIES_MAX = 16_384
"""Needed series on one page: 64 ranks have some 5,000."""
VALUE_MAX = 2.0**53
"""Beyond it a counter no longer counts by one."""
_ESTIMATE_MAX = 1e30
_LABELS_BYTES_MAX = 4096
_TEXT_CHARS_MAX = 256
_LABEL = re.compile(rb'\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(rb"\\(.)")
_DIGITS_MAX = 18
NAN = math.nan

InfoLabels = dict[str, str]


class EngineReading(msgspec.Struct, frozen=True, gc=False):
    """What the page says of one engine: ``values[meaning]``, NaN where the page has no such family."""

    engine: str
    model: str
    flavour: Flavour
    values: tuple[float, ...]
    facts: dict[str, int | bool]


class _Place(NamedTuple):
    """A needed number: what stands behind the labels, where it is added, and how often."""

    text: bytes
    engine: int
    meaning: Meaning
    factor: float = 1.0


class PageParser:
    """Reads the pages of one server.

    Attributes:
        missing: names of needed families that the last page lacked, when that was the reason to skip it.
    """

    def __init__(self) -> None:
        self.missing: tuple[str, ...] = ()

    def parse(self, page: bytes) -> tuple[EngineReading, ...] | Asked:
        """Readings per engine, or why there are none."""
        if len(page) > PAGE_BYTES_MAX:
            return Asked.TOO_LARGE
        if not page.endswith(b"\n"):  # the last number may be the beginning of another one
            return Asked.UNEXPECTED
        search = self._find_series(page)
        if isinstance(search, Asked):
            return search
        values = _numbers(search.chosen(), len(search.known))
        if values is None:
            return Asked.UNEXPECTED
        return tuple(
            EngineReading(name, model, flavour, tuple(numbers), facts)
            for (name, model, flavour, facts), numbers in zip(search.known, values, strict=True)
        )

    def explain(self, outcome: Asked) -> str:
        """Why the last page was refused: of families that it lacks, which."""
        lacks = f": {', '.join(self.missing)}" if outcome is Asked.MISSING_FAMILIES else ""
        return f"{outcome.value}{lacks}"

    def _find_series(self, page: bytes) -> _Search | Asked:
        search = _Search()
        for line in page.split(b"\n"):
            name, brace, _ = line.partition(b"{")
            every = SERIES.get(name if brace else name.partition(b" ")[0])
            if every is not None:
                search.add(line, every)
            elif line.startswith(CACHE_INFO):
                search.infos.append(_labels(line)[0])
            if search.series > SERIES_MAX:
                return Asked.TOO_LARGE
        if not search.known:
            return Asked.UNEXPECTED
        if len(search.known) > ENGINES_MAX:
            return Asked.TOO_LARGE
        self.missing = _missing(search.known[0][2], {meaning for index, meaning in search.best if index == 0})
        return Asked.MISSING_FAMILIES if self.missing else search


def facts_in(page: bytes) -> dict[str, int | bool]:
    """Facts of the first engine in the labels of a page, whatever else is there."""
    infos = [_labels(line)[0] for line in page.split(b"\n") if line.startswith(CACHE_INFO)]
    return _cache_facts(infos[0], len({info.get(ENGINE_LABEL, "") for info in infos})) if infos else {}


class _Search:
    """Needed series of a page."""

    def __init__(self) -> None:
        self.known: list[tuple[str, str, Flavour, dict[str, int | bool]]] = []
        self.best: dict[tuple[int, Meaning], int] = {}
        self.infos: list[InfoLabels] = []
        self._engines: dict[str, int] = {}
        self._places: list[tuple[int, _Place]] = []
        self._seen: set[tuple[bytes, tuple[tuple[str, str], ...]]] = set()
        self._histograms: dict[tuple[Series, tuple[tuple[str, str], ...]], list[tuple[float, _Place]]] = {}

    def add(self, line: bytes, every: tuple[Series, ...]) -> None:
        """Note a line of a family for all that it means."""
        labels, end = _labels(line)
        every = tuple(series for series in every if labels.get(series.only[0], "").startswith(series.only[1]))
        if end < 0 or not every:
            return
        labels.pop(COPY_LABEL, None)
        identity = (line[: _name_end(line)], tuple(sorted(labels.items())))
        if identity in self._seen:  # of another rank, or simply there twice
            return
        self._seen.add(identity)
        name = labels.get(ENGINE_LABEL, "0")
        index = self._engines.setdefault(name, len(self.known))
        if index == len(self.known):
            if index > ENGINES_MAX:
                return
            self.known.append((name, labels.get("model_name", ""), every[0].flavour, {}))
        for series in every:
            place = _Place(line[end:], index, series.meaning)
            if BOUND_LABEL in labels:
                self._add_bucket(labels, series, place)
            else:
                self._places.append((series.rank, place))
            key = (index, series.meaning)
            self.best[key] = min(self.best.get(key, series.rank), series.rank)

    def _add_bucket(self, labels: InfoLabels, series: Series, place: _Place) -> None:
        try:
            bound = float(labels.pop(BOUND_LABEL))
        except ValueError:
            return
        if not 0.0 <= bound <= VALUE_MAX and bound != math.inf:
            return
        self._histograms.setdefault((series, tuple(sorted(labels.items()))), []).append((bound, place))

    @property
    def series(self) -> int:
        """How many were noted."""
        return len(self._seen) + len(self.infos)

    def chosen(self) -> list[_Place]:
        """The numbers of the best series of each meaning; engines get the facts in labels."""
        for (series, _), buckets in self._histograms.items():
            self._places += [(series.rank, place) for place in _squares(buckets)]
        for info in self.infos:
            for name, index in self._engines.items():
                if info.get(ENGINE_LABEL, name) == name:
                    self.known[index][3].update(_cache_facts(info, len(self._engines)))
        return [place for rank, place in self._places if rank == self.best[place.engine, place.meaning]]


def _squares(buckets: list[tuple[float, _Place]]) -> list[_Place]:
    """Places whose sum is that of the squares: every bucket also counts what is in those below it.

    Of buckets with one bound the first counts, as ``1e999`` and ``+Inf`` are one.
    """
    by_bound = dict(reversed(buckets))
    bounds = sorted(by_bound)
    middles = [
        (low + high) / 2.0 if high < math.inf else low for low, high in zip([0.0, *bounds], bounds, strict=False)
    ]
    above = [*(middle**2 for middle in middles[1:]), 0.0]
    return [
        place._replace(factor=middle**2 - next_square)
        for place, middle, next_square in zip((by_bound[bound] for bound in bounds), middles, above, strict=True)
    ]


def _missing(flavour: Flavour, found: set[Meaning]) -> tuple[str, ...]:
    lacking = sorted(NEEDED[flavour] - found)
    # How long steps take comes from the latencies or from the clock; how many there were, from the steps' counter or
    # from the latencies' one.
    if Meaning.STEPS not in found and Meaning.ITL_COUNT not in found:
        lacking.append(Meaning.STEPS if flavour is Flavour.VLLM else Meaning.ITL_COUNT)
    return tuple(dict.fromkeys(family(flavour, meaning) for meaning in lacking))


def _numbers(places: list[_Place], engines: int) -> list[list[float]] | None:
    """Values per engine; None where a number is none."""
    values = [[NAN] * len(Meaning) for _ in range(engines)]
    for text, engine, meaning, factor in places:
        value = _first_number(text)
        if not 0.0 <= value <= (_ESTIMATE_MAX if meaning in ESTIMATES else VALUE_MAX):
            return None
        row, value = values[engine], value * factor
        row[meaning] = value if math.isnan(row[meaning]) else row[meaning] + value
    return values


def _first_number(text: bytes) -> float:
    """The number before a timestamp or an exemplar; NaN for anything else."""
    parts = text.split(None, 1)
    try:
        return float(parts[0]) if parts else NAN
    except ValueError:
        return NAN


def _name_end(line: bytes) -> int:
    end = line.find(b"{")
    return end if end >= 0 else line.find(b" ")


def _labels(line: bytes) -> tuple[InfoLabels, int]:
    """Labels, and where the number begins; -1 for a line that is none."""
    at = _name_end(line)
    if at < 0:
        return {}, -1
    if line[at : at + 1] == b" ":
        return {}, at + 1
    labels: InfoLabels = {}
    at += 1
    limit = at + _LABELS_BYTES_MAX
    while match := _LABEL.match(line, at, limit):
        value = _ESCAPED.sub(_unescaped, match[2]) if b"\\" in match[2] else match[2]
        labels[match[1].decode()] = value.decode("utf-8", "replace")[:_TEXT_CHARS_MAX]
        at = match.end()
    return (labels, at + 1) if line[at : at + 1] == b"}" else ({}, -1)


def _unescaped(match: re.Match[bytes]) -> bytes:
    return b"\n" if match[1] == b"n" else match[1]


def _cache_facts(labels: InfoLabels, engines: int) -> dict[str, int | bool]:
    """Facts of one engine: vLLM tells each of them the blocks of all ``engines`` of the page together."""
    out: dict[str, int | bool] = {}
    for name, shared_by in (("block_size", 1), ("num_gpu_blocks", engines)):
        text = labels.get(name, "")
        if text.isascii() and text.isdigit() and (own := int(text[:_DIGITS_MAX]) // shared_by) > 0:
            out[name] = own
    if labels.get("enable_prefix_caching") in ("True", "False"):
        out["enable_prefix_caching"] = labels["enable_prefix_caching"] == "True"
    return out
