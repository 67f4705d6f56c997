"""What each engine was asked lately, and what its requests saw: the load that advice is given for.

Sums over what was decoded, kept per process and per minute of its events, five minutes back from its newest one. It
follows the load and teaches nothing: not saved, and outside of what a replay has to repeat. Minutes are told apart
since loads differ: the mean request of a calm and of a busy minute is no request of either, and a closed loop of it
has other steps.

    ITL         = sum of FIRST_TOKEN -> FINISHED / sum of (output tokens - 1)
    TTFT        = mean of QUEUED -> FIRST_TOKEN
    running     = sum running decoding / sum decoding                      over steps: what a decoding request meets
                  integral running² / integral running                     over time, where requests alone are known
    concurrency = the same with running + waiting in place of the first running
    prefix hit  = 1 - prefill tokens of steps / prompt tokens of requests  where all steps come, clipped to 0 … 1
                  cached tokens / prompt tokens of requests                where requests tell them, else 0

In a burst a request meets many more than there are on the mean over time: the times between bursts are met by nobody.
The prefix hit compares what was computed with what has finished: it is too low while load grows, else too high.

Of a server whose page is all that is known, the same sums grow between two of its pages: finished requests, their
tokens; inter-token and first-token latencies; the gauges running + waiting, weighted with the tokens decoded
meanwhile; prefix hits ÷ prompt tokens. Nothing is added across a counter that fell.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import add, gt
from typing import Final, NamedTuple, TypeVar

import numpy as np

from collector.decode import CoreSpan, RequestSpan, SpanEventKind, StepColumns, Telemetry
from collector.decode.pages import Meaning, ScrapedPage
from collector.join.pages import keys_of
from exporters.what_if import WorkloadProfile
from online import ConfigSnapshot, Quality

MINUTE_NS: Final = 60_000_000_000
MINUTES: Final = 5
PROCESSES_MAX: Final = 128
REQUESTS_MAX: Final = 4096
"""Of each process: the newest, by which it is told whom each of them met."""
REQUESTS_MIN: Final = 5
"""Fewer finished requests are no mix."""
_SECONDS_MAX: Final = 86_400.0
_TOKENS_MAX: Final = 1e9
_PREFILL_TOLD: Final = frozenset({Quality.STEPS_PLUS.label, Quality.STEPS.label, Quality.METRICS.label})
"""Telemetry that tells all prompt tokens computed."""
_FINISHED: Final = (Meaning.FINISHED, Meaning.FINISHED_PROMPT_TOKENS, Meaning.FINISHED_GENERATED_TOKENS)
_BEGUN: Final = (Meaning.FIRST_TOKENS, Meaning.PROMPT_TOKENS, Meaning.GENERATED_TOKENS)
"""For pages that do not sum up what has finished."""

Counted = tuple[float, ...]
"""Values of a page by :class:`Meaning`, NaN where it has no such family."""
T = TypeVar("T")


class _Sums(NamedTuple):
    """Of one process and minute; all of them add up."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    first_tokens: float = 0.0
    waited_s: float = 0.0
    decoding_s: float = 0.0
    decoded_tokens: float = 0.0
    prefill_tokens: float = 0.0
    decoding: float = 0.0
    ran: float = 0.0
    waited: float = 0.0


_NOTHING: Final = _Sums()


def _sum_of(many: Iterable[_Sums]) -> _Sums:
    return _Sums(*map(sum, zip(_NOTHING, *many, strict=True)))


def _sums_of_steps(steps: StepColumns) -> _Sums:
    """Who ran in them, and what they prefilled."""
    decoding = steps["decode_requests"].astype(np.float64)
    running, waiting = decoding + steps["prefill_requests"], np.maximum(steps["waiting"], 0)
    prefill = np.maximum(steps["prefill_tokens"], 0).astype(np.float64)
    sane = (decoding >= 0) & (running + waiting <= _TOKENS_MAX) & (prefill <= _TOKENS_MAX)
    columns = np.array((prefill, decoding, running * decoding, waiting * decoding))
    prefill_tokens, decoded, ran, waited = columns[:, sane].sum(axis=1).tolist()
    return _Sums(prefill_tokens=prefill_tokens, decoding=decoded, ran=ran, waited=waited)


