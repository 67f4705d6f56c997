"""Spans to columns and records: the engine core's journeys, the API server's moments, stock vLLM's latencies, steps.

Summaries of steps come by column (columnar.py). What its templates do not fit is read here, event by event, with the
reason where an event cannot be used: on recordings of real servers, that is no summary at all.

Bad input is a value, not an exception: whatever is not understood is skipped with a reason from
:class:`~collector.telemetry.Skip` and counted, and received = accepted + Σ skipped, for spans and for events, always.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median_low
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from collector.telemetry import Counts, PluginLoss, Skip, table

from . import vocabulary as words
from .kv import read_span_events
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
    Telemetry,
    fingerprint,
)
from .vocabulary import (
    Rejected,
    Value,
    event_scalars,
    nanoseconds,
    read_count,
    read_fields,
    read_seconds,
    scalar,
    scalars,
)


class _CoreMoment(NamedTuple):
    """One event of a journey; ``finish`` of FINISHED alone."""

    mark: Mark
    prompt_tokens: int
    unix_ns: int
    finish: Finish | None


def _core_moments(span: Span) -> list[_CoreMoment]:
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
        finish = _finish_of(scalar(event.attributes, words.FINISH)) if kind is MarkKind.FINISHED else None
        out.append(_CoreMoment(mark, int(values["prompt_tokens"]), event.time_unix_nano, finish))
    return out


def core_span(span: Span, counts: Counts, may_be: Callable[[int], bool]) -> CoreSpan:
    """A request of the engine core; raises Rejected with the reason it cannot be used.

    ``may_be``: whether something may have happened at a time of the wall clock.
    """
    moments = _core_moments(span)
    if not moments:
        raise Rejected(Skip.NOT_A_REQUEST)
    marks = tuple([moment.mark for moment in moments])
    _check_order(marks)
    unix_minus_mono_ns = median_low([moment.unix_ns - moment.mark.ts_ns for moment in moments])
    if not may_be(marks[-1].ts_ns + unix_minus_mono_ns):
        raise Rejected(Skip.OUT_OF_RANGE)
    _count_events(len(span.events), len(moments), counts)
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


def _finish_of(said: Value | None) -> Finish:
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


def _api_moments(span: Span) -> list[tuple[str, int]]:
    """Field of ApiSpan and time of each event, foreign ones left out; raises Rejected where one cannot be used."""
    out = []
    for event in span.events:
        field = words.API_MOMENTS.get(event.name)
        if field is None:
            continue
        seconds = scalar(event.attributes, words.API_TIME)
        if seconds is None:
            raise Rejected(Skip.MISSING_ATTRIBUTE)
        out.append((field, nanoseconds(seconds)))
    return out


def api_span(span: Span, counts: Counts) -> ApiSpan:
    """A request of the instrumented API server; raises Rejected with the reason it cannot be used."""
    said = _api_moments(span)
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
    _count_events(len(span.events), len(said), counts)
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


AdmitSpan = Callable[[str, bytes, int], Skip | None]
"""(instance, span id, end unix ns) -> a reason to leave the span out, or None; see collector.join.spans."""


class Taken(NamedTuple):
    """Summaries of a step span that another decoder took out of it: their places among its events, and their rows.

    A row is STEP_DTYPE as 8-byte words: numpy joins those ten times faster than records.
    """

    at: NDArray[np.intp]
    rows: NDArray[np.int64]


_WORDS = len(STEP_FIELDS)
_UNIX_AT = STEP_FIELDS.index("unix_ns")
NOTHING_TAKEN = itertools.repeat(Taken(np.empty(0, np.intp), np.empty((0, _WORDS), np.int64)))


def latest_unix_ns(arrived_unix_ns: int) -> int:
    """Until when what came in then may have happened; 0: nobody knows when it came in."""
    return min(arrived_unix_ns + words.AHEAD_MAX_NS, words.UNIX_MAX) if arrived_unix_ns else words.UNIX_MAX


def decode(payload: bytes, peer: str, admit_span: AdmitSpan, counts: Counts) -> list[Telemetry]:
    """Decode one ExportTraceServiceRequest into one Telemetry per resource.

    ``peer`` names the emitter where the resource has no ``service.instance.id`` (SDK 1.26 sends none).
    Raises ``google.protobuf.message.DecodeError`` on undecodable bytes: admission has parsed them once already.
    """
    return read(ExportTraceServiceRequest.FromString(payload), peer, admit_span, counts, NOTHING_TAKEN)


def read(
    request: ExportTraceServiceRequest,
    peer: str,
    admit_span: AdmitSpan,
    counts: Counts,
    taken: Iterator[Taken],
    arrived_unix_ns: int = 0,
) -> list[Telemetry]:
    """As decode, of a parsed request; ``taken``: for each step span, in order, the summaries that are gone from it.

    ``arrived_unix_ns``: when it came in, 0 if nobody knows. Times far ahead of it are out of range.
    """
    return [_read_resource(spans, peer, admit_span, counts, taken, arrived_unix_ns) for spans in request.resource_spans]


def _read_resource(
    resource_spans: ResourceSpans,
    peer: str,
    admit_span: AdmitSpan,
    counts: Counts,
    taken: Iterator[Taken],
    arrived_unix_ns: int,
) -> Telemetry:
    attributes = scalars(resource_spans.resource.attributes[: words.ATTRIBUTES_MAX])
    counts[table.IGNORED_ATTRIBUTES] += max(0, len(resource_spans.resource.attributes) - words.ATTRIBUTES_MAX)
    out = Telemetry(
        instance=str(attributes.get(words.INSTANCE) or peer),
        facts=facts(attributes),
        process=_pid_of(attributes),
        host=str(attributes.get(words.HOST, ""))[: words.FACT_LENGTH_MAX],
        peer=peer,
        arrived_unix_ns=arrived_unix_ns,
    )
    latest = _Latest(latest_unix_ns(arrived_unix_ns))
    steps: list[NDArray[np.int64]] = []
    snapshots: list[tuple[int, ...]] = []
    spans_seen = events_seen = accepted = 0
    for scope_spans in resource_spans.scope_spans:
        scope = scope_spans.scope.name
        spans_seen += len(scope_spans.spans)
        if scope not in words.KNOWN_SCOPES:
            events_seen += _skip_scope(scope_spans, counts)
            continue
        for span in scope_spans.spans:
            columns = next(taken) if scope == words.STEP_SCOPE else None
            events = len(span.events) + (len(columns.at) if columns else 0)
            events_seen += events
            lost = None if columns is None else plugin_losses(span)
            if lost is None and (dropped := span.dropped_events_count):
                counts[table.SDK_DROPPED_EVENTS] += dropped
            try:
                _check_span(scope, span, out.instance, admit_span, latest)
                if columns:
                    out.plugin_losses += [] if lost is None else [(span.end_time_unix_nano, lost)]
                    steps.append(_without_too_new(_read_steps(span.events, columns, snapshots, counts), latest, counts))
                elif scope == words.KV_SCOPE:
                    timely = [event for event in span.events if latest.allows(event.time_unix_nano)]
                    counts[table.SKIPPED_EVENTS, Skip.OUT_OF_RANGE] += events - len(timely)
                    out.kv += read_span_events(timely, out.instance, event_scalars, counts)
                else:
                    _add_request_span(out, scope, span, counts, latest)
            except Rejected as rejected:
                counts[table.SKIPPED_SPANS, rejected.reason] += 1
                counts[table.SKIPPED_EVENTS, rejected.reason] += events
            else:
                accepted += 1
    counts[table.DECODED_SPANS] += spans_seen
    counts[table.DECODED_EVENTS] += events_seen
    counts[table.DECODED_SPANS_OK] += accepted
    out.too_new_unix_ns = latest.refused_unix_ns
    _set_columns(out, steps, snapshots)
    return out


def _skip_scope(scope_spans: ScopeSpans, counts: Counts) -> int:
    """Count the spans of a scope that nobody reads; returns how many events they have."""
    spans = scope_spans.spans
    events = sum([len(span.events) for span in spans])
    counts[table.SKIPPED_SPANS, Skip.FOREIGN_SCOPE] += len(spans)
    counts[table.SKIPPED_EVENTS, Skip.FOREIGN_SCOPE] += events
    counts[table.SDK_DROPPED_EVENTS] += sum([span.dropped_events_count for span in spans])
    return events


class _Latest:
    """The newest time that is taken, and the newest that was not; 0: all were."""

    def __init__(self, unix_ns: int) -> None:
        self.unix_ns = unix_ns
        self.refused_unix_ns = 0

    def allows(self, unix_ns: int) -> bool:
        """Whether something may have happened then."""
        if unix_ns <= self.unix_ns:
            return True
        self.refused_unix_ns = max(self.refused_unix_ns, unix_ns)
        return False


def _without_too_new(rows: NDArray[np.int64], latest: _Latest, counts: Counts) -> NDArray[np.int64]:
    """Summaries of a span without those that lie ahead, although their span does not."""
    unix_ns = rows[:, _UNIX_AT]
    if not len(rows) or latest.allows(int(unix_ns.max())):
        return rows
    timely = rows[unix_ns <= latest.unix_ns]
    counts[table.DECODED_EVENTS_OK] -= len(rows) - len(timely)
    counts[table.SKIPPED_EVENTS, Skip.OUT_OF_RANGE] += len(rows) - len(timely)
    return timely


def _set_columns(out: Telemetry, steps: list[NDArray[np.int64]], snapshots: list[tuple[int, ...]]) -> None:
    if steps:  # of one span, as the plugin sends it
        out.steps = (steps[0] if len(steps) == 1 else np.concatenate(steps)).view(STEP_DTYPE)[:, 0]
    if snapshots:
        out.snapshots = np.array(snapshots, SNAPSHOT_DTYPE)


def _add_request_span(out: Telemetry, scope: str, span: Span, counts: Counts, latest: _Latest) -> None:
    if scope == words.CORE_SCOPE:
        out.core.append(core_span(span, counts, latest.allows))
    elif scope == words.API_SCOPE:
        out.api.append(api_span(span, counts))
    else:
        out.requests.append(request_span(span))
        counts[table.SKIPPED_EVENTS, Skip.FOREIGN_EVENT] += len(span.events)


def plugin_losses(span: Span) -> dict[PluginLoss, int] | None:
    """What the producer plugin had lost when it made this step span; None: it is not the plugin's."""
    prefix, said = words.PLUGIN_PREFIX, {}
    for attribute in itertools.islice(span.attributes, words.ATTRIBUTES_MAX):
        if (key := attribute.key).startswith(prefix):
            said[key[len(prefix) :]] = attribute.value.int_value
    if not said:
        return None
    return {loss: min(max(said.get(loss, 0), 0), words.COUNT_MAX) for loss in PluginLoss}


