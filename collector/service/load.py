"""The recent load of each engine, and the latencies of its requests: advice is given for that load.

Sums over what was decoded, kept per process; what lies ``HALF_LIFE_NS`` before its newest event counts half. They
follow the load and teach nothing: not saved, and outside of what a replay has to repeat.

    ITL         = sum of FIRST_TOKEN -> FINISHED / sum of (output tokens - 1)
    TTFT        = mean of QUEUED -> FIRST_TOKEN
    running     = sum running decoding / sum decoding                      over steps: what a decoding request meets
                  integral running² / integral running                     over time, where requests alone are known
    concurrency = the same with running + waiting in place of the first running
    prefix hit  = 1 - prefill tokens of steps / prompt tokens of requests  where all steps come, clipped to 0 … 1
                  cached tokens / prompt tokens of requests                where requests tell them, else 0

In a burst a request meets many more than there are on the mean over time: the times between bursts are met by nobody.
The prefix hit compares what was computed with what has finished: it is too low while load grows, else too high.

Of a server whose page is all that is known, the same sums grow between two of its pages: requests that had a first
token, tokens of prompts and of output; inter-token and first-token latencies; the gauges running + waiting, weighted
with the tokens decoded meanwhile; prefix hits ÷ prompt tokens. Nothing is added across a counter that fell.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Final, NamedTuple, TypeVar

import numpy as np

from collector.decode import CoreSpan, RequestSpan, SpanEventKind, Telemetry
from collector.decode.pages import Meaning, ScrapedPage
from collector.join.pages import keys_of
from exporters.what_if import WorkloadProfile
from online import ConfigSnapshot, Floats, Ints, Quality

HALF_LIFE_NS: Final = 30 * 10**9
"""Longer ones mix loads that differ, and the ITL of their mean is not the mean of their ITL; shorter ones scatter.
Chosen on c10_long; on c1, c2, c5, c6 and c7 any of 15 to 120 s predicts ITL about as well."""
FORGET_NS: Final = 300 * 10**9
"""The load of a process is forgotten after this long without a request."""
REQUESTS_MAX: Final = 4096
"""Newest requests kept per process, to count the requests that each of them met."""
REQUESTS_MIN: Final = 5
"""Fewer finished requests give no workload; nor does what is left of so many after ``FORGET_NS`` of steps alone."""
_TOKENS_MAX: Final = 1e9
_PREFILL_TOLD: Final = frozenset({Quality.STEPS_PLUS.label, Quality.STEPS.label, Quality.METRICS.label})
"""Qualities of telemetry that count all computed prompt tokens."""
_ASKED: Final = (Meaning.FIRST_TOKENS, Meaning.PROMPT_TOKENS, Meaning.GENERATED_TOKENS)

Counted = tuple[float, ...]
"""Values of a page by :class:`Meaning`, NaN where it has no such family."""
T = TypeVar("T")


class _Sums(NamedTuple):
    """Sums of one process; sums of processes add up."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    waited_s: float = 0.0
    decoding_s: float = 0.0
    first_tokens: float = 0.0
    decoded_tokens: float = 0.0
    prefill_tokens: float = 0.0
    decoding: float = 0.0
    ran: float = 0.0
    waited: float = 0.0


_NOTHING: Final = _Sums()


def _met(decoding: Floats, running: Floats | Ints, waiting: Floats | Ints) -> dict[str, float]:
    """Add the requests that decoding requests met, at several times."""
    return {
        "decoding": float(decoding.sum()),
        "ran": float(decoding @ running),
        "waited": float(decoding @ waiting),
    }


def _sums_between(start: Counted, end: Counted) -> _Sums:
    """What a server counted between two of its pages; what its page does not count is left out."""

    def increase(meaning: Meaning) -> float:
        return end[meaning] - start[meaning]

    def sane(*values: float) -> bool:
        return all(0.0 <= value <= _TOKENS_MAX for value in values)  # false for NaN too

    requests, prompt, output = map(increase, _ASKED)
    if not sane(requests, prompt, output):
        return _NOTHING
    hits, all_prompts = increase(Meaning.PREFIX_HIT_TOKENS), increase(Meaning.PROMPT_TOKENS)
    computed = 1.0 - min(hits / all_prompts, 1.0) if sane(hits) and all_prompts > 0.0 else 1.0
    sums = _Sums(requests, prompt, output, prefill_tokens=prompt * computed)
    first, first_s = increase(Meaning.FIRST_TOKENS), increase(Meaning.FIRST_TOKEN_SECONDS)
    api_s = increase(Meaning.E2E_SECONDS) - increase(Meaning.QUEUE_SECONDS) - increase(Meaning.INFERENCE_SECONDS)
    if sane(first, first_s):
        sums = sums._replace(first_tokens=first, waited_s=first_s - (api_s if sane(api_s) else 0.0))
    decoded, decoding_s = increase(Meaning.ITL_COUNT), increase(Meaning.ITL_SECONDS)
    running, waiting = ((start[gauge] + end[gauge]) / 2.0 for gauge in (Meaning.RUNNING, Meaning.WAITING))
    if sane(decoded, decoding_s, running, waiting):
        met = {"decoding": decoded, "ran": running * decoded, "waited": waiting * decoded}
        sums = sums._replace(decoded_tokens=decoded, decoding_s=decoding_s, **met)
    return sums


