"""Plain protobuf to columns and records: complete, slow, and the oracle of every faster decoder.

Bad input is a value, not an exception: whatever is not understood is skipped with a reason from
:class:`~collector.telemetry.Skip` and counted, and the equation of :class:`~collector.decode.Tally` holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from collector.decode.kv import span_events as kv_otlp
from collector.telemetry import Skip

from . import vocabulary as words
from .records import (
    MISSING,
    SNAPSHOT_DTYPE,
    STEP_DTYPE,
    STEP_FIELDS,
    ApiSpan,
    CoreSpan,
    Finish,
    Mark,
    MarkKind,
    RequestSpan,
    Tally,
    Telemetry,
    fingerprint,
)

Value = bool | int | float | str
AdmitSpan = Callable[[str, bytes, int], Skip | None]
"""(instance, span id, end unix ns) -> a reason to leave the span out, or None; see collector.join.dedupe."""


class Taken(NamedTuple):
    """Summaries of a step span that another decoder took out of it: their places among its events, and their rows.

    A row is STEP_DTYPE as 8-byte words: numpy joins those ten times faster than records.
    """

    at: NDArray[np.intp]
    rows: NDArray[np.int64]


_WORDS = len(STEP_FIELDS)
NOTHING_TAKEN = itertools.repeat(Taken(np.empty(0, np.intp), np.empty((0, _WORDS), np.int64)))


class Rejected(Exception):
    """One span or event cannot be used; never leaves this module."""

    def __init__(self, reason: Skip) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(payload: bytes, peer: str, admit_span: AdmitSpan, tally: Tally) -> list[Telemetry]:
    """Decode one ExportTraceServiceRequest into one Telemetry per resource.

    ``peer`` names the emitter where the resource has no ``service.instance.id`` (SDK 1.26 sends none).
    Raises ``google.protobuf.message.DecodeError`` on undecodable bytes: admission has parsed them once already.
    """
    return read(ExportTraceServiceRequest.FromString(payload), peer, admit_span, tally, NOTHING_TAKEN)


def read(
    request: ExportTraceServiceRequest, peer: str, admit_span: AdmitSpan, tally: Tally, taken: Iterator[Taken]
) -> list[Telemetry]:
    """As decode, of a parsed request; ``taken`` has an item for each span of the step scope, in order."""
    return [_read_resource(spans, peer, admit_span, tally, taken) for spans in request.resource_spans]


def _read_resource(
    resource_spans: ResourceSpans, peer: str, admit_span: AdmitSpan, tally: Tally, taken: Iterator[Taken]
) -> Telemetry:
    attributes = _values(resource_spans.resource.attributes[: words.ATTRIBUTES_MAX])
    tally.attributes_ignored += max(0, len(resource_spans.resource.attributes) - words.ATTRIBUTES_MAX)
    out = Telemetry(instance=str(attributes.get(words.INSTANCE) or peer), facts=facts(attributes))
    steps: list[NDArray[np.int64]] = []
    snapshots: list[tuple[int, ...]] = []
    for scope_spans in resource_spans.scope_spans:
        scope = scope_spans.scope.name
        for span in scope_spans.spans:
            done = next(taken) if scope == words.STEP_SCOPE else None
            events = len(span.events) + (len(done.at) if done else 0)
            tally.spans_received += 1
            tally.events_received += events
            tally.events_dropped_by_sdk += span.dropped_events_count
            try:
                _check_span(scope, span, out.instance, admit_span)
                if done:
                    steps.append(_read_steps(span.events, done, snapshots, tally))
                elif scope == words.CORE_SCOPE:
                    out.core.append(_core_span(span, tally))
                elif scope == words.API_SCOPE:
                    out.api.append(_api_span(span, tally))
                elif scope == words.KV_SCOPE:
                    out.kv += kv_otlp.batches(span.events, out.instance, _event_values, tally)
                else:
                    out.requests.append(_request_span(span))
                    tally.events_skipped[Skip.FOREIGN_EVENT] += events
            except Rejected as rejected:
                tally.spans_skipped[rejected.reason] += 1
                tally.events_skipped[rejected.reason] += events
            else:
                tally.spans_accepted += 1
                out.traces += _trace(scope, span)
    if steps:
        out.steps = np.concatenate(steps).view(STEP_DTYPE)[:, 0]
    out.snapshots = np.array(snapshots, SNAPSHOT_DTYPE)
    return out


def _trace(scope: str, span: Span) -> list[tuple[int, bytes]]:
    """When it ended and its trace id, of a span that rows come from."""
    return [] if scope in (words.API_SCOPE, words.KV_SCOPE) else [(span.end_time_unix_nano, span.trace_id)]


def facts(attributes: Mapping[str, Value]) -> dict[str, str]:
    """Configuration facts of a resource: ``vllm.<knob>`` and the GPU's name, as strings of bounded length."""
    return {
        key: str(value)[: words.FACT_LENGTH_MAX]
        for key, value in attributes.items()
        if key.startswith(words.FACT_PREFIX) or key in words.FACT_KEYS
    }


