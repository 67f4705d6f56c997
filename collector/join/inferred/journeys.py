"""Projects journeys onto the steps in which their requests ran.

``scheduler.step`` of SCHEDULED, FIRST_TOKEN, PREEMPTED and FINISHED says which steps a request was part of. Between
SCHEDULED and FIRST_TOKEN it prefills; from the step after FIRST_TOKEN on it decodes one token a step, its context
growing by one; after a preemption it recomputes prompt and outputs first. Prefill in several steps is split later, when
the token budget of those steps is known (:func:`split_chunks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector.decode import CoreSpan, Finish, SpanEvent, SpanEventKind
from collector.join.window import Cells, StepWindow

NATURAL = frozenset({Finish.STOPPED, Finish.LENGTH})
"""Ends that are stamped at a step boundary; aborts are handled between steps."""
_ONE = np.ones((), np.float32)
"""1 in a column's type, which numpy adds twice as fast as a Python number."""


@dataclass(slots=True)
class PrefillChunks:
    """One prefill spread over steps first..last; ``left`` of its tokens are not assigned to a step yet."""

    first_step: int
    last_step: int
    scheduled_ns: int
    left: float
    done: float = 0.0


@dataclass(frozen=True, slots=True)
class Residency:
    """The request ran in every step first..last, having ``outputs`` output tokens before and ``outputs_end`` after."""

    first_step: int
    last_step: int
    scheduled_ns: int
    outputs: int
    outputs_end: int
    first_token_step: int | None


def project_onto_steps(span: CoreSpan, window: StepWindow, residencies: Sequence[Residency]) -> list[PrefillChunks]:
    """Add the request to the columns of its steps, all of which the window holds; return its multi-step prefills."""
    chunks = []
    for run in residencies:
        if run.outputs == 0:
            chunks += _lay_prefill(run, span.prompt_tokens, window)
        else:
            _lay_resumed(run, span.prompt_tokens, window)
    _lay_waiting(span, window)
    _lay_stamps(span, window)
    return chunks


def waiting_steps(span: CoreSpan) -> tuple[int, int]:
    """Steps that ran while the request waited for the first time: first, and one past the last."""
    queued = span.events[0]
    stop = queued.step_id
    for mark in span.events:
        if mark.kind is SpanEventKind.SCHEDULED:
            stop = mark.step_id
            break
    first = queued.step_id + 1 if queued.kind is SpanEventKind.QUEUED else stop
    return min(first, stop), stop


def find_residencies(events: tuple[SpanEvent, ...]) -> Iterator[Residency]:
    """Spans of steps in which the request ran, from SCHEDULED to PREEMPTED or FINISHED."""
    scheduled: SpanEvent | None = None
    first_token: SpanEvent | None = None
    for event in events:
        if event.kind is SpanEventKind.SCHEDULED:
            scheduled, first_token = event, None
        elif event.kind is SpanEventKind.FIRST_TOKEN:
            first_token = event
        elif scheduled is not None and event.kind in (SpanEventKind.PREEMPTED, SpanEventKind.FINISHED):
            last = event.step_id - (event.kind is SpanEventKind.PREEMPTED)
            if last >= scheduled.step_id:
                yield Residency(
                    scheduled.step_id,
                    last,
                    scheduled.ts_ns,
                    scheduled.output_tokens,
                    event.output_tokens,
                    first_token.step_id if first_token is not None else None,
                )
            scheduled = None


def _lay_prefill(run: Residency, prompt_tokens: int, window: StepWindow) -> list[PrefillChunks]:
    cells, first = window.rebuilt, run.first_step - window.base
    last = (run.last_step if run.first_token_step is None else min(run.first_token_step, run.last_step)) - window.base
    chunks = []
    if first == last:
        cells["prefill_requests"][first] += 1
        cells["prefill_tokens"][first] += prompt_tokens
        cells["prefill_attention"][first] += prompt_tokens**2 / 2
    else:
        cells["prefill_requests"][first : last + 1] += 1
        chunks.append(PrefillChunks(run.first_step, last + window.base, run.scheduled_ns, prompt_tokens))
    steps = run.last_step - window.base - last
    if run.first_token_step is not None and steps > 0:
        _lay_decode(cells, last + 1, prompt_tokens + 1.0 + np.arange(steps))
        cells["first_requests"][last + 1] += 1
        cells["first_context_tokens"][last + 1] += prompt_tokens + 1
    return chunks


