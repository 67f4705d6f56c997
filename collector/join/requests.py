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
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from collector.decode import MISSING, ApiSpan, CoreSpan, SpanEvent, SpanEventKind
from collector.join.emitter import TargetRows
from collector.join.inferred import NATURAL
from collector.join.window import StepWindow
from online import Quality, RowBlock, Target

_QUEUE_STATE_AGE_NS = 10**9
"""A summary older than this at QUEUED says nothing about the queue."""
_QUEUE_STATE_STEPS = 1024
"""Steps looked back for it: a second of the fastest engines."""


@dataclass(slots=True)
class PendingRequest:
    """A finished request waiting for its API span and for the rows of its steps to leave."""

    span: CoreSpan
    last_step: int
    start_unix_ns: int
    api: ApiSpan | None = None

    @property
    def queued_unix_ns(self) -> int:
        """When it was first heard of."""
        return self.span.events[0].ts_ns + self.span.unix_minus_mono_ns

    @property
    def queue_unix_ns(self) -> int:
        """Event time from which steps may show the queue that it met."""
        return self.queued_unix_ns - _QUEUE_STATE_AGE_NS

    def __lt__(self, other: PendingRequest) -> bool:
        """The one that ended first; equal ends by span id, so that arrival does not show."""
        one, two = self.span, other.span
        return (one.end_unix_ns, one.span_id) < (two.end_unix_ns, two.span_id)


def request_rows(
    requests: Iterable[PendingRequest], window: StepWindow, remembered_ns: int, *, engine: int, quality: Quality
) -> list[TargetRows]:
    """Rows of every target that requests give some for, in their order.

    The queue that a request met is not remembered where the request took ``remembered_ns`` or longer.
    """
    by_target: defaultdict[Target, list[tuple[tuple[float, ...], float, int]]] = defaultdict(list)
    for request in requests:
        span, marks = request.span, {mark.kind: mark for mark in reversed(request.span.events)}
        queued, steps = marks.get(SpanEventKind.QUEUED), None
        if span.end_unix_ns - request.queued_unix_ns < remembered_ns:
            steps = window
        state = (math.nan,) * 4 if queued is None or steps is None else queue_state(steps, queued.step_id, queued.ts_ns)
        raw = (float(span.prompt_tokens), float(span.events[-1].output_tokens), *state)
        for target, start_ns, stop_ns in _waits(span, request.api, steps, marks):
            by_target[target].append((raw, (stop_ns - start_ns) / 1e3, span.end_unix_ns))
    out = []
    for target, rows in sorted(by_target.items()):
        raws, elapsed_us, ends_ns = map(np.array, zip(*rows, strict=True))
        out.append((target, RowBlock.of_lines(raws, elapsed_us, end_ns=ends_ns, engine=engine, quality=quality)))
    return out


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
