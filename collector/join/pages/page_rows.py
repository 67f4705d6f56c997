"""The interval equation between two scrapes.

Over the window, by differences of the counters: n steps, D = sum of decoding requests over the steps, S = sum of the
step times they sat through, P prefill tokens computed, F first tokens; d and C: decoding requests and context at the
ends, their means marked by a bar, their differences by a delta; D_ = D / n, m = max(D_, 1/2).

    latency row   S / D_ = b0 n + b1 P max(D_ - 1/2, 0) / m + b2 n (C_ + dd dC / (12 m)) + b3 (D + F + n dd^2 / (12 m))

S holds exactly the counted steps on the engine's clock: no idle time and no steps cut by the ends of the window. Every
step counts D times in it, so the sums on the right are weighted by D too: 1/12 is the variance of what changes evenly
over a window, and a prompt is computed just before its request joins the decoders (the 1/2), if scrapes are close.

    clock row     dt = b0 n + b1 P + b2 n C_ + b3 (D + F)

Where the page has no latencies, or nobody decodes. Only if a request of the start is still there at the end, so that
the engine was never idle between; the steps cut by the ends are its noise.

A row of n steps carries n lines: k of them share its prefill, the rest has none, so that columns that are not sums
(has_prefill, hinges) are near what they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from collector.decode.pages import Flavour, Meaning
from collector.telemetry import RowDrop
from online import PHASES, STEP_FEATURES, Floats, Quality, RowBlock
from online.state import saved

from .scrape_state import Scrape

STEPS_MIN = 3
DECODED_MIN = 3
STEPS_MAX = 8192
"""A window of more steps has lasted for minutes."""
CLOSE_SCRAPES_NS = 2_500_000_000
"""Scrapes further apart say nothing of when within the window a prompt came."""
_TWELFTH = 1.0 / 12.0
_COLUMN = {name: index for index, name in enumerate(STEP_FEATURES)}


@dataclass(frozen=True, slots=True)
class WindowSums:
    """Differences of two scrapes; ``scrape_ns`` is how far apart the scrapes within it were.

    ``counted`` are the steps by the page's own counter, which several front ends keep; NaN where it has none.
    """

    start: Scrape
    end: Scrape
    steps: float
    counted: float
    prefill_tokens: float
    decoded: float
    first_tokens: float
    scrape_ns: float

    @property
    def close(self) -> bool:
        """Whether the scrapes tell where in the window a prompt came."""
        return self.scrape_ns <= CLOSE_SCRAPES_NS


@dataclass(frozen=True, slots=True)
class PageRow:
    """One row: its time, its steps, and the sums of its columns."""

    STATE = saved("page_row")

    end_ns: int
    elapsed_us: float
    steps: int
    prefill_steps: int
    sums: dict[str, float]


def went_back(start: Scrape, end: Scrape) -> bool:
    """Whether a counter fell: the server was started again."""
    return any(end.value(meaning) < start.value(meaning) for meaning in _COUNTERS)


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


def window_sums(flavour: Flavour, start: Scrape, end: Scrape, scrapes: int, copies: int) -> WindowSums:
    """What happened between two scrapes; ``copies``: front ends that each count a step in which they had a request.

    Of several, some have none in a small batch, so that their sum says no more than that there were no more steps.
    """

    def delta(meaning: Meaning) -> float:
        return end.value(meaning) - start.value(meaning)

    decoded, first_tokens = delta(Meaning.ITL_COUNT), delta(Meaning.FIRST_TOKENS)
    if math.isnan(decoded):
        decoded = max(delta(Meaning.GENERATED_TOKENS) - first_tokens, 0.0)
    steps = counted = delta(Meaning.STEPS)
    if math.isnan(counted) or copies > 1:
        mean = (start.decoding + end.decoding) / 2.0 if flavour is Flavour.VLLM else _mean_running(start, end)
        steps = min(decoded / mean, math.inf if math.isnan(counted) else counted) if mean >= 1.0 else 0.0
    return WindowSums(
        start,
        end,
        steps,
        counted,
        prefill_tokens=_prefill_tokens(end, delta),
        decoded=decoded,
        first_tokens=first_tokens,
        scrape_ns=(end.mono_ns - start.mono_ns) / max(scrapes, 1),
    )


def _mean_running(start: Scrape, end: Scrape) -> float:
    return (start.value(Meaning.RUNNING) + end.value(Meaning.RUNNING)) / 2.0


def _prefill_tokens(end: Scrape, delta: Callable[[Meaning], float]) -> float:
    """Prompt tokens computed. The steps' counter has prefix hits in it up to some release, and not since."""
    computed = delta(Meaning.PREFILL_TOKENS)
    if not math.isnan(computed):
        return computed
    hits_total, hits = end.value(Meaning.PREFIX_HIT_TOKENS), delta(Meaning.PREFIX_HIT_TOKENS)
    hits = 0.0 if math.isnan(hits) else max(hits, 0.0)
    credited = delta(Meaning.STEP_TOKENS) - delta(Meaning.GENERATED_TOKENS)
    if math.isnan(credited):
        return max(delta(Meaning.PROMPT_TOKENS) - hits, 0.0)
    in_all = end.value(Meaning.STEP_TOKENS) - end.value(Meaning.GENERATED_TOKENS)
    without_hits = end.value(Meaning.PROMPT_TOKENS) - in_all > 0.5 * hits_total
    return max(credited if without_hits else credited - hits, 0.0)


