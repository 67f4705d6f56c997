"""Spans of single requests to records: the engine core's journeys, the API server's moments, stock vLLM's latencies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Final, NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.telemetry import Counts, Skip, table

from . import vocabulary as words
from .attributes import Rejected, Value, nanoseconds, read_count, read_fields, read_seconds, scalar, scalars
from .records import MISSING, ApiSpan, CoreSpan, Finish, Mark, MarkKind, RequestSpan, fingerprint


class CoreMoment(NamedTuple):
    """One event of a journey; ``finish`` of FINISHED alone."""

    mark: Mark
    prompt_tokens: int
    unix_ns: int
    finish: Finish | None


class ApiMoment(NamedTuple):
    """One event of an API server's span: a field of ApiSpan, and the time."""

    field: str
    ns: int


def core_moments(span: Span) -> list[CoreMoment]:
    """What the events of a span say, foreign ones left out; raises Rejected with the reason it cannot be used."""
    out = []
    for event in span.events:
        kind = words.MARK_KINDS.get(event.name)
        if kind is None:
            continue
        values = read_fields(event, words.JOURNEY_FIELDS)
        if not words.UNIX_MIN <= event.time_unix_nano <= words.UNIX_MAX:
            raise Rejected(Skip.OUT_OF_RANGE)
        mark = Mark(kind, int(values["step_id"]), int(values["ts_ns"]), int(values["output_tokens"]))
        finish = finish_of(scalar(event.attributes, words.FINISH)) if kind is MarkKind.FINISHED else None
        out.append(CoreMoment(mark, int(values["prompt_tokens"]), event.time_unix_nano, finish))
    return out


def core_span(
    span: Span, counts: Counts, taken: Sequence[CoreMoment] | None, may_be: Callable[[int], bool]
) -> CoreSpan:
    """A request of the engine core; raises Rejected with the reason it cannot be used.

    ``taken``: its moments, if another decoder took all of its events. ``may_be``: whether something may have happened
    at a time of the wall clock.
    """
    moments = core_moments(span) if taken is None else taken
    if not moments:
        raise Rejected(Skip.NOT_A_REQUEST)
    marks = tuple([moment.mark for moment in moments])
    _check_order(marks)
    unix_minus_mono_ns = median_low([moment.unix_ns - moment.mark.ts_ns for moment in moments])
    if not may_be(marks[-1].ts_ns + unix_minus_mono_ns):
        raise Rejected(Skip.OUT_OF_RANGE)
    _count_events(len(span.events) if taken is None else len(taken), len(moments), counts)
    request_id = scalar(span.attributes, words.REQUEST_ID)
    return CoreSpan(
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        trace_id=span.trace_id,
        request=fingerprint("" if request_id is None else str(request_id)),
        prompt_tokens=moments[-1].prompt_tokens,
        marks=marks,
        # nothing follows FINISHED
        finish=moments[-1].finish,
        unix_minus_mono_ns=unix_minus_mono_ns,
        end_unix_ns=span.end_time_unix_nano,
    )


def _count_events(events: int, understood: int, counts: Counts) -> None:
    counts[table.DECODED_EVENTS_OK] += understood
    if events > understood:
        counts[table.SKIPPED_EVENTS, Skip.FOREIGN_EVENT] += events - understood


def finish_of(said: Value | None) -> Finish:
    """How a request ended, by ``finish.status``."""
    try:
        return Finish(str(said))
    except ValueError:
        return Finish.ERROR


def _check_order(marks: tuple[Mark, ...]) -> None:
    """Emission order is time order; steps never go back; nothing follows FINISHED; tokens never shrink."""
    for before, after in itertools.pairwise(marks):
        if after.ts_ns < before.ts_ns:
            raise Rejected(Skip.TIME_ORDER)
        if (
            before.kind is MarkKind.FINISHED
            or after.kind is MarkKind.QUEUED
            or after.step_id < before.step_id
            or after.output_tokens < before.output_tokens
            or (after.kind is before.kind)
        ):
            raise Rejected(Skip.INCONSISTENT)


_NO_MOMENTS: Final = dict.fromkeys(words.API_MOMENTS.values(), MISSING)
_API_FACTS: Final = frozenset({words.PROMPT_TOKENS, words.SAMPLES, words.MODEL})


def api_moments(span: Span) -> list[ApiMoment]:
    """What the events of a span say, foreign ones left out; raises Rejected with the reason it cannot be used."""
    out = []
    for event in span.events:
        field = words.API_MOMENTS.get(event.name)
        if field is None:
            continue
        seconds = scalar(event.attributes, words.API_TIME)
        if seconds is None:
            raise Rejected(Skip.MISSING_ATTRIBUTE)
        out.append(ApiMoment(field, nanoseconds(seconds)))
    return out


def api_span(span: Span, counts: Counts, taken: Sequence[ApiMoment] | None = None) -> ApiSpan:
    """A request of the instrumented API server; raises Rejected with the reason it cannot be used.

    ``taken``: its moments, if another decoder took all of its events.
    """
    said = api_moments(span) if taken is None else taken
    moments = {**_NO_MOMENTS, **dict(said)}
    attributes = scalars(span.attributes, _API_FACTS)
    out = ApiSpan(
        span_id=span.span_id,
        trace_id=span.trace_id,
        arrived_ns=moments["arrived_ns"],
        handoff_ns=moments["handoff_ns"],
        first_response_ns=moments["first_response_ns"],
        departed_ns=moments["departed_ns"],
        aborted=moments["aborted_ns"] != MISSING,
        prompt_tokens=read_count(attributes, words.PROMPT_TOKENS, MISSING),
        samples=read_count(attributes, words.SAMPLES, 1),
        model=str(attributes.get(words.MODEL, ""))[: words.FACT_LENGTH_MAX],
        end_unix_ns=span.end_time_unix_nano,
    )
    _count_events(len(span.events) if taken is None else len(taken), len(said), counts)
    return out


def request_span(span: Span) -> RequestSpan:
    """A request of an un-forked vLLM; raises Rejected with the reason it cannot be used."""
    attributes = scalars(span.attributes)
    if "gen_ai.latency.e2e" not in attributes:
        raise Rejected(Skip.NOT_A_REQUEST)
    latencies = {name: read_seconds(attributes.get(key)) for key, name in words.LATENCY_FIELDS.items()}
    return RequestSpan(
        span_id=span.span_id,
        trace_id=span.trace_id,
        parent_span_id=span.parent_span_id,
        arrival_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
        prompt_tokens=read_count(attributes, words.PROMPT_TOKENS),
        output_tokens=read_count(attributes, words.OUTPUT_TOKENS),
        model=str(attributes.get(words.MODEL, ""))[: words.FACT_LENGTH_MAX],
        **latencies,
    )