def _sums_between(start: Counted, end: Counted) -> _Sums:
    """What a server counted between two of its pages; what its page does not count is left out."""

    def increase(meaning: Meaning) -> float:
        return end[meaning] - start[meaning]

    def sane(*values: float) -> bool:
        return all(0.0 <= value <= _TOKENS_MAX for value in values)  # false for NaN too

    asked = tuple(map(increase, _FINISHED))
    requests, prompt, output = asked if sane(*asked) else map(increase, _BEGUN)
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
    """What one process said, by the minute of its events, and when it was last seen by our clock."""

    last_seen_unix_ns: int
    minutes: dict[int, _Sums] = field(default_factory=dict)
    in_flight: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=REQUESTS_MAX))
    """When each of the newest requests was queued, was first scheduled and finished, in seconds."""

    def add(self, minute: int, sums: _Sums) -> None:
        """Add to the minute of an event; what is older than all that are kept goes with the oldest."""
        minute = max(minute, max(self.minutes, default=0) - MINUTES + 1)
        if minute not in self.minutes:
            self.minutes = {each: kept for each, kept in self.minutes.items() if each > minute - MINUTES}
        self.minutes[minute] = _Sums(*map(add, self.minutes.get(minute, _NOTHING), sums))

    def add_core(self, span: CoreSpan) -> None:
        """A request by its marks, if it was queued, had a first token and finished."""
        at_ns: dict[SpanEventKind, int] = {}
        for mark in span.marks:
            at_ns.setdefault(mark.kind, mark.ts_ns)
        kinds = (SpanEventKind.QUEUED, SpanEventKind.FIRST_TOKEN, SpanEventKind.FINISHED)
        if all(kind in at_ns for kind in kinds):
            queued_ns, first_ns, finished_ns = (at_ns[kind] for kind in kinds)
            queue_s = (at_ns.get(SpanEventKind.SCHEDULED, queued_ns) - queued_ns) / 1e9
            times_s = queue_s, (first_ns - queued_ns) / 1e9, (finished_ns - first_ns) / 1e9
            self._add_asked(span.end_unix_ns, (span.prompt_tokens, span.marks[-1].output_tokens, 0), times_s)

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
        if not (0 < prompt <= _TOKENS_MAX and 0 < output <= _TOKENS_MAX):  # numbers that cannot be are left out
            return
        if not (0.0 <= queue_s <= waited_s <= _SECONDS_MAX and 0.0 <= decoding_s <= _SECONDS_MAX):  # false for NaN too
            return
        self.add(end_unix_ns // MINUTE_NS, _Sums(1, prompt, output, cached, 1, waited_s, decoding_s, output - 1))
        end_s = end_unix_ns / 1e9
        queued_s = end_s - waited_s - decoding_s
        self.in_flight.append((queued_s, queued_s + queue_s, end_s))

    def loads(self) -> dict[int, _Sums]:
        """The minutes; where neither steps nor pages said whom a request met, with what the requests say of it."""
        if not self.in_flight or any(sums.decoding for sums in self.minutes.values()):
            return self.minutes
        ends_s = np.sort(np.array(self.in_flight), axis=0)
        moments_s = np.sort(ends_s, axis=None)
        queued, scheduled, finished = (np.searchsorted(column, moments_s[:-1], side="right") for column in ends_s.T)
        running, waiting = scheduled - finished, queued - scheduled
        running_s, minute_of = running * np.diff(moments_s), (moments_s[:-1] * 1e9 // MINUTE_NS).astype(np.int64)

        def met_in(minute: int) -> dict[str, float]:
            there_s = np.where(minute_of == minute, running_s, 0.0)
            return {
                "decoding": float(there_s.sum()),
                "ran": float(there_s @ running),
                "waited": float(there_s @ waiting),
            }

        return {minute: sums._replace(**met_in(minute)) for minute, sums in self.minutes.items()}


class RecentLoad:
    """Belongs to the worker thread; what it tells is a new dictionary each time."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._counted: dict[str, Counted] = {}
        """The last page of each server."""
        self._now_unix_ns = 0

    @property
    def processes(self) -> int:
        """How many were asked something lately."""
        return len(self._processes)

    def record(self, telemetry: Telemetry) -> None:
        """Add what one process said."""
        if not (telemetry.core or telemetry.requests or len(telemetry.steps)):
            return
        process = self._process(telemetry.instance)
        for span in telemetry.core:
            process.add_core(span)
        for request in telemetry.requests:
            process.add_request(request)
        minutes = telemetry.steps["unix_ns"] // MINUTE_NS
        for minute in np.unique(minutes).tolist():
            process.add(minute, _sums_of_steps(telemetry.steps[minutes == minute]))

    def record_page(self, page: ScrapedPage) -> None:
        """Add what one server counted since its last page; nothing of one that idles, and is scraped on."""
        for (_, instance), reading in zip(keys_of(page), page.engines, strict=True):
            before, now = self._counted.get(instance), reading.values
            _keep_newest(self._counted, instance, now)
            if before is not None and len(before) == len(now) and any(map(gt, now, before)):
                self._process(instance).add(page.unix_ns // MINUTE_NS, _sums_between(before, now))

    def _process(self, instance: str) -> _Process:
        """One process, which makes room for itself."""
        process = self._processes.get(instance) or _Process(0)
        process.last_seen_unix_ns = self._now_unix_ns
        _keep_newest(self._processes, instance, process)
        return process

    def forget_idle(self, now_unix_nano: int) -> None:
        """Let go of what was asked too long ago; what is added from now on belongs to this time."""
        self._now_unix_ns = now_unix_nano
        for process in self._processes.values():
            process.last_seen_unix_ns = process.last_seen_unix_ns or now_unix_nano  # what came before the first time
        oldest_unix_ns = now_unix_nano - MINUTES * MINUTE_NS
        self._processes = {
            instance: process
            for instance, process in self._processes.items()
            if process.last_seen_unix_ns > oldest_unix_ns
        }

    def mixes(self, configs: Iterable[ConfigSnapshot], now_unix_nano: int) -> dict[str, WorkloadProfile]:
        """The mix of each configuration that was asked lately."""
        self.forget_idle(now_unix_nano)
        known = {}
        for config in configs:
            processes = (self._processes.get(engine.instance) for engine in config.engines)
            loads = [process.loads() for process in processes if process is not None]
            mix = _mix_of(loads, is_prefill_known=config.telemetry in _PREFILL_TOLD)
            if mix is not None:
                known[config.config_id] = mix
        return known


def _keep_newest(known: dict[str, T], name: str, value: T) -> None:
    """Set a value, and let go of the one that was set least lately where there are too many."""
    known.pop(name, None)
    known[name] = value
    if len(known) > PROCESSES_MAX:
        del known[next(iter(known))]


def _mix_of(processes: Sequence[dict[int, _Sums]], *, is_prefill_known: bool) -> WorkloadProfile | None:
    """The mix of the last minutes, and of each of them where its requests met others; by process, its minutes."""
    asked = [minutes for minutes in processes if any(sums.requests for sums in minutes.values())]
    total = _sum_of(sums for minutes in asked for sums in minutes.values())
    if total.requests < REQUESTS_MIN:
        return None
    computed = total.prompt_tokens - total.cached_tokens
    if is_prefill_known and total.prefill_tokens:
        computed = min(total.prefill_tokens, total.prompt_tokens)
    hit = 1.0 - max(computed, 0.0) / total.prompt_tokens
    return _mean(total, hit)._replace(parts=tuple(_mean(part, hit) for part in _parts_of(asked)))


def _parts_of(processes: Sequence[dict[int, _Sums]]) -> list[_Sums]:
    """All that the processes said, by minutes back from the newest of each; one with few requests joins the next."""
    parts, few = [], _NOTHING
    for back in range(MINUTES):
        few = _sum_of([few, *(minutes.get(max(minutes) - back, _NOTHING) for minutes in processes)])
        if few.requests >= REQUESTS_MIN and few.decoding:
            parts.append(few)
            few = _NOTHING
    return [*parts[:-1], _sum_of([*parts[-1:], few])]


def _mean(total: _Sums, prefix_hit: float) -> WorkloadProfile:
    met = total.decoding or 1.0
    running = max(1.0, total.ran / met)
    return WorkloadProfile(
        prompt_tokens=total.prompt_tokens / total.requests,
        output_tokens=total.output_tokens / total.requests,
        prefix_hit=prefix_hit,
        concurrency=max(1.0, (total.ran + total.waited) / met),
        running=running,
        itl_us=1e6 * total.decoding_s / total.decoded_tokens if total.decoded_tokens else None,
        ttft_us=1e6 * max(total.waited_s, 0.0) / total.first_tokens if total.first_tokens else None,
        first_tokens=total.first_tokens,
        decoded_tokens=total.decoded_tokens,
    )
