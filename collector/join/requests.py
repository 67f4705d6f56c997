"""Requests of an engine that ended, and what each waited outside of the steps.

api_queueing    api.ARRIVED -> QUEUED, only if no step ran at ARRIVED: a request that meets a running step is stamped
                QUEUED at the next step boundary, and that wait is the step's rest, not API work
queue_wait      QUEUED -> first SCHEDULED
first_response  FIRST_TOKEN -> api.FIRST_RESPONSE_FROM_CORE, streaming only: it comes before FINISHED
post_decode     FINISHED -> api.DEPARTED, one sample, natural end
preemption_gap  PREEMPTED -> SCHEDULED
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from collector.decode import MISSING, ApiSpan, CoreSpan, SpanEvent, SpanEventKind
from collector.join.inferred import NATURAL
from collector.join.window import StepWindow
from online import REQUEST_FEATURES, Quality, RowBlock, Target

_QUEUE_STATE_AGE_NS = 10**9
"""A summary older than this at QUEUED says nothing about the queue."""
_QUEUE_STATE_STEPS = 1024
"""Steps looked back for it: a second of the fastest engines."""


@dataclass(slots=True)
class PendingRequest:
    """A finished request waiting for its API span and for the rows of its steps to leave."""

    span: CoreSpan
    last_step: int
    queued_unix_ns: int
    start_unix_ns: int
    api: ApiSpan | None = None

    @property
    def queue_unix_ns(self) -> int:
        """Event time from which steps may show the queue that it met."""
        return self.queued_unix_ns - _QUEUE_STATE_AGE_NS

    def __lt__(self, other: PendingRequest) -> bool:
        """The one that ended first; equal ends by span id, so that arrival does not show."""
        one, two = self.span, other.span
        return (one.end_unix_ns, one.span_id) < (two.end_unix_ns, two.span_id)


class RequestRow(NamedTuple):
    """One equation of one request target."""

    raw: tuple[float, ...]
    elapsed_us: float
    end_unix_ns: int


def request_block(rows: Sequence[RequestRow], engine: int, quality: Quality) -> RowBlock:
    """Rows of one target as a block."""
    raw, elapsed_us, end_ns = zip(*rows, strict=True)
    lines = np.array(raw).reshape(len(rows), len(REQUEST_FEATURES))
    ends_ns = np.array(end_ns, np.int64)
    return RowBlock.of_lines(lines, np.array(elapsed_us), end_ns=ends_ns, engine=engine, quality=quality)


def rows_of(span: CoreSpan, api: ApiSpan | None, window: StepWindow | None) -> Iterator[tuple[Target, RequestRow]]:
    """Every target this request gives a row for; without ``window``, the queue it met is not remembered."""
    marks = {mark.kind: mark for mark in reversed(span.events)}
    queued = marks.get(SpanEventKind.QUEUED)
    state = (math.nan,) * 4 if queued is None or window is None else queue_state(window, queued.step_id, queued.ts_ns)
    raw = (float(span.prompt_tokens), float(span.events[-1].output_tokens), *state)
    for target, start_ns, stop_ns in _waits(span, api, window, marks):
        yield target, RequestRow(raw, (stop_ns - start_ns) / 1e3, span.end_unix_ns)


def _waits(
    span: CoreSpan, api: ApiSpan | None, window: StepWindow | None, marks: dict[SpanEventKind, SpanEvent]
) -> Iterator[tuple[Target, int, int]]:
    """What it waited for, and the stamps (ns) between which it did; ``marks`` are the first of each kind."""
    kinds = (SpanEventKind.QUEUED, SpanEventKind.SCHEDULED, SpanEventKind.FIRST_TOKEN, SpanEventKind.FINISHED)
    queued, scheduled, first, finished = map(marks.get, kinds)
    if queued is not None and scheduled is not None:
        yield Target.QUEUE_WAIT, queued.ts_ns, scheduled.ts_ns
    for before, after in pairwise(span.events):
        if before.kind is SpanEventKind.PREEMPTED and after.kind is SpanEventKind.SCHEDULED:
            yield Target.PREEMPTION_GAP, before.ts_ns, after.ts_ns
    if api is None or api.samples != 1:
        return
    if queued and window and api.arrived_ns != MISSING and idle_at(window, api.arrived_ns, queued.step_id):
        yield Target.API_QUEUEING, api.arrived_ns, queued.ts_ns
    if finished is None or span.finish not in NATURAL or api.aborted:
        return
    if first is not None and api.first_response_ns != MISSING and api.first_response_ns < finished.ts_ns:
        yield Target.FIRST_RESPONSE, first.ts_ns, api.first_response_ns
    if api.departed_ns != MISSING:
        yield Target.POST_DECODE, finished.ts_ns, api.departed_ns


def queue_state(window: StepWindow, last_step: int, at_ns: int) -> tuple[float, float, float, float]:
    """(waiting, running, kv_usage_ratio, queued_tokens) when ``last_step`` was the last step scheduled.

    From its summary, or the last one at most 1 s before ``at_ns``; else rebuilt from journeys; NaN where neither tells.
    """
    stop = min(last_step - window.base + 1, window.size)
    start = max(0, stop - _QUEUE_STATE_STEPS)
    if stop <= start:
        return (math.nan,) * 4
    cell = window.rebuilt[stop - 1]
    running = float(cell["prefill_requests"] + cell["decode_requests"])
    tokens = float(cell["waiting_tokens"])
    seen = np.flatnonzero(window.rebuilt["seen"][start:stop])
    if len(seen):
        step = window.steps[start + seen[-1]]
        if 0 <= at_ns - step["ts_start_ns"] <= _QUEUE_STATE_AGE_NS:
            return float(step["waiting"]), float(step["running"]), float(step["kv_usage_ratio"]), tokens
    if running == 0 or stop != last_step - window.base + 1:
        return (math.nan,) * 4
    return float(cell["waiting_requests"]), running, math.nan, tokens


def idle_at(window: StepWindow, arrived_ns: int, last_step: int) -> bool:
    """Whether no step ran at ``arrived_ns``, given the last step scheduled before the request was queued.

    When the last request finishes, the engine schedules one empty step and blocks: idle means that this step is the
    last one, and began before the arrival.
    """
    if last_step == 0:
        return True
    index = last_step - window.base
    if not 0 <= index < window.size:
        return False
    step, cell = window.steps[index], window.rebuilt[index]
    if cell["seen"]:
        return bool(step["scheduled_tokens"] == 0 and step["ts_start_ns"] <= arrived_ns)
    before = window.rebuilt[index - 1] if index > 0 else None
    requests = cell["prefill_requests"] + cell["decode_requests"]
    return bool(requests == 0 and before is not None and 0 < before["completed_ns"] <= arrived_ns)
