"""Recordings made slower by hand: step rows of a real server, of which some work takes longer from a moment on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import msgspec
import numpy as np

from collector.decode import CoreSpan
from collector.decode.pages import ScrapedPage
from collector.service.pipeline import make_pipeline
from online import Bank, RowBlock, Target, TargetSnapshot
from online.rows import STEP_FEATURES
from tests.support import pipelines
from tests.support.banks import PORTABLE as CONFIG
from tests.support.recordings import otlp_file
from tests.support.step_pages import pages_of, requests_of

CONFIG_ID = "0f3c52aa9b1e"
PREFILL_US, NS_PER_US = 682.0, 1e3
"""What a prompt token costs in c10_long."""
PAUSE_NS = 5_000_000_000
"""Between two rounds of a recording that is played again."""

Slower = Callable[["Work"], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Work:
    """Columns of rows, (n,) each: steps, prefill tokens, and the time that they took, in microseconds."""

    steps: np.ndarray
    prefill_tokens: np.ndarray
    elapsed_us: np.ndarray


@cache
def step_rows(name: str = "c10_long") -> RowBlock:
    """All step rows of a recording, as its pipeline makes them."""
    return pipelines.step_rows(make_pipeline(CONFIG), [otlp_file(name)])[1]


@cache
def every_step_longer(by_us: float) -> Slower:
    """Each step takes so much longer, whatever is in it."""
    return lambda work: work.elapsed_us + by_us * work.steps


@cache
def prefill_longer(factor: float) -> Slower:
    """A prompt token costs so many times as much."""
    return lambda work: work.elapsed_us + (factor - 1.0) * PREFILL_US * work.prefill_tokens


@cache
def decode_longer(factor: float) -> Slower:
    """Everything but prompt tokens costs so many times as much."""

    def longer(work: Work) -> np.ndarray:
        decode_us = np.maximum(work.elapsed_us - PREFILL_US * work.prefill_tokens, 0.0)
        return work.elapsed_us + (factor - 1.0) * decode_us

    return longer


@cache
def everything_longer(factor: float) -> Slower:
    """Every step takes so many times as long."""
    return lambda work: factor * work.elapsed_us


def slowed(rows: RowBlock, slower: Slower, *, since: int = 0) -> RowBlock:
    """The rows of a machine that is slower from row ``since`` on; their ends move with it."""
    column = rows.raw[:, STEP_FEATURES.index("prefill_tokens")]
    work = Work(rows.steps, np.add.reduceat(column, rows.offsets[:-1]), rows.elapsed_us)
    longer_us = np.where(np.arange(len(rows)) < since, work.elapsed_us, slower(work))
    later_ns = np.cumsum((longer_us - work.elapsed_us) * NS_PER_US).astype(np.int64)
    return dataclasses.replace(rows, elapsed_us=longer_us, end_ns=rows.end_ns + later_ns)


def noisy(rows: RowBlock, seed: int) -> RowBlock:
    """The rows of a sibling: each takes 3 % more or less."""
    noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.03, len(rows)))
    return dataclasses.replace(rows, elapsed_us=rows.elapsed_us * noise)


def bank_of(rows: RowBlock, engine: str = "engine-0") -> Bank:
    """What a sidecar knows after these rows of one engine."""
    bank = Bank(CONFIG)
    bank.learn(CONFIG_ID, Target.STEP_TIME, rows, engines={int(each): engine for each in np.unique(rows.engine)})
    return bank


def learned(bank: Bank) -> TargetSnapshot:
    """What it says of the step time."""
    return bank.targets(CONFIG_ID)["step_time"]


@cache
def _requests(name: str) -> tuple[CoreSpan, ...]:
    return tuple(requests_of(otlp_file(name)))


def pages_of_a_slower_server(
    slower: Slower, every_s: float, rounds: int, usual: int = 0, name: str = "c10_long"
) -> tuple[list[ScrapedPage], int]:
    """Pages of a server that does the same work again and again, and is slower after so many ``usual`` rounds.

    And since when it is, in ns. Requests last longer where steps do.
    """
    rows, spans, blocks, later_ns, onset_ns = step_rows(name), [], [], 0, 0
    slow = slowed(rows, slower)
    for number in range(usual + rounds):
        now = slow if number >= usual else rows
        onset_ns = rows.end_ns[0] + later_ns if number == usual else onset_ns
        blocks.append(dataclasses.replace(now, end_ns=now.end_ns + later_ns))
        for span in _requests(name):
            ahead_ns = span.unix_minus_mono_ns
            at_ns = np.interp([event.ts_ns + ahead_ns for event in span.events], rows.end_ns, now.end_ns) + later_ns
            stamped = zip(span.events, at_ns, strict=True)
            events = tuple(msgspec.structs.replace(event, ts_ns=int(at) - ahead_ns) for event, at in stamped)
            spans.append(msgspec.structs.replace(span, events=events))
        later_ns += int(now.end_ns[-1] - rows.end_ns[0]) + PAUSE_NS
    return pages_of(spans, RowBlock.concatenate(blocks), every_s), int(onset_ns)
