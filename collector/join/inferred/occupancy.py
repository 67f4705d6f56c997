"""Rows from request spans alone: what an un-forked vLLM says about its steps.

A request with N output tokens took part in N - 1 decode steps between its first and its last token. At any time, the
requests between their first and last token are the decode batch; each is assumed to make its tokens evenly:

    n(t) = #{j : F_j < t <= E_j}            C(t) = Σ_j prompt_j + ½ + r_j (t - F_j)      r_j = (N_j - 1) / (E_j - F_j)
    row i: ℓ = N_i - 1, y = E_i - F_i, features of step k at the middle of its k-th token, prompts of requests whose
    first token falls into it as its prefill; weight 1 / mean n, since the windows of n requests tell the same story

Aborted requests send no span: their share of the batch is missing. A row is final when every request that overlaps it
has been heard of: twice the longest request seen and ``allowed_lateness_s`` later, at most ``join_timeout_s``; or at
the end of the stream, when no known request is long enough to still run. Whether it is, is asked with every span, so
that it does not matter how many come together. Of spans that are sampled no row is made: of the batch, a part is
missing.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from collector.config import Config
from collector.decode import MISSING, RequestSpan
from collector.identity import FactSource
from collector.join.api_queueing import TOKEN_BUDGET, BusyArrival
from collector.join.emitter import Emitter, Liveness, TargetRows, Waiting
from collector.join.rows import raw_features
from collector.telemetry import RowDrop
from online import Floats, Ints, Mask, Quality, RowBlock, Target
from online.transfer import HIDES_HITS

from .sampling import UNCOUNTED, WHOLE, TraceSampling

Array = TypeVar("Array", Floats, Ints)


class FinishedRequest(NamedTuple):
    """A finished request that others may overlap, as a line of ``FINISHED_DTYPE``.

    ``first_s`` and ``last_s``, its first and last token, are seconds since the sequence's epoch; ``first_token_s``,
    ``queue_s`` and ``prefill_s`` are how long it took, NaN where its span does not tell.
    """

    arrived_ns: int
    ended_ns: int
    first_s: float
    last_s: float
    prompt_tokens: float
    output_tokens: int
    cached_tokens: int
    first_token_s: float
    queue_s: float
    prefill_s: float


FINISHED_DTYPE = np.dtype([*get_type_hints(FinishedRequest).items()])
Requests = NDArray[np.void]
"""Of ``FINISHED_DTYPE``."""


def _cumulative(at: Array, values: Floats) -> tuple[Array, Floats]:
    """Times in order, and the sums of the values (..., n) before each place among them: (..., n + 1)."""
    order = np.argsort(at, kind="stable")
    none = np.zeros((*values.shape[:-1], 1))
    return at[order], np.concatenate((none, np.cumsum(values[..., order], axis=-1)), axis=-1)


def computed_tokens(requests: Requests, hit_ratio: float | None) -> Floats:
    """Tokens of prompts that were not cached: spans tell them, or the share that their server's page counted."""
    prompt, cached = requests["prompt_tokens"], requests["cached_tokens"]
    return np.asarray(prompt - np.where(cached == MISSING, prompt * (hit_ratio or 0.0), cached))


class DecodeBatch:
    """n(t), C(t) and cumulative prefill as sums over requests sorted by first and by last token."""

    def __init__(self, requests: Requests, hit_ratio: float | None) -> None:
        first, last, tokens = requests["first_s"], requests["last_s"], requests["output_tokens"]
        rate = (tokens - 1) / np.maximum(last - first, 1e-9)
        decoding = tokens > 1
        # of each request: one, and its context as a line in time
        lines = np.stack((np.ones(len(first)), requests["prompt_tokens"] + 0.5 - rate * first, rate))[:, decoding]
        self._prefill_at, self._prefill_tokens = _cumulative(first, computed_tokens(requests, hit_ratio))
        self._first, self._entered = _cumulative(first[decoding], lines)
        self._last, self._left = _cumulative(last[decoding], lines)

    def decoding(self, at_s: Floats) -> tuple[Floats, Floats]:
        """(requests, context tokens) of the decode batch at these times."""
        entered = self._entered[:, np.searchsorted(self._first, at_s, side="left")]
        left = self._left[:, np.searchsorted(self._last, at_s, side="left")]
        count, constant, rate = entered - left
        return count, constant + at_s * rate

    def prefill(self, edges_s: Floats) -> tuple[Floats, Floats]:
        """(requests, tokens) whose first token falls between consecutive edges."""
        index = np.searchsorted(self._prefill_at, edges_s, side="right")
        return np.diff(index).astype(float), np.diff(self._prefill_tokens[index])