def _check_span(scope: str, span: Span, instance: str, admit_span: AdmitSpan) -> None:
    if scope not in words.KNOWN_SCOPES:
        raise Rejected(Skip.FOREIGN_SCOPE)
    if not _is_expected(scope, span.name):
        raise Rejected(Skip.FOREIGN_SPAN)
    if len(span.attributes) > words.ATTRIBUTES_MAX:
        raise Rejected(Skip.TOO_MANY_ATTRIBUTES)
    if not words.UNIX_MIN <= span.end_time_unix_nano <= words.UNIX_MAX:
        raise Rejected(Skip.OUT_OF_RANGE)
    if len(span.span_id) != words.SPAN_ID_BYTES or len(span.parent_span_id) not in (0, words.SPAN_ID_BYTES):
        raise Rejected(Skip.OUT_OF_RANGE)  # ids are remembered: their length bounds the memory that takes
    if span.start_time_unix_nano > span.end_time_unix_nano:
        raise Rejected(Skip.TIME_ORDER)
    if reason := admit_span(instance, span.span_id, span.end_time_unix_nano):
        raise Rejected(reason)


def _is_expected(scope: str, name: str) -> bool:
    if scope == words.STEP_SCOPE:
        return name.startswith(words.STEP_SPAN_PREFIX)
    if scope == words.KV_SCOPE:
        return name.startswith(words.KV_SPAN_PREFIX)
    return name == (words.CORE_SPAN if scope == words.CORE_SCOPE else words.REQUEST_SPAN)


def _read_steps(
    events: Iterable[Span.Event], taken: Taken, snapshots: list[tuple[int, ...]], tally: Tally
) -> NDArray[np.int64]:
    summaries: list[tuple[float, ...]] = []
    at: list[int] = []
    for place, event in enumerate(events):
        try:
            if event.name == words.SUMMARY_EVENT:
                tally.summaries_plain += 1
                summaries.append(summary(event))
                at.append(place)
            elif event.name == words.SNAPSHOT_EVENT:
                fields = _fields(event, words.SNAPSHOT_FIELDS)
                snapshots.append(tuple(int(fields[name]) for name in SNAPSHOT_DTYPE.names or ()))
            else:
                raise Rejected(Skip.FOREIGN_EVENT)
        except Rejected as rejected:
            tally.events_skipped[rejected.reason] += 1
        else:
            tally.events_accepted += 1
    tally.events_accepted += len(taken.at)
    tally.summaries_columnar += len(taken.at)
    return _in_order(summaries, at, taken)


def _in_order(summaries: list[tuple[float, ...]], at: list[int], taken: Taken) -> NDArray[np.int64]:
    """Both kinds of rows as their events came; ``at`` counts the events that were left, ``taken.at`` all."""
    if not summaries:
        return taken.rows
    rows = np.array(summaries, STEP_DTYPE).view(np.int64).reshape(-1, _WORDS)
    if not len(taken.at):
        return rows
    left = np.setdiff1d(np.arange(len(taken.at) + at[-1] + 1), taken.at, assume_unique=True)[at]
    order = np.argsort(np.concatenate((taken.at, left)))
    return np.concatenate((taken.rows, rows))[order]


def summary(event: Span.Event) -> tuple[float, ...]:
    """One ``step.BATCH_SUMMARY`` as a row of STEP_DTYPE; raises Rejected with the reason it cannot be used."""
    fields = _fields(event, words.SUMMARY_FIELDS)
    fields["unix_ns"] = event.time_unix_nano
    if not words.UNIX_MIN <= event.time_unix_nano <= words.UNIX_MAX:
        raise Rejected(Skip.OUT_OF_RANGE)
    if fields["ts_end_ns"] < fields["ts_start_ns"]:
        raise Rejected(Skip.TIME_ORDER)
    if (
        fields["prefill_tokens"] + fields["decode_tokens"] != fields["scheduled_tokens"]
        or fields["kv_blocks_free"] > fields["kv_blocks_total"]
    ):
        raise Rejected(Skip.INCONSISTENT)
    return tuple(fields.get(name, MISSING) for name in STEP_FIELDS)


def _core_span(span: Span, tally: Tally) -> CoreSpan:
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
        values = _fields(event, words.JOURNEY_FIELDS)
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
    tally.events_skipped[Skip.FOREIGN_EVENT] += foreign
    tally.events_accepted += len(marks)
    return CoreSpan(
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        trace_id=span.trace_id,
        request=fingerprint(str(_values(span.attributes).get(words.REQUEST_ID, ""))),
        prompt_tokens=prompt_tokens,
        marks=tuple(marks),
        finish=finish,
        unix_minus_mono_ns=median_low(offsets_ns),
        end_unix_ns=span.end_time_unix_nano,
    )