def row_of(window: WindowSums) -> PageRow | RowDrop:
    """The window's equation, or why it has none."""
    if not STEPS_MIN <= window.steps <= STEPS_MAX:
        return RowDrop.TOO_LONG if window.steps > STEPS_MAX else RowDrop.INCOMPLETE
    start, end = window.start, window.end
    latency_s = end.value(Meaning.ITL_SECONDS) - start.value(Meaning.ITL_SECONDS)
    if window.decoded >= DECODED_MIN and latency_s > 0.0:
        return _latency_row(window, latency_s)
    never_idle = (
        start.value(Meaning.RUNNING) > end.value(Meaning.FINISHED) - start.value(Meaning.FINISHED)
        and end.value(Meaning.RUNNING) > 0.0
        and start.left == end.left
    )
    return _clock_row(window) if never_idle else RowDrop.IDLE


def _latency_row(window: WindowSums, latency_s: float) -> PageRow:
    start, end, n = window.start, window.end, window.steps
    decoding = window.decoded / n
    floor = max(decoding, 0.5)
    grown, context_grown = end.decoding - start.decoding, end.context_tokens - start.context_tokens
    before_joining = 0.5 if window.close else 0.0
    mean_context = (start.context_tokens + end.context_tokens) / 2.0
    return _row(
        window,
        elapsed_us=latency_s / decoding * 1e6,
        prefill_tokens=window.prefill_tokens * max(decoding - before_joining, 0.0) / floor,
        context=n * (mean_context + grown * context_grown * _TWELFTH / floor),
        decoded=window.decoded + n * grown * grown * _TWELFTH / floor,
    )


def _clock_row(window: WindowSums) -> PageRow:
    start, end = window.start, window.end
    return _row(
        window,
        elapsed_us=(end.mono_ns - start.mono_ns) / 1e3,
        prefill_tokens=window.prefill_tokens,
        context=window.steps * (start.context_tokens + end.context_tokens) / 2.0,
        decoded=window.decoded,
    )


def _row(window: WindowSums, *, elapsed_us: float, prefill_tokens: float, context: float, decoded: float) -> PageRow:
    end, steps = window.end, max(round(window.steps), 1)
    prompts = window.first_tokens
    return PageRow(
        end_ns=end.unix_ns,
        elapsed_us=elapsed_us * steps / window.steps,
        steps=steps,
        prefill_steps=min(steps, max(1, round(prompts))) if prefill_tokens > 0.0 or prompts > 0.0 else 0,
        sums={
            "prefill_tokens": prefill_tokens,
            "prefill_requests": prompts,
            "decode_requests": decoded,
            "decode_tokens": decoded,
            "decode_context_tokens": max(context, 0.0),
            "running": steps * end.value(Meaning.RUNNING),
            "waiting": steps * end.value(Meaning.WAITING),
            "kv_usage_ratio": steps * end.value(Meaning.KV_USAGE_RATIO),
        },
    )


def page_block(rows: list[PageRow], engine: int) -> RowBlock:
    """Rows as a block."""
    steps = np.array([row.steps for row in rows])
    offsets = np.concatenate(([0], np.cumsum(steps)))
    n, lines = len(rows), int(offsets[-1])
    raw: Floats = np.full((lines, len(STEP_FEATURES)), np.nan)
    prefill = np.arange(lines) - np.repeat(offsets[:-1], steps) < np.repeat([row.prefill_steps for row in rows], steps)
    for name in rows[0].sums:
        sums = np.array([row.sums[name] for row in rows])
        if name in ("prefill_tokens", "prefill_requests"):
            each = np.repeat(sums / np.maximum([row.prefill_steps for row in rows], 1), steps)
            raw[:, _COLUMN[name]] = np.where(prefill, each, 0.0)
        else:
            raw[:, _COLUMN[name]] = np.repeat(sums / steps, steps)
    raw[:, _COLUMN["requests"]] = raw[:, _COLUMN["decode_requests"]] + raw[:, _COLUMN["prefill_requests"]]
    return RowBlock(
        raw=raw,
        offsets=offsets.astype(np.int64),
        elapsed_us=np.array([row.elapsed_us for row in rows]),
        phase=np.zeros((n, len(PHASES))),
        weight=np.ones(n),
        end_ns=np.array([row.end_ns for row in rows], np.int64),
        engine=np.full(n, engine, np.int64),
        quality=np.full(n, int(Quality.METRICS), np.int64),
    )