_OUTPUT_TOKENS_MAX = 131_072
"""A request of more output tokens gives no row: it would have a line of features for each."""
_LINES_MAX = 32_768
"""Steps evaluated at once: bounds memory, a request can have thousands of tokens."""
_BATCH_NS = 5 * 10**9
"""Requests become final in batches of this much event time: each batch sorts all that are held."""
_LONGEST_RATIO = 2.0
"""A request may take this many times as long as the longest one before it without being late."""


class ApiProcess(Emitter):
    """An API process that sends request spans of its own (un-forked vLLM): an emitter beside engines.

    It sends no steps: rows come from the occupancy that its request spans rebuild.
    """

    quality = Quality.REQUESTS

    def __init__(self, instance: str, recording: str, number: int, settings: Config) -> None:
        super().__init__(instance, recording, number, settings)
        self._epoch_unix_ns = 0
        self._held: list[FinishedRequest] = []
        self._pending: list[tuple[int, bytes, FinishedRequest]] = []
        self._emitted_until_unix_ns = 0
        self.longest_ns = 0
        self._rows: list[TargetRows] = []
        self.sampling = TraceSampling()
        self.requests_seen = 0
        self.counted_share: float | None = None
        """Of the requests that its server's page counted, those that sent a span; None while that is not known."""
        self.is_counted = False
        """Whether there is such a page: what it counts decides, for not every sampler shows in the trace ids."""
        self.hit_ratio: float | None = None
        """Share of prompt tokens that the page says were cached."""

    @property
    def span_share(self) -> float | None:
        """Share of its requests that send a span, by its page or by their trace ids; None while unknown."""
        return self.counted_share if self.is_counted else self.sampling.share

    @property
    def missing_reason(self) -> str:
        """Why a part of its requests may be missing; empty where a page counts them, or the operator knows of all."""
        return "" if self.is_counted or self.facts.get("trace_sampling") == 1 else UNCOUNTED

    @property
    def is_whole(self) -> bool:
        """Whether enough of its requests send a span to rebuild the batch."""
        return self.span_share is not None and self.span_share >= WHOLE

    def beside_engines(self, rows: list[TargetRows], configs: int) -> list[TargetRows]:
        """What engines that send their steps leave to learn from requests; of several configurations, nothing."""
        usable: list[TargetRows] = []
        for target, block in rows:
            if configs > 1:
                self.count(RowDrop.AMBIGUOUS, len(block))
            elif target is Target.STEP_TIME:
                self.count(RowDrop.KNOWN_FROM_STEPS, len(block))
            else:
                usable.append((target, block))
        return usable

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return self._emitted_until_unix_ns or self._epoch_unix_ns

    @property
    def waiting(self) -> Waiting:
        """Requests held, those not yet emitted and those that overlap them; when the first of them ended."""
        return Waiting(0, len(self._held), min((held.ended_ns for held in self._held), default=math.inf))

    def add(self, span: RequestSpan) -> None:
        """Add one finished request."""
        self.sampling.add(span)
        self.requests_seen += 1
        if span.output_tokens < 1:
            self.count(RowDrop.INCOMPLETE)
            return
        if span.output_tokens > _OUTPUT_TOKENS_MAX:
            self.count(RowDrop.TOO_LONG)
            return
        end_unix_ns = span.arrival_unix_ns + int((span.first_token_s + span.decode_s) * 1e9)
        self._epoch_unix_ns = self._epoch_unix_ns or span.arrival_unix_ns
        first_s = (span.arrival_unix_ns - self._epoch_unix_ns) / 1e9 + span.first_token_s
        self.newest_unix_ns = max(self.newest_unix_ns, span.end_unix_ns)
        self.longest_ns = max(self.longest_ns, end_unix_ns - span.arrival_unix_ns)
        request = FinishedRequest(
            *(span.arrival_unix_ns, end_unix_ns, first_s, first_s + span.decode_s),
            *(float(span.prompt_tokens), span.output_tokens, span.cached_tokens),
            *(span.first_token_s, span.queue_s, span.prefill_s),
        )
        self._held.append(request)
        heapq.heappush(self._pending, (end_unix_ns, span.span_id, request))
        if len(self._pending) > self._settings.requests_max:
            heapq.heappop(self._pending)
            self.count(RowDrop.INCOMPLETE)
        if len(self._held) > 2 * self._settings.requests_max:
            self._held.sort(key=attrgetter("ended_ns"))
            del self._held[: -self._settings.requests_max]
        # until then every request that can overlap has been heard of
        longest_ns = int(_LONGEST_RATIO * self.longest_ns) + self._lateness_ns
        horizon_unix_ns = self.newest_unix_ns - min(self._timeout_ns, longest_ns)
        if self._pending[0][0] <= horizon_unix_ns - _BATCH_NS:
            self._pass_until(horizon_unix_ns)

    def advance(self) -> list[TargetRows]:
        """Rows of requests that are final, by their end; of an idle process, if none still running overlaps, too."""
        if self.liveness is Liveness.IDLE and self._held:
            longest_s = max(held.last_s - held.first_s for held in self._held)
            self._pass_until(max(held.ended_ns for held in self._held) - int(longest_s * 1e9))
        if self.liveness is Liveness.OVER:
            self._pass_until(None)
        rows, self._rows = self._rows, []
        return rows

    def _pass_until(self, horizon_unix_ns: int | None) -> None:
        """Make rows of the requests that ended by then (None: of all, nothing more will come).

        They wait until it is known whether spans are sampled, because rows cannot be unlearned.
        """
        share = self.span_share
        if horizon_unix_ns is not None and share is None:
            return
        ready = []
        while self._pending and (horizon_unix_ns is None or self._pending[0][0] <= horizon_unix_ns):
            ready.append(heapq.heappop(self._pending)[2])
        if not ready:
            return
        if share is not None and share < WHOLE:
            self.count(RowDrop.SAMPLED_SPANS, len(ready))
        else:
            self._make_rows(np.array(ready, FINISHED_DTYPE), is_end=horizon_unix_ns is None)
        self._emitted_until_unix_ns = ready[-1].ended_ns
        kept_s = min((one.first_s - one.first_token_s for _, _, one in self._pending), default=ready[-1].last_s)
        self._held = [one for one in self._held if one.last_s >= kept_s]

    def _make_rows(self, requests: Requests, *, is_end: bool) -> None:
        """Rows of requests, and of the steps of those whose batch is known: at the end of the stream, not of all."""
        held = np.array(self._held, FINISHED_DTYPE)
        hidden = self.hit_ratio is None and bool((held["cached_tokens"] == MISSING).any())
        if hidden or self.facts.get(HIDES_HITS) is None:
            self.facts.learn({HIDES_HITS: hidden}, FactSource.DISCOVERY)
        batch = DecodeBatch(held, self.hit_ratio)
        decoding = requests[requests["output_tokens"] > 1]
        if is_end:
            # those that no request still running can overlap
            longest_s = (held["last_s"] - held["first_s"]).max()
            known = decoding["last_s"] <= held["last_s"].max() - longest_s
            self.count(RowDrop.INCOMPLETE, int(np.count_nonzero(~known)))
            decoding = decoding[known]
        group = np.cumsum(decoding["output_tokens"] - 1) // _LINES_MAX
        parts = np.split(decoding, np.flatnonzero(np.diff(group)) + 1)
        self._rows += [(Target.STEP_TIME, self._block(part, batch)) for part in parts if len(part)]
        self._rows += self._request_rows(requests, held, batch)

    def _block(self, requests: Requests, batch: DecodeBatch) -> RowBlock:
        first, steps = requests["first_s"], requests["output_tokens"] - 1
        offsets = np.concatenate(([0], np.cumsum(steps)))
        pace_s = (requests["last_s"] - first) / steps
        position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], steps)
        begin_s = np.repeat(first, steps) + position * np.repeat(pace_s, steps)
        end_s = begin_s + np.repeat(pace_s, steps)
        decoding, context = batch.decoding((begin_s + end_s) / 2)
        prefilling, prompt = batch.prefill(np.stack((begin_s, end_s), axis=1).ravel())
        running = decoding + prefilling[::2]
        raw = raw_features(
            {
                "prefill_tokens": prompt[::2],
                "prefill_requests": prefilling[::2],
                "decode_requests": decoding,
                "decode_tokens": decoding,
                "decode_context_tokens": context,
                "requests": running,
                "running": running,
            }
        )
        elapsed_us, end_ns = pace_s * steps * 1e6, requests["ended_ns"]
        block = RowBlock.of_lines(raw, elapsed_us, end_ns=end_ns, engine=self.number, quality=Quality.REQUESTS)
        weight = steps / np.maximum(np.add.reduceat(decoding, offsets[:-1]), steps)
        return replace(block, offsets=offsets.astype(np.int64), weight=weight)

    def _request_rows(self, requests: Requests, held: Requests, batch: DecodeBatch) -> list[TargetRows]:
        """queue_wait of all; api_queueing of those that arrived while no other request was there."""
        idle, running, queue = _met(requests, held)
        self.api_queueing.add_arrivals(self._busy_arrivals(requests, running, batch))
        queue_s = requests["queue_s"]
        own_s = requests["first_token_s"] - queue_s - requests["prefill_s"]
        raw = np.column_stack((requests["prompt_tokens"], requests["output_tokens"], queue))
        out = []
        for target, wait_s, meant in ((Target.API_QUEUEING, own_s, idle), (Target.QUEUE_WAIT, queue_s, True)):
            rows = np.flatnonzero(~np.isnan(wait_s) & meant)
            if len(rows):
                wait_us, end_ns, number = wait_s[rows] * 1e6, requests["ended_ns"][rows], self.number
                block = RowBlock.of_lines(raw[rows], wait_us, end_ns=end_ns, engine=number, quality=Quality.REQUESTS)
                out.append((target, block))
        return out

    def _busy_arrivals(self, requests: Requests, met: Ints, batch: DecodeBatch) -> list[BusyArrival]:
        """Those of some requests that met so many others, none of whom waited for a first token."""
        _, contexts = batch.decoding(requests["first_s"] - requests["first_token_s"])
        prompts = computed_tokens(requests, self.hit_ratio)
        told_s = requests["queue_s"] + requests["prefill_s"]
        known = ~np.isnan(told_s)
        pace_s = (requests["last_s"] - requests["first_s"]) / np.maximum(requests["output_tokens"] - 1, 1)
        in_one_step = prompts + met < (self.facts.number("max_num_batched_tokens") or TOKEN_BUDGET)
        columns = (
            1e6 * (requests["first_token_s"] - np.where(known, told_s, 0.0)),
            pace_s * 1e6,
            prompts,
            met + 1.0,
            1e6 * np.where(known & in_one_step, np.maximum(requests["prefill_s"], 0.0), 0.0),
            np.ones(len(requests)),
            known,
            np.maximum(contexts, 0.0),
        )
        told = (met > 0) & (known | (pace_s > 0.0))
        return [BusyArrival(*each) for each in zip(*(column[told].tolist() for column in columns), strict=True)]