def _finish(event: Span.Event) -> Finish:
    try:
        return Finish(str(_values(event.attributes).get(words.FINISH)))
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


def _api_span(span: Span, tally: Tally) -> ApiSpan:
    moments = dict.fromkeys(words.API_MOMENTS.values(), MISSING)
    foreign = 0
    for event in span.events:
        name = words.API_MOMENTS.get(event.name)
        if name is None:
            foreign += 1
            continue
        seconds = _values(event.attributes[: words.ATTRIBUTES_MAX]).get(words.API_TIME)
        if seconds is None:
            raise Rejected(Skip.MISSING_ATTRIBUTE)
        moments[name] = _nanoseconds(seconds)
    attributes = _values(span.attributes)
    out = ApiSpan(
        span_id=span.span_id,
        trace_id=span.trace_id,
        arrived_ns=moments["arrived_ns"],
        handoff_ns=moments["handoff_ns"],
        first_response_ns=moments["first_response_ns"],
        departed_ns=moments["departed_ns"],
        aborted=moments["aborted_ns"] != MISSING,
        prompt_tokens=_count(attributes, words.PROMPT_TOKENS, MISSING),
        samples=_count(attributes, words.SAMPLES, 1),
        model=str(attributes.get(words.MODEL, ""))[: words.FACT_LENGTH_MAX],
        end_unix_ns=span.end_time_unix_nano,
    )
    tally.events_skipped[Skip.FOREIGN_EVENT] += foreign
    tally.events_accepted += len(span.events) - foreign
    return out


def _request_span(span: Span) -> RequestSpan:
    attributes = _values(span.attributes)
    if "gen_ai.latency.e2e" not in attributes:
        raise Rejected(Skip.NOT_A_REQUEST)
    latencies = {name: _seconds(attributes.get(key)) for key, name in words.LATENCY_FIELDS.items()}
    return RequestSpan(
        span_id=span.span_id,
        trace_id=span.trace_id,
        parent_span_id=span.parent_span_id,
        arrival_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
        prompt_tokens=_count(attributes, words.PROMPT_TOKENS),
        output_tokens=_count(attributes, words.OUTPUT_TOKENS),
        model=str(attributes.get(words.MODEL, ""))[: words.FACT_LENGTH_MAX],
        **latencies,
    )


def _fields(event: Span.Event, table: Mapping[str, words.Field]) -> dict[str, float]:
    """Fields of one event by its table; raises Rejected on a wrong type, a bad value or a missing attribute."""
    if len(event.attributes) > words.ATTRIBUTES_MAX:
        raise Rejected(Skip.TOO_MANY_ATTRIBUTES)
    out: dict[str, float] = {}
    for attribute in event.attributes:
        field = table.get(attribute.key)
        if field is None:
            continue
        kind = attribute.value.WhichOneof("value")
        if kind != ("double_value" if field.double else "int_value"):
            raise Rejected(Skip.WRONG_TYPE)
        value = attribute.value.double_value if field.double else attribute.value.int_value
        if not math.isfinite(value):
            raise Rejected(Skip.NOT_FINITE)
        if not 0 <= value <= field.limit:
            raise Rejected(Skip.OUT_OF_RANGE)
        out[field.name] = value
    if any(field.required and field.name not in out for field in table.values()):
        raise Rejected(Skip.MISSING_ATTRIBUTE)
    return out


def _values(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    """Scalar attributes by key; arrays, maps, bytes and empty values are left out (OTLP allows them since 1.9)."""
    out: dict[str, Value] = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            out[attribute.key] = getattr(attribute.value, kind)
    return out


def _event_values(event: Span.Event) -> dict[str, Value]:
    return _values(event.attributes[: words.ATTRIBUTES_MAX])


def _count(attributes: Mapping[str, Value], key: str, default: int | None = None) -> int:
    value = attributes.get(key)
    if value is None:
        if default is None:
            raise Rejected(Skip.MISSING_ATTRIBUTE)
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise Rejected(Skip.WRONG_TYPE)
    if not 0 <= value <= words.COUNT_MAX:
        raise Rejected(Skip.OUT_OF_RANGE)
    return value


def _seconds(value: Value | None) -> float:
    """A latency in seconds; NaN when it was not sent."""
    if value is None:
        return math.nan
    if isinstance(value, bool | str):
        raise Rejected(Skip.WRONG_TYPE)
    if not math.isfinite(value):
        raise Rejected(Skip.NOT_FINITE)
    if not 0 <= value < words.TIME_MAX / 1e9:
        raise Rejected(Skip.OUT_OF_RANGE)
    return float(value)


def _nanoseconds(seconds: Value) -> int:
    return round(_seconds(seconds) * 1e9)