@dataclass(slots=True)
class _Process:
    """What one process said, as of its newest event, and when that came, by the clock here; 0 in a recording."""

    sums: Floats = field(default_factory=lambda: np.zeros(len(_NOTHING)))
    newest_unix_ns: int = 0
    arrived_unix_ns: int = 0
    requests: float = 0.0
    """All that were ever counted."""
    in_flight: array[float] = field(default_factory=lambda: array("d"))
    """When each of the newest requests was queued, was first scheduled and finished, in seconds, one behind another."""

    def add(self, unix_ns: int, sums: _Sums) -> None:
        """Add what happened at a time."""
        ahead = (unix_ns - self.newest_unix_ns) / HALF_LIFE_NS
        self.sums = self.sums * 0.5 ** max(ahead, 0.0) + np.array(sums) * 0.5 ** max(-ahead, 0.0)
        self.newest_unix_ns = max(self.newest_unix_ns, unix_ns)
        self.requests += sums.requests

    def add_core(self, span: CoreSpan) -> None:
        """Add a request by its events, if it was queued, had a first token and finished."""
        at_ns = {mark.kind: mark.ts_ns for mark in reversed(span.events)}  # the first of each kind
        kinds = (SpanEventKind.QUEUED, SpanEventKind.FIRST_TOKEN, SpanEventKind.FINISHED)
        if all(kind in at_ns for kind in kinds):
            queued_ns, first_ns, finished_ns = (at_ns[kind] for kind in kinds)
            queue_s = (at_ns.get(SpanEventKind.SCHEDULED, queued_ns) - queued_ns) / 1e9
            times_s = queue_s, (first_ns - queued_ns) / 1e9, (finished_ns - first_ns) / 1e9
            self._add_asked(span.end_unix_ns, (span.prompt_tokens, span.events[-1].output_tokens, 0), times_s)

    def add_request(self, span: RequestSpan) -> None:
        """A request that its span tells; its time in the API process is left out where queue and prefill are told."""
        queue_s, waited_s = span.queue_s, span.queue_s + span.prefill_s
        if math.isnan(waited_s):
            queue_s, waited_s = 0.0, span.first_token_s
        tokens = span.prompt_tokens, span.output_tokens, max(span.cached_tokens, 0)
        self._add_asked(span.end_unix_ns, tokens, (queue_s, waited_s, span.decode_s))

    def _add_asked(self, end_unix_ns: int, tokens: tuple[int, int, int], times_s: tuple[float, float, float]) -> None:
        """A request: tokens of prompt, of output, cached; in the queue, to the first token, from there to the last."""
        (prompt, output, cached), (queue_s, waited_s, decoding_s) = tokens, times_s
        if prompt < 1 or output < 1 or not 0.0 <= queue_s <= waited_s or decoding_s < 0.0:  # that cannot be
            return
        self.add(end_unix_ns, _Sums(1, prompt, output, cached, waited_s, decoding_s, 1, output - 1))
        end_s = end_unix_ns / 1e9
        queued_s = end_s - waited_s - decoding_s
        self.in_flight.extend((queued_s, queued_s + queue_s, end_s))
        del self.in_flight[: -3 * REQUESTS_MAX]

    def load(self) -> _Sums:
        """The sums; where neither steps nor pages said whom a request met, with what the requests say of it."""
        sums = _Sums(*self.sums.tolist())
        if not self.in_flight or sums.decoding:
            return sums
        ends_s = np.sort(np.reshape(self.in_flight, (-1, 3)), axis=0)
        moments_s = np.sort(ends_s, axis=None)
        queued, scheduled, finished = (np.searchsorted(column, moments_s[:-1], side="right") for column in ends_s.T)
        running = scheduled - finished
        weight_s = np.diff(moments_s) * 0.5 ** ((self.newest_unix_ns / 1e9 - moments_s[1:]) / (HALF_LIFE_NS / 1e9))
        return sums._replace(**_met(running * weight_s, running, queued - scheduled))


