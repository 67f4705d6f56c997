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
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

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


@dataclass(slots=True)
class _Sums:
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

    def add(self, other: _Sums) -> None:
        """Take in what another bucket or engine holds."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def add_steps(self, steps: StepColumns) -> None:
        """Who ran in them, and what they prefilled."""
        decoding = steps["decode_requests"].astype(np.float64)
        running, waiting = decoding + steps["prefill_requests"], np.maximum(steps["waiting"], 0)
        prefill = np.maximum(steps["prefill_tokens"], 0).astype(np.float64)
        sane = (decoding >= 0) & (running + waiting <= _TOKENS_MAX) & (prefill <= _TOKENS_MAX)
        self.prefill_tokens += float(prefill[sane].sum())
        self.decoding += float(decoding[sane].sum())
        self.ran += float((running * decoding)[sane].sum())
        self.waited += float((waiting * decoding)[sane].sum())

    def add_counted(self, start: Counted, end: Counted) -> None:
        """What a server counted between two of its pages; what its page does not count is left out."""

        def grown(meaning: Meaning) -> float:
            return end[meaning] - start[meaning]

        def sane(*values: float) -> bool:
            return all(0.0 <= value <= _TOKENS_MAX for value in values)  # false for NaN too

        asked = tuple(map(grown, _FINISHED))
        requests, prompt, output = asked if sane(*asked) else map(grown, _BEGUN)
        if not sane(requests, prompt, output):
            return
        self.requests += requests
        self.prompt_tokens += prompt
        self.output_tokens += output
        hits, all_prompts = grown(Meaning.PREFIX_HIT_TOKENS), grown(Meaning.PROMPT_TOKENS)
        self.prefill_tokens += prompt * (
            1.0 - min(hits / all_prompts, 1.0) if sane(hits) and all_prompts > 0.0 else 1.0
        )
        first, first_s = grown(Meaning.FIRST_TOKENS), grown(Meaning.FIRST_TOKEN_SECONDS)
        api_s = grown(Meaning.E2E_SECONDS) - grown(Meaning.QUEUE_SECONDS) - grown(Meaning.INFERENCE_SECONDS)
        if sane(first, first_s):
            self.first_tokens += first
            self.waited_s += first_s - (api_s if sane(api_s) else 0.0)
        decoded, decoding_s = grown(Meaning.ITL_COUNT), grown(Meaning.ITL_SECONDS)
        running, waiting = ((start[gauge] + end[gauge]) / 2.0 for gauge in (Meaning.RUNNING, Meaning.WAITING))
        if sane(decoded, decoding_s, running, waiting):
            self.decoded_tokens += decoded
            self.decoding_s += decoding_s
            self.decoding += decoded
            self.ran += running * decoded
            self.waited += waiting * decoded


@dataclass(slots=True)
class _Process:
    """What one process said, by the minute of its events, and when it was last seen by our clock."""

    last_seen_unix_ns: int
    minutes: dict[int, _Sums] = field(default_factory=dict)
    in_flight: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=REQUESTS_MAX))
    """When each of the newest requests was queued, was first scheduled and finished, in seconds."""

    def at(self, unix_ns: int) -> _Sums:
        """The sums of the minute of an event; what is older than all that are kept goes with the oldest."""
        minute = max(unix_ns // MINUTE_NS, max(self.minutes, default=0) - MINUTES + 1)
        if minute not in self.minutes:
            self.minutes = {each: sums for each, sums in self.minutes.items() if each > minute - MINUTES}
        return self.minutes.setdefault(minute, _Sums())

    def add_core(self, span: CoreSpan) -> None:
        """A request by its marks, if it was queued, had a first token and finished."""
        at_ns: dict[SpanEventKind, int] = {}
        for mark in span.marks:
            at_ns.setdefault(mark.kind, mark.ts_ns)
        kinds = (SpanEventKind.QUEUED, SpanEventKind.FIRST_TOKEN, SpanEventKind.FINISHED)
        if all(kind in at_ns for kind in kinds):
            queued_ns, first_ns, finished_ns = (at_ns[kind] for kind in kinds)
            queue_s = (at_ns.get(SpanEventKind.SCHEDULED, queued_ns) - queued_ns) / 1e9
            waited_s, decoding_s = (first_ns - queued_ns) / 1e9, (finished_ns - first_ns) / 1e9
            tokens = span.prompt_tokens, span.marks[-1].output_tokens, 0
            self._add(span.end_unix_ns, tokens, queue_s, waited_s, decoding_s)

    def add_request(self, span: RequestSpan) -> None:
        """A request that its span tells; its time in the API process is left out where queue and prefill are told."""
        queue_s, waited_s = span.queue_s, span.queue_s + span.prefill_s
        if math.isnan(waited_s):
            queue_s, waited_s = 0.0, span.first_token_s
        tokens = span.prompt_tokens, span.output_tokens, max(span.cached_tokens, 0)
        self._add(span.end_unix_ns, tokens, queue_s, waited_s, span.decode_s)

    def _add(
        self, end_unix_ns: int, tokens: tuple[int, int, int], queue_s: float, waited_s: float, decoding_s: float
    ) -> None:
        """A request of so many tokens of prompt, of output and cached; numbers that cannot be are left out."""
        prompt, output, cached = tokens
        if not (0 < prompt <= _TOKENS_MAX and 0 < output <= _TOKENS_MAX):
            return
        if not (0.0 <= queue_s <= waited_s <= _SECONDS_MAX and 0.0 <= decoding_s <= _SECONDS_MAX):  # false for NaN too
            return
        self.at(end_unix_ns).add(
            _Sums(
                requests=1,
                first_tokens=1,
                prompt_tokens=prompt,
                output_tokens=output,
                cached_tokens=cached,
                waited_s=waited_s,
                decoding_s=decoding_s,
                decoded_tokens=output - 1,
            )
        )
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
        running = scheduled - finished
        running_s, minute_of = running * np.diff(moments_s), (moments_s[:-1] * 1e9 // MINUTE_NS).astype(np.int64)
        minutes, of = np.unique(minute_of, return_inverse=True)
        met = (
            np.bincount(of, running_s * each).tolist() for each in (np.ones_like(running), running, queued - scheduled)
        )
        by_minute = dict(zip(minutes.tolist(), zip(*met, strict=True), strict=True))

        def of_requests(minute: int, sums: _Sums) -> _Sums:
            decoding, ran, waited = by_minute.get(minute, (0.0, 0.0, 0.0))
            return replace(sums, decoding=decoding, ran=ran, waited=waited)

        return {minute: of_requests(minute, sums) for minute, sums in self.minutes.items()}


class RecentLoad:
    """Belongs to the worker thread; what it tells is a new dictionary each time."""

    def __init__(self) -> None:
        self._processes: OrderedDict[str, _Process] = OrderedDict()
        self._counted: OrderedDict[str, Counted] = OrderedDict()
        self._now_unix_ns = 0

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
            process.at(minute * MINUTE_NS).add_steps(telemetry.steps[minutes == minute])

    def record_page(self, page: ScrapedPage) -> None:
        """Add what one server counted since its last page."""
        for (_, instance), reading in zip(keys_of(page), page.engines, strict=True):
            before = self._counted.pop(instance, None)
            self._counted[instance] = reading.values
            if len(self._counted) > PROCESSES_MAX:
                self._counted.popitem(last=False)
            if before is not None and len(before) == len(reading.values) and _has_grown(before, reading.values):
                self._process(instance).at(page.unix_ns).add_counted(before, reading.values)

    def _process(self, instance: str) -> _Process:
        """One process, which makes room for itself."""
        process = self._processes.setdefault(instance, _Process(self._now_unix_ns))
        process.last_seen_unix_ns = self._now_unix_ns
        self._processes.move_to_end(instance)
        if len(self._processes) > PROCESSES_MAX:
            self._processes.popitem(last=False)
        return process

    @property
    def processes(self) -> int:
        """How many were asked something lately."""
        return len(self._processes)

    def forget_idle(self, now_unix_nano: int) -> None:
        """Let go of what was asked too long ago; what is added from now on belongs to this time."""
        self._now_unix_ns = now_unix_nano
        for instance, process in list(self._processes.items()):
            process.last_seen_unix_ns = process.last_seen_unix_ns or now_unix_nano  # what came before the first time
            if now_unix_nano - process.last_seen_unix_ns >= MINUTES * MINUTE_NS:
                del self._processes[instance]

    def mixes(self, configs: Iterable[ConfigSnapshot], now_unix_nano: int) -> dict[str, WorkloadProfile]:
        """The mix of each configuration that was asked lately."""
        self.forget_idle(now_unix_nano)
        known = {}
        for config in configs:
            processes = (self._processes.get(engine.instance) for engine in config.engines)
            heard = [process for process in processes if process is not None]
            mix = _mix_of(heard, is_prefill_known=config.telemetry in _PREFILL_TOLD)
            if mix is not None:
                known[config.config_id] = mix
        return known


def _has_grown(start: Counted, end: Counted) -> bool:
    """Whether a server has counted anything meanwhile: one that idles is scraped on, and is asked nothing."""
    return any(now > before for before, now in zip(start, end, strict=True))


def _sum_of(many: Iterable[_Sums]) -> _Sums:
    total = _Sums()
    for each in many:
        total.add(each)
    return total


def _mix_of(processes: Sequence[_Process], *, is_prefill_known: bool) -> WorkloadProfile | None:
    """The mix of the last minutes, and of each of them where its requests met others."""
    asked = [loads for loads in (process.loads() for process in processes) if any(s.requests for s in loads.values())]
    total = _sum_of(sums for loads in asked for sums in loads.values())
    if total.requests < REQUESTS_MIN:
        return None
    computed = total.prompt_tokens - total.cached_tokens
    if is_prefill_known and total.prefill_tokens:
        computed = min(total.prefill_tokens, total.prompt_tokens)
    hit = 1.0 - max(computed, 0.0) / total.prompt_tokens
    return _mean(total, hit)._replace(parts=tuple(_mean(part, hit) for part in _parts_of(asked)))


def _parts_of(processes: Sequence[dict[int, _Sums]]) -> list[_Sums]:
    """All that the processes said, by minutes back from the newest of each; one with few requests joins the next."""
    parts = [_Sums()]
    for back in range(MINUTES):
        if parts[-1].requests >= REQUESTS_MIN and parts[-1].decoding:
            parts.append(_Sums())
        for minutes in processes:
            parts[-1].add(minutes.get(max(minutes) - back, _Sums()))
    if len(parts) > 1 and not (parts[-1].requests >= REQUESTS_MIN and parts[-1].decoding):
        few = parts.pop()
        parts[-1].add(few)
    return parts


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