def _pid_of(attributes: Mapping[str, Value]) -> int:
    pid = attributes.get(words.PROCESS)
    return pid if isinstance(pid, int) and 0 < pid <= words.COUNT_MAX else 0


def facts(attributes: Mapping[str, Value]) -> dict[str, str]:
    """Configuration facts of a resource: ``vllm.<knob>`` and the GPU's name, as strings of bounded length."""
    return {
        key: str(value)[: words.FACT_LENGTH_MAX]
        for key, value in attributes.items()
        if key.startswith(words.FACT_PREFIX) or key in words.FACT_KEYS
    }


def _check_span(scope: str, span: Span, instance: str, admit_span: AdmitSpan, latest: _Latest) -> None:
    if not _is_expected(scope, span.name):
        raise Rejected(Skip.FOREIGN_SPAN)
    if len(span.attributes) > words.ATTRIBUTES_MAX:
        raise Rejected(Skip.TOO_MANY_ATTRIBUTES)
    end_unix_ns = span.end_time_unix_nano
    if end_unix_ns < words.UNIX_MIN or not latest.allows(end_unix_ns):
        raise Rejected(Skip.OUT_OF_RANGE)
    span_id = span.span_id
    if len(span_id) != words.SPAN_ID_BYTES or len(span.parent_span_id) not in (0, words.SPAN_ID_BYTES):
        raise Rejected(Skip.OUT_OF_RANGE)  # ids are remembered: their length bounds the memory that takes
    if span.start_time_unix_nano > end_unix_ns:
        raise Rejected(Skip.TIME_ORDER)
    if reason := admit_span(instance, span_id, end_unix_ns):
        raise Rejected(reason)


