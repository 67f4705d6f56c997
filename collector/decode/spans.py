"""Spans to columns and records: the engine core's journeys, the API server's moments, requests' latencies, steps.

Spans of the instrumented vLLM and of the plugin are told by their scopes. Of any other scope and name, a span is that
of a request if it has its attributes: ``gen_ai.latency.e2e`` and ``time_to_first_token`` and the tokens of prompt and
answer, in either spelling, as vLLM, SGLang and TensorRT-LLM send them. One that has some of them and lacks another is
counted by what it lacks.

Bad input is a value, not an exception: whatever is not understood is skipped with a reason from
:class:`~collector.telemetry.Skip` and counted, and received = accepted + Σ skipped, for spans and for events, always.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from collector.telemetry import Counts, Skip, table

from . import vocabulary as words
from .records import (
    SNAPSHOT_DTYPE,
    STEP_DTYPE,
    ApiSpan,
    CoreSpan,
    Finish,
    RequestSpan,
    SpanEvent,
    Telemetry,
)
from .vocabulary import (
    MISSING,
    Rejected,
    SpanEventKind,
    Value,
    nanoseconds,
    read_count,
    read_fields,
    read_seconds,
    scalars,
)
from .wire import Export

_FINISHES: Final = {finish.value: finish for finish in Finish}


def core_span(span: Span, counts: Counts, check_time: Callable[[int], None]) -> CoreSpan:
    """A request of the engine core; raises Rejected with the reason it cannot be used.

    Foreign events are left out. ``check_time`` raises it of a time of the wall clock at which nothing can have ended.
    """
    marks: list[SpanEvent] = []
    unix_minus_mono_ns, prompt_tokens, finish = 0, 0, None
    for event in span.events:
        kind = words.MARK_KINDS.get(event.name)
        if kind is None:
            continue
        values = read_fields(event, words.JOURNEY_FIELDS)
        if not words.UNIX_MIN <= event.time_unix_nano <= words.UNIX_MAX:
            raise Rejected(Skip.OUT_OF_RANGE)
        marks.append(SpanEvent(kind, int(values["step_id"]), int(values["ts_ns"]), int(values["output_tokens"])))
        unix_minus_mono_ns = event.time_unix_nano - marks[-1].ts_ns
        prompt_tokens = int(values["prompt_tokens"])
        if kind is SpanEventKind.FINISHED:
            said = scalars(event.attributes, {words.FINISH})
            finish = _FINISHES.get(str(said.get(words.FINISH)), Finish.ERROR)
    if not marks:
        raise Rejected(Skip.UNKNOWN_SCOPE)
    _check_order(marks)
    end_unix_ns = marks[-1].ts_ns + unix_minus_mono_ns
    check_time(end_unix_ns)
    _count_events(len(span.events), len(marks), counts)
    return CoreSpan(
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        prompt_tokens=prompt_tokens,
        marks=tuple(marks),
        finish=finish,  # nothing follows FINISHED
        unix_minus_mono_ns=unix_minus_mono_ns,
        end_unix_ns=end_unix_ns,
    )


def _count_events(events: int, understood: int, counts: Counts) -> None:
    counts[table.DECODED_EVENTS, table.ACCEPTED] += understood
    if events > understood:
        counts[table.DECODED_EVENTS, Skip.UNKNOWN_SCOPE] += events - understood


def _check_order(marks: Sequence[SpanEvent]) -> None:
    """Emission order is time order; steps never go back; nothing follows FINISHED; tokens never shrink."""
    for before, after in itertools.pairwise(marks):
        if (
            after.ts_ns < before.ts_ns
            or before.kind is SpanEventKind.FINISHED
            or after.kind is SpanEventKind.QUEUED
            or after.step_id < before.step_id
            or after.output_tokens < before.output_tokens
            or after.kind is before.kind
        ):
            raise Rejected(Skip.INVALID)


_NO_MOMENTS: Final = dict.fromkeys(words.API_MOMENTS.values(), MISSING)
_API_FACTS: Final = frozenset({words.SAMPLES, words.MODEL})


def api_span(span: Span, counts: Counts) -> ApiSpan:
    """A request of the instrumented API server, other events left out; raises Rejected with the reason against it."""
    moments, understood = dict(_NO_MOMENTS), 0
    for event in span.events:
        if event.name in words.API_MOMENTS:
            said = scalars(event.attributes, {words.API_TIME})
            if not said:
                raise Rejected(Skip.MISSING_ATTRIBUTE)
            moments[words.API_MOMENTS[event.name]] = nanoseconds(said[words.API_TIME])
            understood += 1
    attributes = scalars(span.attributes, _API_FACTS)
    out = ApiSpan(
        span_id=span.span_id,
        aborted=moments.pop("aborted_ns") != MISSING,
        **moments,
        samples=read_count(attributes.get(words.SAMPLES, 1)),
        model=str(attributes.get(words.MODEL, ""))[: words.FACT_LENGTH_MAX],
        end_unix_ns=span.end_time_unix_nano,
    )
    _count_events(len(span.events), understood, counts)
    return out


_LACKS: Final = {
    "e2e_s": Skip.LACKS_E2E,
    "first_token_s": Skip.LACKS_FIRST_TOKEN,
    "prompt_tokens": Skip.LACKS_INPUT_TOKENS,
    "output_tokens": Skip.LACKS_OUTPUT_TOKENS,
}


def request_attributes(span: Span) -> dict[str, Value]:
    """What a span says of a finished request; empty where it tells nothing of one."""
    said = scalars(span.attributes, words.REQUEST_ATTRIBUTES)
    return {} if said.keys() <= words.MODELS.keys() else said


def request_span(span: Span, said: Mapping[str, Value]) -> RequestSpan:
    """A finished request out of its attributes; raises Rejected with the reason it cannot be used."""
    told: dict[str, Any] = {}
    for key in words.TOKEN_FIELDS.keys() & said.keys():
        counted = read_count(said[key])
        if told.setdefault(words.TOKEN_FIELDS[key], counted) != counted:
            raise Rejected(Skip.INVALID)  # the two spellings say two things
    told |= {name: read_seconds(said[key]) for key, name in words.LATENCY_FIELDS.items() if key in said}
    for name, lacks in _LACKS.items():
        if name not in told:
            raise Rejected(lacks)
    e2e_s, lasted_s = told.pop("e2e_s"), (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    first_token_s = told["first_token_s"]
    decode_s = told.setdefault("decode_s", e2e_s - first_token_s)
    if (
        told.get("cached_tokens", 0) > told["prompt_tokens"]
        or decode_s < 0.0
        or (told["output_tokens"] > 1 and decode_s == 0.0)
        or first_token_s + decode_s > lasted_s + words.SPAN_SLACK_S
    ):
        raise Rejected(Skip.INVALID)
    return RequestSpan(
        span_id=span.span_id,
        trace_id=span.trace_id,
        arrival_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
        model=next((str(said[key]) for key in words.MODELS if key in said), "")[: words.FACT_LENGTH_MAX],
        **told,
    )


AdmitSpan = Callable[[str, bytes, int], Skip | None]
"""(instance, span id, end unix ns) -> a reason to leave the span out, or None; see collector.join.spans."""


_STEP: Final = itemgetter(*(STEP_DTYPE.names or ()))
_SNAPSHOT: Final = itemgetter(*(SNAPSHOT_DTYPE.names or ()))
"""The fields of an event as a row of the columns."""


def latest_unix_ns(arrived_unix_ns: int) -> int:
    """Until when what came in then may have happened; 0: nobody knows when it came in."""
    return min(arrived_unix_ns + words.AHEAD_MAX_NS, words.UNIX_MAX) if arrived_unix_ns else words.UNIX_MAX


def decode_exports(exports: Sequence[Export], admit_span: AdmitSpan, counts: Counts) -> list[Telemetry]:
    """One Telemetry per resource of each export, in order; what cannot be used is counted.

    Times far ahead of an export's arrival are out of range.
    """
    out: list[Telemetry] = []
    for export in exports:
        try:
            request = ExportTraceServiceRequest.FromString(export.payload)
        except DecodeError:  # admission has parsed the envelope only
            counts[table.DECODED_SPANS, Skip.UNDECODABLE] += export.spans
        else:
            out += [_Resource(spans, export, admit_span, counts).read(spans) for spans in request.resource_spans]
    return out


class _Resource:
    """What one resource of an export says."""

    def __init__(self, spans: ResourceSpans, export: Export, admit_span: AdmitSpan, counts: Counts) -> None:
        attributes = scalars(spans.resource.attributes)
        self._out = Telemetry(
            instance=words.instance_of(attributes, export.peer),
            facts=facts(attributes),
            host=str(attributes.get(words.HOST, ""))[: words.FACT_LENGTH_MAX],
            peer=export.peer,
            recording=export.recording,
            arrived_unix_ns=export.arrived_unix_ns,
        )
        self._admit_span, self._counts = admit_span, counts
        self._latest_unix_ns = latest_unix_ns(export.arrived_unix_ns)
        self._steps: list[tuple[float, ...]] = []
        self._snapshots: list[tuple[float, ...]] = []

    def read(self, spans: ResourceSpans) -> Telemetry:
        """All that can be used of it."""
        for scope_spans in spans.scope_spans:
            for span in scope_spans.spans:
                self._add(scope_spans.scope.name, span)
        if self._steps:
            self._out.steps = np.array(self._steps, STEP_DTYPE)
        if self._snapshots:
            self._out.snapshots = np.array(self._snapshots, SNAPSHOT_DTYPE)
        return self._out

    def _add(self, scope: str, span: Span) -> None:
        """Add a span, and count it and its events."""
        events, counts = len(span.events), self._counts
        counts[table.SDK_DROPPED_EVENTS,] += span.dropped_events_count
        try:
            if scope == words.STEP_SCOPE:
                self._check(span, span.name.startswith(words.STEP_SPAN_PREFIX))
                self._add_steps(span)
            elif scope == words.CORE_SCOPE:
                self._check(span, span.name == words.CORE_SPAN)
                self._out.core.append(core_span(span, counts, self._check_time))
            elif scope == words.API_SCOPE:
                self._check(span, span.name == words.API_SPAN)
                self._out.api.append(api_span(span, counts))
            elif said := request_attributes(span):
                self._check(span)
                self._out.requests.append(request_span(span, said))
                counts[table.DECODED_EVENTS, Skip.UNKNOWN_SCOPE] += events
            else:
                raise Rejected(Skip.UNKNOWN_SCOPE)
        except Rejected as rejected:
            counts[table.DECODED_SPANS, rejected.reason] += 1
            counts[table.DECODED_EVENTS, rejected.reason] += events
        else:
            counts[table.DECODED_SPANS, table.ACCEPTED] += 1

    def _check(self, span: Span, is_expected: bool = True) -> None:
        """Raises Rejected with the reason that a span cannot be used, whatever it says; it is admitted once."""
        if not is_expected:
            raise Rejected(Skip.UNKNOWN_SCOPE)
        if len(span.attributes) > words.ATTRIBUTES_MAX:
            raise Rejected(Skip.INVALID)
        if (
            len(span.span_id) != words.SPAN_ID_BYTES
            or len(span.parent_span_id) not in (0, words.SPAN_ID_BYTES)
            or len(span.trace_id) not in (0, words.TRACE_ID_BYTES)
            or len(self._out.instance) > words.NAME_LENGTH_MAX
        ):
            raise Rejected(Skip.OUT_OF_RANGE)  # all are remembered: their length bounds the memory that takes
        end_unix_ns = span.end_time_unix_nano
        self._check_time(end_unix_ns)
        if span.start_time_unix_nano > end_unix_ns:
            raise Rejected(Skip.INVALID)
        if reason := self._admit_span(self._out.instance, span.span_id, end_unix_ns):
            raise Rejected(reason)

    def _check_time(self, unix_ns: int) -> None:
        """Raises Rejected of a time at which nothing can have ended; the newest one ahead is remembered."""
        if not words.UNIX_MIN <= unix_ns <= self._latest_unix_ns:
            if unix_ns > self._latest_unix_ns:
                self._out.too_new_unix_ns = max(self._out.too_new_unix_ns, unix_ns)
            raise Rejected(Skip.OUT_OF_RANGE)

    def _add_steps(self, span: Span) -> None:
        """Add summaries and snapshots; a summary that lies ahead although its span does not is left out."""
        counts = self._counts
        for event in span.events:
            try:
                if event.name == words.SUMMARY_EVENT:
                    self._steps.append(_STEP(self._summary(event)))
                elif event.name == words.SNAPSHOT_EVENT:
                    self._snapshots.append(_SNAPSHOT(read_fields(event, words.SNAPSHOT_FIELDS)))
                else:
                    raise Rejected(Skip.UNKNOWN_SCOPE)
            except Rejected as rejected:
                counts[table.DECODED_EVENTS, rejected.reason] += 1
            else:
                counts[table.DECODED_EVENTS, table.ACCEPTED] += 1

    def _summary(self, event: Span.Event) -> dict[str, float]:
        """Fields of one ``step.BATCH_SUMMARY``; raises Rejected with the reason it cannot be used."""
        fields = read_fields(event, words.SUMMARY_FIELDS, words.OPTIONAL)
        fields["unix_ns"] = event.time_unix_nano
        self._check_time(event.time_unix_nano)
        if (
            fields["ts_end_ns"] < fields["ts_start_ns"]
            or fields["prefill_tokens"] + fields["decode_tokens"] != fields["scheduled_tokens"]
            or fields["kv_blocks_free"] > fields["kv_blocks_total"]
        ):
            raise Rejected(Skip.INVALID)
        return fields


def facts(attributes: Mapping[str, Value]) -> dict[str, str]:
    """Configuration facts of a resource: ``vllm.<knob>`` and the GPU's name, as strings of bounded length.

    The role of a server is in the name of its service, unless it is told.
    """
    _, _, role = str(attributes.get(words.SERVICE, "")).rpartition("-")
    told = {words.FACT_PREFIX + "role": role} if role in words.ROLES else {}
    return told | {
        key: str(value)[: words.FACT_LENGTH_MAX]
        for key, value in attributes.items()
        if key.startswith(words.FACT_PREFIX) or key in words.FACT_KEYS
    }