def _lay_decode(cells: Cells, first: int, context_tokens: NDArray[np.floating[Any]]) -> None:
    """A request decodes in as many steps, from index ``first`` on, as it has contexts."""
    here = slice(first, first + len(context_tokens))
    for name, added in (("decode_requests", _ONE), ("decode_tokens", _ONE), ("context_tokens", context_tokens)):
        column = cells[name][here]
        column += added


def _lay_resumed(run: Residency, prompt_tokens: int, window: StepWindow) -> None:
    """Recomputation: prompt and outputs so far, in one step, or evenly over the steps that made no token."""
    cells, first = window.rebuilt, run.first_step - window.base
    steps = run.last_step - run.first_step + 1
    known_tokens = prompt_tokens + run.outputs
    silent = min(max(0, steps - (run.outputs_end - run.outputs)), steps - 1)
    context = known_tokens + np.maximum(np.arange(steps) - silent, 0.0)
    context[:silent] = known_tokens * np.arange(1, silent + 1) / (silent + 1)
    _lay_decode(cells, first, context)
    recomputing = slice(first, first + silent + 1)
    cells["recomputed_tokens"][recomputing] += known_tokens / (silent + 1) - 1


def _lay_waiting(span: CoreSpan, window: StepWindow) -> None:
    first, stop = waiting_steps(span)
    if first >= stop:  # scheduled at the next step, as most are
        return
    here = slice(max(0, first - window.base), stop - window.base)
    window.rebuilt["waiting_requests"][here] += 1
    window.rebuilt["waiting_tokens"][here] += span.prompt_tokens


def _lay_stamps(span: CoreSpan, window: StepWindow) -> None:
    """Keep the newest end stamp and the oldest SCHEDULED stamp of each step: the ones nearest to its boundaries."""
    cells, ends_naturally = window.rebuilt, span.finish in NATURAL
    for mark in span.events:
        kind, ts_ns, index = mark.kind, mark.ts_ns, mark.step_id - window.base
        if not 0 <= index < window.size:
            continue  # a stamp of a step the request was not part of: aborts while preempted, impossible journeys
        ended = kind is SpanEventKind.FIRST_TOKEN or (kind is SpanEventKind.FINISHED and ends_naturally)
        if ended and ts_ns > cells["completed_ns"].item(index):
            cells["completed_ns"][index] = ts_ns
            cells["completed_unix_ns"][index] = ts_ns + span.unix_minus_mono_ns
        if kind is SpanEventKind.SCHEDULED and not 0 < cells["scheduled_ns"].item(index) <= ts_ns:
            cells["scheduled_ns"][index] = ts_ns
            cells["scheduled_unix_ns"][index] = ts_ns + span.unix_minus_mono_ns


def split_chunks(
    chunks: list[PrefillChunks], window: StepWindow, stop_step: int, budget_tokens: float | None, *, asynchronous: bool
) -> list[PrefillChunks]:
    """Give the tokens of multi-step prefills to their steps below ``stop_step``; returns what is not finished.

    vLLM schedules decodes first, then running prefills in order, so a prefill takes what the others leave of the step's
    prefill tokens (known from its summary) or of the token budget. Without either: an even split.
    """
    unfinished = []
    for chunk in sorted(chunks, key=lambda c: (c.scheduled_ns, c.first_step, c.last_step)):
        for step in range(chunk.first_step, min(chunk.last_step + 1, stop_step)):
            index = step - window.base
            steps_after = chunk.last_step - step
            tokens = chunk.left
            if steps_after > 0:  # a token is left for each step after it, while there are any
                share = min(tokens - steps_after, _share(window, index, chunk, budget_tokens, asynchronous))
                tokens = min(tokens, max(1.0, share))
            cell = window.rebuilt[index]
            cell["prefill_tokens"] += tokens
            cell["prefill_attention"] += tokens * (chunk.done + tokens / 2)
            chunk.done += tokens
            chunk.left -= tokens
        chunk.first_step = max(chunk.first_step, stop_step)
        if chunk.first_step <= chunk.last_step:
            unfinished.append(chunk)
    return unfinished


def _share(
    window: StepWindow, index: int, chunk: PrefillChunks, budget_tokens: float | None, asynchronous: bool
) -> float:
    cell, step = window.rebuilt[index], window.steps[index]
    first = cell["first_requests"] if asynchronous else 0.0
    if cell["seen"]:
        return float(step["prefill_tokens"] - cell["prefill_tokens"] - first)
    if budget_tokens is not None:
        spent = cell["decode_tokens"] + cell["recomputed_tokens"] + cell["prefill_tokens"]
        return float(budget_tokens - spent)
    return chunk.left / (chunk.last_step - (index + window.base) + 1)