def _is_expected(scope: str, name: str) -> bool:
    if scope == words.STEP_SCOPE:
        return name.startswith(words.STEP_SPAN_PREFIX)
    if scope == words.KV_SCOPE:
        return name.startswith(words.KV_SPAN_PREFIX)
    return name == (words.CORE_SPAN if scope == words.CORE_SCOPE else words.REQUEST_SPAN)


def _read_steps(
    events: Iterable[Span.Event], taken: Taken, snapshots: list[tuple[int, ...]], counts: Counts
) -> NDArray[np.int64]:
    summaries: list[tuple[float, ...]] = []
    at: list[int] = []
    summaries_seen = accepted = 0
    for place, event in enumerate(events):
        try:
            if event.name == words.SUMMARY_EVENT:
                summaries_seen += 1
                summaries.append(summary(event))
                at.append(place)
            elif event.name == words.SNAPSHOT_EVENT:
                fields = read_fields(event, words.SNAPSHOT_FIELDS)
                snapshots.append(tuple([int(fields[name]) for name in SNAPSHOT_DTYPE.names or ()]))
            else:
                raise Rejected(Skip.FOREIGN_EVENT)
        except Rejected as rejected:
            counts[table.SKIPPED_EVENTS, rejected.reason] += 1
        else:
            accepted += 1
    counts[table.DECODED_EVENTS_OK] += accepted + len(taken.at)
    counts[table.DECODED_SUMMARIES, "plain"] += summaries_seen
    counts[table.DECODED_SUMMARIES, "columnar"] += len(taken.at)
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
    fields = read_fields(event, words.SUMMARY_FIELDS)
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
