"""Spans of single requests to records: the engine core's journeys, the API server's moments, stock vLLM's latencies."""

from __future__ import annotations

import itertools
from statistics import median_low
from typing import Final

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.telemetry import Counts, Skip, table

from . import vocabulary as words
from .attributes import Rejected, nanoseconds, read_count, read_fields, read_seconds, scalar, scalars
from .records import MISSING, ApiSpan, CoreSpan, Finish, Mark, MarkKind, RequestSpan, fingerprint


def core_span(span: Span, counts: Counts) -> CoreSpan:
    """A request of the engine core; raises Rejected with the reason it cannot be used."""
    marks: list[Mark] = []
    offsets_ns: list[int] = []
    prompt_tokens = 0
    finish: Finish | None = None
    foreign = 0
    for event in span.events:
        kind = words.MARK_KINDS.get(event.name)
        if kind is None:
            foreign += 1
            continue
        values = read_fields(event, words.JOURNEY_FIELDS)
        ts_ns = int(values["ts_ns"])
        if not words.UNIX_MIN <= event.time_unix_nano <= words.UNIX_MAX:
            raise Rejected(Skip.OUT_OF_RANGE)
        marks.append(Mark(kind, int(values["step_id"]), ts_ns, int(values["output_tokens"])))
        offsets_ns.append(event.time_unix_nano - ts_ns)
        prompt_tokens = int(values["prompt_tokens"])
        if kind is MarkKind.FINISHED:
            finish = _finish(event)
    if not marks:
        raise Rejected(Skip.NOT_A_REQUEST)
    _check_order(marks)
    if foreign:
        counts[table.SKIPPED_EVENTS, Skip.FOREIGN_EVENT] += foreign
    counts[table.DECODED_EVENTS_OK] += len(marks)
    request_id = scalar(span.attributes, words.REQUEST_ID)
    return CoreSpan(
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        trace_id=span.trace_id,
        request=fingerprint("" if request_id is None else str(request_id)),
        prompt_tokens=prompt_tokens,
        marks=tuple(marks),
        finish=finish,
        unix_minus_mono_ns=median_low(offsets_ns),
        end_unix_ns=span.end_time_unix_nano,
    )


def _finish(event: Span.Event) -> Finish:
    try:
        return Finish(str(scalar(event.attributes, words.FINISH)))
    except ValueError:
        return Finish.ERROR


def _check_order(marks: list[Mark]) -> None:
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


_API_FACTS: Final = frozenset({words.PROMPT_TOKENS, words.SAMPLES, words.MODEL})


def api_span(span: Span, counts: Counts) -> ApiSpan:
    """A request of the instrumented API server; raises Rejected with the reason it cannot be used."""
    moments = dict.fromkeys(words.API_MOMENTS.values(), MISSING)
    foreign = 0
    for event in span.events:
        name = words.API_MOMENTS.get(event.name)
        if name is None:
            foreign += 1
            continue
        seconds = scalar(event.attributes, words.API_TIME)
        if seconds is None:
            raise Rejected(Skip.MISSING_ATTRIBUTE)
        moments[name] = nanoseconds(seconds)
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
    if foreign:
        counts[table.SKIPPED_EVENTS, Skip.FOREIGN_EVENT] += foreign
    counts[table.DECODED_EVENTS_OK] += len(span.events) - foreign
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
