"""Between arrival and queue, from two scrapes: sums that were recorded at the same event, and the running step.

    wait     = de2e - dqueue - dinference                        all recorded when a request ends; mean: / dcount
    step     = sum T^2 / (2 sum T) * busy                        mean wait for the step that runs at a random moment
    busy     = n sum T / D / dt                                  n steps, D decoding requests summed over them

A request that arrives waits for the running step before the engine sees it, which is most of ``wait`` on a busy engine
and no work of anybody: ``wait - step`` is what the server does beside its steps. T are the latencies of the window's
decoding requests, their squares by bucket. Within a window the batch hardly changes, so that latencies stand for
steps; over a longer time they do not, for long steps have many requests. A step belongs to the window
in which it ends, so ``busy`` may exceed 1 in one. Microseconds; nothing across a restart.
"""

from __future__ import annotations

import math

from collector.decode.pages import Meaning
from collector.join.requests import ApiQueueing

from .page_rows import CLOSE_SCRAPES_NS, went_back
from .scrape_state import Scrape

BUSY_MAX = 8.0
"""A step lasts no longer than that many windows."""


def add_waits(queueing: ApiQueueing, start: Scrape, end: Scrape, copies: int) -> None:
    """Count what happened between two neighbouring scrapes; ``copies``: front ends that count every step."""
    if end.mono_ns <= start.mono_ns or went_back(start, end):
        return

    def delta(meaning: Meaning) -> float:
        return end.value(meaning) - start.value(meaning)

    requests = delta(Meaning.E2E_COUNT)
    wait_s = delta(Meaning.E2E_SECONDS) - delta(Meaning.QUEUE_SECONDS) - delta(Meaning.INFERENCE_SECONDS)
    if requests > 0.0 and wait_s >= 0.0:
        queueing.add_counted(requests, 1e6 * wait_s)
    if end.mono_ns - start.mono_ns > CLOSE_SCRAPES_NS:
        return
    squares, latency_s, decoded = (
        delta(each) for each in (Meaning.ITL_SECONDS_SQUARED, Meaning.ITL_SECONDS, Meaning.ITL_COUNT)
    )
    if math.isnan(squares):
        return
    elapsed_s = (end.mono_ns - start.mono_ns) / 1e9
    if decoded <= 0.0 or latency_s <= 0.0:
        queueing.watch(elapsed_s, 0.0)
        return
    busy = min(delta(Meaning.STEPS) / copies * latency_s / decoded / elapsed_s, BUSY_MAX)
    if busy >= 0.0:  # a page that counts no steps has NaN
        queueing.watch(elapsed_s, 1e6 * squares / (2.0 * latency_s) * busy)
