"""Request targets: what a request waits outside the steps.

api_queueing    api.ARRIVED -> QUEUED, only if no step ran at ARRIVED: a request that meets a running step is stamped
                QUEUED at the next step boundary, and that wait is the step's rest, not API work
queue_wait      QUEUED -> first SCHEDULED
first_response  FIRST_TOKEN -> api.FIRST_RESPONSE_FROM_CORE, streaming only: it comes before FINISHED
post_decode     FINISHED -> api.DEPARTED, one sample, natural end
preemption_gap  PREEMPTED -> SCHEDULED
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from collector.decode import MISSING, ApiSpan, CoreSpan, Mark, MarkKind
from collector.join.window import StepWindow
from online import REQUEST_FEATURES, Floats, Quality, RowBlock, Target

from .journeys import NATURAL

QUEUE_STATE_AGE_NS = 10**9
"""A summary older than this at QUEUED says nothing about the queue."""
_QUEUE_STATE_STEPS = 1024
"""Steps looked back for it: a second of the fastest engines."""


class RequestRow(NamedTuple):
    """One equation of one request target."""

    target: Target
    raw: tuple[float, ...]
    elapsed_us: float
    end_unix_ns: int


def rows_of(span: CoreSpan, api: ApiSpan | None, window: StepWindow | None) -> Iterator[RequestRow]:
    """Every target this request gives a row for; without ``window``, the queue it met is not remembered."""
    marks: dict[MarkKind, Mark] = {}
    for mark in span.marks:
        marks.setdefault(mark.kind, mark)
    queued, scheduled = marks.get(MarkKind.QUEUED), marks.get(MarkKind.SCHEDULED)
    first, finished = marks.get(MarkKind.FIRST_TOKEN), marks.get(MarkKind.FINISHED)
    end_unix_ns = span.marks[-1].ts_ns + span.unix_minus_mono_ns
    output_tokens = span.marks[-1].output_tokens
    state = (math.nan,) * 4 if queued is None or window is None else queue_state(window, queued.step_id, queued.ts_ns)
    raw = (float(span.prompt_tokens), float(output_tokens), *state)

    def row(target: Target, start_ns: int, stop_ns: int) -> RequestRow:
        return RequestRow(target, raw, (stop_ns - start_ns) / 1e3, end_unix_ns)

    if queued is not None and scheduled is not None:
        yield row(Target.QUEUE_WAIT, queued.ts_ns, scheduled.ts_ns)
    for before, after in itertools.pairwise(span.marks):
        if before.kind is MarkKind.PREEMPTED and after.kind is MarkKind.SCHEDULED:
            yield row(Target.PREEMPTION_GAP, before.ts_ns, after.ts_ns)
    if api is not None and api.samples == 1:
        yield from (row(*moments) for moments in _api_moments(span, api, window, queued, first, finished))


def _api_moments(
    span: CoreSpan,
    api: ApiSpan,
    window: StepWindow | None,
    queued: Mark | None,
    first: Mark | None,
    finished: Mark | None,
) -> Iterator[tuple[Target, int, int]]:
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
    newest = stop - 1
    if not cell["seen"]:  # as hardly ever: else one look is enough
        seen = np.flatnonzero(window.rebuilt["seen"][start:stop])
        newest = start + int(seen[-1]) if len(seen) else -1
    if newest >= 0:
        step = window.steps[newest]
        if 0 <= at_ns - step["ts_start_ns"] <= QUEUE_STATE_AGE_NS:
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


def request_block(rows: list[RequestRow], engine: int, quality: Quality) -> RowBlock:
    """Rows of one target as a block."""
    raw: Floats = np.array([row.raw for row in rows]).reshape(len(rows), len(REQUEST_FEATURES))
    return RowBlock.of_lines(
        raw,
        np.array([row.elapsed_us for row in rows]),
        end_ns=np.array([row.end_unix_ns for row in rows], np.int64),
        engine=engine,
        quality=quality,
    )