def _met(requests: Requests, held: Requests) -> tuple[Mask, Ints, Floats]:
    """State of the server that each of n requests met, by all requests that are ``held``.

    Returns whether no other was in the engine or on its way when it arrived; how many others ran then, 0 where anyone
    waited for a first token until it was scheduled, shapes (n,); and (waiting, running, kv_usage_ratio, queued_tokens)
    at QUEUED, (n, 4), NaN where its span does not tell it.
    """
    arrived_ns, ended_ns, first_ns, queued_ns, scheduled_ns, tokens = _moments(held)
    known = queued_ns != MISSING
    queued, queued_tokens = _cumulative(queued_ns[known], tokens[known])
    scheduled, scheduled_tokens = _cumulative(scheduled_ns[known], tokens[known])
    arrived, ended, first = np.sort(arrived_ns), np.sort(ended_ns), np.sort(first_ns)
    at_ns, _, _, queued_at_ns, taken_ns, _ = _moments(requests)
    before, gone = arrived.searchsorted(at_ns, "left"), ended.searchsorted(at_ns, "right")
    taken_ns = np.where(queued_at_ns == MISSING, at_ns, taken_ns)
    alone = arrived.searchsorted(taken_ns, "right") - 1 == first.searchsorted(at_ns, "right")
    running = np.where(alone, np.maximum(before - gone, 0), 0)
    waiting, begun = queued.searchsorted(queued_at_ns, "left"), scheduled.searchsorted(queued_at_ns, "right")
    left_tokens, unknown = queued_tokens[waiting] - scheduled_tokens[begun], np.full(len(requests), np.nan)
    ran = begun - ended.searchsorted(queued_at_ns, "right")
    queue = np.column_stack((waiting - begun, ran, unknown, left_tokens))
    return before == gone, running, np.where((queued_at_ns == MISSING)[:, None], np.nan, np.maximum(queue, 0.0))


def _moments(requests: Requests) -> tuple[Ints, Ints, Ints, Ints, Ints, Floats]:
    """When each arrived, ended, gave its first token, was queued and scheduled; its prompt tokens.

    SCHEDULED = first token - prefill, QUEUED = that - queue, MISSING where the span does not tell it.
    """
    arrived_ns, first_s, queue_s = requests["arrived_ns"], requests["first_token_s"], requests["queue_s"]
    waited_s = first_s - requests["prefill_s"] - queue_s
    known = ~np.isnan(waited_s)
    queued_ns = arrived_ns + (np.where(known, waited_s, 0.0) * 1e9).astype(np.int64)
    scheduled_ns = queued_ns + (np.where(known, queue_s, 0.0) * 1e9).astype(np.int64)
    first_ns = arrived_ns + (first_s * 1e9).astype(np.int64)
    queued_ns = np.where(known, queued_ns, MISSING)
    return arrived_ns, requests["ended_ns"], first_ns, queued_ns, scheduled_ns, requests["prompt_tokens"]