class RecentLoad:
    """Load of all processes; belongs to the worker thread, and returns a new dictionary each time.

    It keeps two processes for each of ``engines_max``, for the API process of an engine has another name.
    """

    def __init__(self, engines_max: int) -> None:
        self._processes_max = 2 * engines_max
        self._processes: dict[str, _Process] = {}
        self._counted: dict[str, Counted] = {}
        """The last page of each server."""

    @property
    def processes(self) -> int:
        """Number of processes with recent requests."""
        return len(self._processes)

    def record(self, telemetry: Telemetry) -> None:
        """Add the telemetry of one process."""
        if not (telemetry.core or telemetry.requests or len(telemetry.steps)):
            return
        process = self._process(telemetry.instance, telemetry.arrived_unix_ns)
        for span in telemetry.core:
            process.add_core(span)
        for request in telemetry.requests:
            process.add_request(request)
        if len(steps := telemetry.steps):
            decoding = steps["decode_requests"].astype(np.float64)
            met = _met(decoding, decoding + steps["prefill_requests"], steps["waiting"])
            process.add(int(steps["unix_ns"].max()), _Sums(prefill_tokens=float(steps["prefill_tokens"].sum()), **met))

    def record_page(self, page: ScrapedPage) -> None:
        """Add what one server counted since its last page; nothing of one that idles, and is scraped on."""
        for (_, instance), reading in zip(keys_of(page), page.engines, strict=True):
            before, now = self._counted.get(instance), reading.values
            self._keep_newest(self._counted, instance, now)
            if before is not None and len(before) == len(now) and any(map(gt, now, before)):
                process = self._process(instance, 0 if page.recording else page.unix_ns)
                process.add(page.unix_ns, _sums_between(before, now))

    def _process(self, instance: str, arrived_unix_ns: int) -> _Process:
        """One process, which makes room for itself."""
        process = self._processes.get(instance) or _Process()
        process.arrived_unix_ns = arrived_unix_ns
        self._keep_newest(self._processes, instance, process)
        return process

    def _keep_newest(self, known: dict[str, T], name: str, value: T) -> None:
        """Set a value, and let go of the one that was set least lately where there are too many."""
        known.pop(name, None)
        known[name] = value
        if len(known) > self._processes_max:
            del known[next(iter(known))]

    def forget_idle(self, now_unix_nano: int) -> None:
        """Let go of what was asked too long ago; of a recording nothing is."""
        self._processes = {
            instance: process
            for instance, process in self._processes.items()
            if not process.arrived_unix_ns or process.arrived_unix_ns > now_unix_nano - FORGET_NS
        }

    def workloads(self, configs: Iterable[ConfigSnapshot], now_unix_nano: int) -> dict[str, WorkloadProfile]:
        """The workload of each configuration with recent requests."""
        self.forget_idle(now_unix_nano)
        known = {}
        for config in configs:
            told = (self._processes.get(engine.instance) for engine in config.engines)
            mix = _mix_of([each for each in told if each], is_prefill_known=config.telemetry in _PREFILL_TOLD)
            if mix is not None:
                known[config.config_id] = mix
        return known


def _mix_of(processes: Sequence[_Process], *, is_prefill_known: bool) -> WorkloadProfile | None:
    """The workload of processes together; None where requests are too few."""
    total = _Sums(*map(sum, zip(*(process.load() for process in processes if process.requests), strict=True)))
    is_over = min(total.requests, total.prompt_tokens) < REQUESTS_MIN * 0.5 ** (FORGET_NS / HALF_LIFE_NS)
    if is_over or sum(process.requests for process in processes) < REQUESTS_MIN:
        return None
    computed = total.prompt_tokens - total.cached_tokens
    if is_prefill_known and total.prefill_tokens:
        computed = min(total.prefill_tokens, total.prompt_tokens)
    met = total.decoding or 1.0
    return WorkloadProfile(
        prompt_tokens=total.prompt_tokens / total.requests,
        output_tokens=total.output_tokens / total.requests,
        prefix_hit=1.0 - max(computed, 0.0) / total.prompt_tokens,
        concurrency=max(1.0, (total.ran + total.waited) / met),
        running=max(1.0, total.ran / met),
        itl_us=1e6 * total.decoding_s / total.decoded_tokens if total.decoded_tokens else None,
        ttft_us=1e6 * max(total.waited_s, 0.0) / total.first_tokens if total.first_tokens else None,
    )
