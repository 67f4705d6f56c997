"""From scrapes to rows: the state at each scrape, which two scrapes make a window, and the window's row.

What the counters of one scrape say of the moment: who decodes, who is still in prefill, how much context is held.

    F: requests that got a first token    E: that ended    run: gauge    G, P: tokens generated, prompt tokens

    left_k    = max(left_{k-1}, F - E - run, 0)        requests that were aborted: they never reach E
    decoding  = F - E - left
    prefill   = run - decoding                         in the engine, their prompt not yet computed
    context   = P + G - P_ended - G_ended - ghost      exact to within a step

A request that was aborted leaves its tokens in the sum (``ghost``). How many is known whenever the engine is idle, for
then the context is 0; between an abort and the next idle moment the gauge of the KV cache stands in:

    context   = usage blocks block_size - run block_size / 2

On a real recording the gauge is 1.05 times the exact context (90 %: 0.98-1.16; shared blocks are counted once).
SGLang's page tells what all its requests hold, on all ranks, each of which counts its steps: a request that decodes
holds its share of them.

Two scrapes make a window. By differences of the counters it has n steps, D = sum of decoding requests over the steps,
S = sum of the step times they sat through, P prefill tokens computed, F first tokens; d and C: decoding requests and
context at the ends, their means marked by a bar, their differences by a delta; D_ = D / n, m = max(D_, 1/2).

    latency row   S / D_ = b0 n + b1 P max(D_ - 1/2, 0) / m + b2 n (C_ + dd dC / (12 m)) + b3 (D + F + n dd^2 / (12 m))

S holds exactly the counted steps on the engine's clock: no idle time and no steps cut by the ends of the window. Every
step counts D times in it, so the sums on the right are weighted by D too: 1/12 is the variance of what changes evenly
over a window, and a prompt is computed just before its request joins the decoders (the 1/2), if scrapes are close.

Where nobody decodes, there is no row. A row of n steps carries n lines: k of them share its prefill, the rest has none,
so that columns that are not sums (has_prefill, hinges) are near what they were.

Windows end at scrapes between prompts and hold enough steps. A prompt is credited whole at its last chunk, so a window
that ends within a prefill has computed what the next one is credited with. Such a scrape ends no window; after six in a
row one is cut anyway. A window with too few steps goes on too. Scrapes far apart are all taken: there a longer window
costs more than a prompt in the wrong one. Nothing is learned across a restart, or of a window in which a request was
preempted: it computes its tokens again.

After a counter fell, nothing is learned from the next eight scrapes: a server that restarts is warm by then, and of
several servers that answer at one address in turn it falls again before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from collector.decode.pages import EngineReading, Flavour, Meaning
from collector.join.api_queueing import BusyArrival
from collector.join.rows import raw_features
from collector.telemetry import RowDrop
from online import Quality, RowBlock, Target


class Scrape(NamedTuple):
    """One scrape with what follows from it.

    ``is_between_prompts``: whether no prompt was half computed, so that what is credited later was computed later.
    """

    unix_ns: int
    mono_ns: int
    reading: EngineReading
    decoding: float
    is_between_prompts: bool
    context_tokens: float

    def value(self, meaning: Meaning) -> float:
        """One number; NaN if the page has none."""
        return self.reading.values[meaning]

    def since(self, start: Scrape) -> tuple[float, ...]:
        """Difference of each number to an earlier scrape."""
        return tuple(map(operator.sub, self.reading.values, start.reading.values))


@dataclass(slots=True)
class Occupancy:
    """State from scrape to scrape: the requests and tokens that aborted requests left in the counters."""

    left: float = 0.0
    ghost_left: float = 0.0
    ghost_tokens: float = 0.0

    def scrape(self, unix_ns: int, mono_ns: int, reading: EngineReading) -> Scrape:
        """Read one scrape, in order of time."""
        values = reading.values
        running = values[Meaning.RUNNING]
        held = values[Meaning.FIRST_TOKENS] - values[Meaning.FINISHED]
        self.left = max(self.left, held - running, 0.0)
        decoding = max(held - self.left, 0.0)
        if reading.flavour is Flavour.SGLANG:  # prompts are counted when their request ends, aborted ones not at all
            context = values[Meaning.KV_USED_TOKENS]
        else:
            tokens = values[Meaning.PROMPT_TOKENS] + values[Meaning.GENERATED_TOKENS]
            tokens -= values[Meaning.FINISHED_PROMPT_TOKENS] + values[Meaning.FINISHED_GENERATED_TOKENS]
            if running == 0.0 and not math.isnan(tokens):
                self.ghost_left, self.ghost_tokens = self.left, tokens
            exact = self.left == self.ghost_left and not math.isnan(tokens)
            context = max(tokens - self.ghost_tokens, 0.0) if exact else _from_gauge(reading)
        return Scrape(unix_ns, mono_ns, reading, decoding, running <= decoding, context)


def _from_gauge(reading: EngineReading) -> float:
    blocks, block_size = (reading.facts.get(name, 0) for name in ("num_gpu_blocks", "block_size"))
    if not blocks or not block_size:
        return math.nan
    usage, running = reading.values[Meaning.KV_USAGE_RATIO], reading.values[Meaning.RUNNING]
    return max(usage * blocks * block_size - running * block_size / 2.0, 0.0)


STEPS_MIN = 3
DECODED_MIN = 3
STEPS_MAX = 8192
"""A window of more steps has lasted for minutes."""
CLOSE_SCRAPES_NS = 2_500_000_000
"""Scrapes further apart do not show when within the window a prompt came."""


class WindowSums(NamedTuple):
    """Differences of two scrapes, ``change`` by meaning.

    ``is_close``: whether the scrapes tell where in the window a prompt came.
    """

    start: Scrape
    end: Scrape
    change: tuple[float, ...]
    steps: float
    decode_steps: float
    decoded: float
    is_close: bool


def is_counter_reset(change: tuple[float, ...]) -> bool:
    """Whether a counter fell: the server was started again."""
    return any(change[meaning] < 0.0 for meaning in _COUNTERS)


_COUNTERS = (
    Meaning.STEPS,
    Meaning.STEP_TOKENS,
    Meaning.GENERATED_TOKENS,
    Meaning.PROMPT_TOKENS,
    Meaning.FIRST_TOKENS,
    Meaning.FINISHED,
    Meaning.ITL_COUNT,
    Meaning.ITL_SECONDS,
    Meaning.PREEMPTIONS,
)


def window_sums(start: Scrape, end: Scrape, scrapes: int, front_ends: int) -> WindowSums:
    """What happened between two scrapes; ``front_ends``: front ends that each count a step in which they had a request.

    Of several, some have none in a small batch, so that their sum says no more than that there were no more steps.
    """
    change = end.since(start)
    decoded, steps, decode_steps = change[Meaning.ITL_COUNT], change[Meaning.STEPS], change[Meaning.DECODE_STEPS]
    if front_ends > 1:
        decoding = (start.decoding + end.decoding) / 2.0
        steps = min(decoded / decoding, steps) if decoding >= 1.0 else 0.0
    decode_steps = steps if math.isnan(decode_steps) else decode_steps
    is_close = end.mono_ns - start.mono_ns <= CLOSE_SCRAPES_NS * max(scrapes, 1)
    return WindowSums(start, end, change, steps, decode_steps, decoded, is_close)


def _prefill_tokens(window: WindowSums) -> float:
    """Prompt tokens computed. Which of three things the steps' counter has beside generated tokens, its sum tells.

    Up to some release prompts whole, then without their prefix hits; then what each step computed, which is a token
    less for each request: its first token is put out by a step and put into none.
    """
    change, total = window.change, window.end.reading.values
    if not math.isnan(change[Meaning.PREFILL_TOKENS]):
        return change[Meaning.PREFILL_TOKENS]
    told = change[Meaning.PREFIX_HIT_TOKENS], total[Meaning.PREFIX_HIT_TOKENS]
    hits, hits_total = (0.0 if math.isnan(each) else each for each in told)
    credited, in_all = (told[Meaning.STEP_TOKENS] - told[Meaning.GENERATED_TOKENS] for told in (change, total))
    computed = total[Meaning.PROMPT_TOKENS] - hits_total
    ways = (
        (computed, credited),
        (computed + hits_total, credited - hits),
        (computed - total[Meaning.FIRST_TOKENS], credited + change[Meaning.FIRST_TOKENS]),
    )
    return max(min(ways, key=lambda way: abs(way[0] - in_all))[1], 0.0)


def row_of(
    window: WindowSums, elapsed_us: float, engine: int, *, prefill_share: float = 1.0, spread: float = 0.0
) -> RowBlock:
    """One row: the window's sums over its steps, and a time in which they happened.

    ``prefill_share``: of its prefill; ``spread``: how much of what requests and context grew is added to their sums.
    """
    start, end, change, steps = window.start, window.end, window.change, max(round(window.steps), 1)
    prompts, prefill_tokens = change[Meaning.FIRST_TOKENS], prefill_share * _prefill_tokens(window)
    prefill_steps = min(steps, max(1, round(prompts))) if prefill_tokens > 0.0 or prompts > 0.0 else 0
    decoded = window.decoded + spread * (end.decoding - start.decoding)
    context = start.context_tokens + end.context_tokens
    if end.reading.flavour is Flavour.SGLANG:
        context *= window.decoded / max(start.value(Meaning.RUNNING) + end.value(Meaning.RUNNING), 1.0)
    else:
        context *= window.decode_steps / 2.0
    context += spread * (end.context_tokens - start.context_tokens)
    means = {
        "decode_requests": decoded / steps,
        "decode_tokens": decoded / steps,
        "decode_context_tokens": max(context, 0.0) / steps,
        "running": end.value(Meaning.RUNNING),
        "waiting": end.value(Meaning.WAITING),
        "kv_usage_ratio": end.value(Meaning.KV_USAGE_RATIO),
        "estimated_tflop": change[Meaning.FLOPS] / 1e12 / steps,
        "estimated_gb": change[Meaning.MEMORY_BYTES] / 1e9 / steps,
    }
    columns = {name: np.full(steps, mean) for name, mean in means.items()}
    for name, total in (("prefill_tokens", prefill_tokens), ("prefill_requests", prompts)):
        columns[name] = np.where(np.arange(steps) < prefill_steps, total / max(prefill_steps, 1), 0.0)
    columns["requests"] = columns["decode_requests"] + columns["prefill_requests"]
    lasted_us, end_ns = np.array([elapsed_us * steps / window.steps]), np.array([end.unix_ns], np.int64)
    row = RowBlock.of_lines(raw_features(columns), lasted_us, end_ns=end_ns, engine=engine, quality=Quality.METRICS)
    return replace(row, offsets=np.array([0, steps]))


def ended(start: Scrape, end: Scrape, budget_tokens: float) -> list[BusyArrival]:
    """The requests that ended between two neighbouring scrapes, as one of their means; nothing across a restart.

    Where one waited for a slot, or its prompt for more steps than one, their prefill is not told.
    """
    change = end.since(start)
    requests = change[Meaning.E2E_COUNT]
    if is_counter_reset(change) or not requests >= 1.0:
        return []
    e2e_s, queue_s, inference_s, prefill_s, prompt, tokens = (change[meaning] / requests for meaning in _OF_ENDED)
    pace_s = (inference_s - prefill_s) / max(tokens - 1.0, 1.0)
    if not (e2e_s - queue_s - inference_s >= 0.0 and prefill_s >= 0.0 and prompt >= 0.0 and pace_s >= 0.0):
        return []  # some may not be counted
    prefill_us = 1e6 * prefill_s if queue_s < pace_s and prompt < budget_tokens else 0.0
    wait_us = 1e6 * (e2e_s - queue_s - inference_s)
    return [BusyArrival(wait_us, 1e6 * pace_s, prompt, prefill_us=prefill_us, requests=requests, is_known=True)]


_OF_ENDED = (
    Meaning.E2E_SECONDS,
    Meaning.QUEUE_SECONDS,
    Meaning.INFERENCE_SECONDS,
    Meaning.PREFILL_SECONDS,
    Meaning.FINISHED_PROMPT_TOKENS,
    Meaning.FINISHED_GENERATED_TOKENS,
)


MID_PROMPT_SCRAPES_MAX = 6
_FRONT_ENDS_WINDOWS = 20
_FRONT_ENDS_KEPT = 64
_FRONT_ENDS_DOUBTFUL = 1.5
_SKIPPED_SCRAPES = 8
"""Scrapes after a fall: several servers at one address alternate more often than that."""


@dataclass(slots=True)
class ScrapeWindows:
    """Scrapes of one engine in order of time, and the rows between them; windows without one are counted."""

    count: Callable[[RowDrop], None]
    engine: int
    """Number of the engine, for its rows."""
    occupancy: Occupancy = field(default_factory=Occupancy)
    start: Scrape | None = None
    newest: Scrape | None = None
    scrapes: int = 0
    """Scrapes since the start of the open window."""
    front_ends: int = 1
    """Front ends that each count a step in which a request of theirs took part."""
    scrapes_to_skip: int = 0
    """Scrapes from which nothing is learned, since a counter fell."""
    rows: dict[Target, list[RowBlock]] = field(default_factory=lambda: {Target.STEP_TIME: [], Target.GPU_TIME: []})
    """Rows not taken yet; those of ``gpu_time`` where pages count how long the GPU was busy."""
    _ratios: list[float] = field(default_factory=list)

    def add(self, unix_ns: int, mono_ns: int, reading: EngineReading) -> None:
        """Take the next scrape."""
        newest = self.newest
        if newest is not None and mono_ns <= newest.mono_ns:
            self.count(RowDrop.TIME_ORDER)
            return
        if newest is not None:
            unix_ns = max(unix_ns, newest.unix_ns)  # the wall clock was set back: rows stay in order
        scrape = self.occupancy.scrape(unix_ns, mono_ns, reading)
        self.scrapes_to_skip = max(self.scrapes_to_skip - 1, 0)
        if newest is not None and is_counter_reset(scrape.since(newest)):
            self.count(RowDrop.RESTART)
            self.scrapes_to_skip = _SKIPPED_SCRAPES
            self.occupancy, self.start, self.scrapes = Occupancy(), None, 0
            scrape = self.occupancy.scrape(unix_ns, mono_ns, reading)
        self.newest = scrape
        if self.scrapes_to_skip:
            return
        self.scrapes += 1
        if self.start is None:
            if scrape.is_between_prompts or self.scrapes > MID_PROMPT_SCRAPES_MAX:
                self.start, self.scrapes = scrape, 0
            return
        window = window_sums(self.start, scrape, self.scrapes, self.front_ends)
        wait = self.scrapes <= MID_PROMPT_SCRAPES_MAX and window.is_close
        if wait and not (scrape.is_between_prompts and (window.steps >= STEPS_MIN or window.steps == 0)):
            return
        self.start, self.scrapes = scrape, 0
        if window.steps:
            self._add_rows(window)

    def _add_rows(self, window: WindowSums) -> None:
        change = window.change
        preempted = change[Meaning.PREEMPTIONS] > 0.0
        is_doubtful = preempted or (window.end.reading.flavour is Flavour.VLLM and self._count_copies(window))
        if is_doubtful or window.steps < STEPS_MIN:
            self.count(RowDrop.INCOMPLETE)
            return
        if window.steps > STEPS_MAX:
            self.count(RowDrop.TOO_LONG)
            return
        if (gpu_s := change[Meaning.GPU_SECONDS]) > 0.0:
            self.rows[Target.GPU_TIME].append(row_of(window, 1e6 * gpu_s, self.engine))
        if window.decoded >= DECODED_MIN and (latency_s := change[Meaning.ITL_SECONDS]) > 0.0:
            decoding = window.decoded / max(window.decode_steps, 1.0)
            floor, before_joining = max(decoding, 0.5), 0.5 if window.is_close else 0.0
            row = row_of(
                window,
                1e6 * latency_s / decoding,
                self.engine,
                prefill_share=max(decoding - before_joining, 0.0) / floor,
                spread=window.decode_steps * (window.end.decoding - window.start.decoding) / (12.0 * floor),
            )
            self.rows[Target.STEP_TIME].append(row)
        else:
            self.count(RowDrop.IDLE)

    def _count_copies(self, window: WindowSums) -> bool:
        """Whether more front ends may have counted the window's steps than are known of by now.

        Decoding requests per counted step fall below those held where several count the same step. Of scrapes far apart
        those held at both ends say too little of the time between to drop the row.
        """
        held = (window.start.decoding + window.end.decoding) / 2.0
        counted = window.change[Meaning.STEPS]
        if held < 1.0 or not window.decoded:
            return False
        self._ratios.append(held * counted / window.decoded)
        several = median(self._ratios)
        if len(self._ratios) < _FRONT_ENDS_WINDOWS:
            return window.is_close and several > _FRONT_ENDS_DOUBTFUL
        self.front_ends = max(1, round(several))
        del self._ratios[:-_FRONT_ENDS_KEPT]
        return False
