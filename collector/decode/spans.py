"""Spans to columns and records: the engine core's journeys, the API server's events, requests' latencies, steps.

The scope names spans of the instrumented vLLM and of the plugin. Any other span is a finished request if it has the
attributes of one, as vLLM, SGLang and TensorRT-LLM send them: ``gen_ai.latency.e2e``, ``time_to_first_token`` and the
tokens of prompt and answer, in either spelling. A span with some of them is counted by the attribute that it lacks.

Bad input is a value, not an exception: whatever is not understood is skipped with a reason from
:class:`~collector.telemetry.Skip` and counted, and received = accepted + Σ skipped, for spans and for events, always.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

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
    StepColumns,
    Telemetry,
)
from .vocabulary import MISSING, RejectedError, SpanEventKind, Value, read_count, read_seconds
from .wire import Export, ReadExport

_FINISHES: Final = {finish.value: finish for finish in Finish}
_AT_ONCE: Final = 1024
"""Events that become columns together, which bounds what they hold of Python's; no request has as many."""


def read_columns(
    events: Sequence[Any], fields: Mapping[str, words.Field], dtype: np.dtype[np.void]
) -> tuple[NDArray[np.void], NDArray[np.object_]]:
    """Read events by a table into one row each; also return the outcome of each, accepted or a reason."""
    attributes = [event.attributes for event in events]
    # to ask such a map for what it has not puts that into it
    sent = [each[key].int_value if key in each else MISSING for each in attributes for key in fields]
    numbers = np.array(sent, np.int64).reshape(-1, len(fields))
    names, limits, least = zip(*fields.values(), strict=True)
    fates = np.full(len(events), table.ACCEPTED, object)
    unfit = (numbers < np.array(least)) | (numbers > np.array(limits))
    if unfit.any():
        fates[unfit.any(axis=1)] = Skip.OUT_OF_RANGE
        fates[(unfit & (numbers == MISSING)).any(axis=1)] = Skip.MISSING_ATTRIBUTE
    rows = np.zeros(len(events), dtype)
    for name, column in zip(names, numbers.T, strict=True):
        rows[name] = column
    return rows, fates


def core_span(span: Any, counts: Counts, telemetry: Telemetry) -> CoreSpan:
    """A request of the engine core, unknown events left out; raises RejectedError with the reason it cannot be used."""
    events = [event for event in span.events if event.name in words.EVENT_KINDS]
    if not events:
        raise RejectedError(Skip.UNKNOWN_SCOPE)
    if len(events) > _AT_ONCE:
        raise RejectedError(Skip.OUT_OF_RANGE)
    numbers = [_read_event(event.attributes) for event in events]
    journey = [SpanEvent(words.EVENT_KINDS[event.name], *row[:3]) for event, row in zip(events, numbers, strict=True)]
    _check_order(journey)
    last = events[-1]
    _check_time(telemetry, last.time_unix_nano)
    finish = None
    if journey[-1].kind is SpanEventKind.FINISHED:
        finish = _FINISHES.get(last.attributes[words.FINISH].string_value, Finish.ERROR)
    _count_events(len(span.events), len(journey), counts)
    return CoreSpan(
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        prompt_tokens=numbers[-1][3],
        events=tuple(journey),
        finish=finish,
        unix_minus_mono_ns=last.time_unix_nano - journey[-1].ts_ns,
        end_unix_ns=last.time_unix_nano,
    )


def _read_event(attributes: Any) -> list[int]:
    """The numbers of one journey event, in the order of their table; RejectedError where one is out of bounds."""
    numbers = []
    for key, field in words.JOURNEY_FIELDS.items():
        number = attributes[key].int_value if key in attributes else MISSING
        if not field.least <= number <= field.limit:
            raise RejectedError(Skip.MISSING_ATTRIBUTE if number == MISSING else Skip.OUT_OF_RANGE)
        numbers.append(number)
    return numbers


def _count_events(events: int, understood: int, counts: Counts) -> None:
    counts[table.DECODED_EVENTS, table.ACCEPTED] += understood
    if events > understood:
        counts[table.DECODED_EVENTS, Skip.UNKNOWN_SCOPE] += events - understood


def _check_order(events: Sequence[SpanEvent]) -> None:
    """Emission order is time order; steps never go back; nothing follows FINISHED; tokens never shrink."""
    for before, after in itertools.pairwise(events):
        if (
            after.ts_ns < before.ts_ns
            or before.kind is SpanEventKind.FINISHED
            or after.kind is SpanEventKind.QUEUED
            or after.step_id < before.step_id
            or after.output_tokens < before.output_tokens
            or after.kind is before.kind
        ):
            raise RejectedError(Skip.INVALID)


_NO_API_TIMES: Final = dict.fromkeys(words.API_EVENTS.values(), MISSING)


def api_span(span: Any, counts: Counts) -> ApiSpan:
    """A request of the instrumented API server, other events left out; raises RejectedError with the reason."""
    times, understood = dict(_NO_API_TIMES), 0
    for event in span.events:
        if event.name in words.API_EVENTS:
            at_s = read_seconds(event.attributes[words.API_TIME].double_value)
            times[words.API_EVENTS[event.name]] = round(1e9 * at_s)
            understood += 1
    attributes = words.scalars(span.attributes, (words.SAMPLES, words.MODEL))
    out = ApiSpan(
        span_id=span.span_id,
        aborted=times.pop("aborted_ns") != MISSING,
        **times,
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


def request_span(span: Any, attributes: Mapping[str, Value]) -> RequestSpan:
    """A finished request out of its attributes; raises RejectedError with the reason it cannot be used."""
    values: dict[str, Any] = {}
    for key in words.TOKEN_FIELDS.keys() & attributes.keys():
        counted = read_count(attributes[key])
        if values.setdefault(words.TOKEN_FIELDS[key], counted) != counted:
            raise RejectedError(Skip.INVALID)  # the two spellings contradict each other
    values |= {name: read_seconds(attributes[key]) for key, name in words.LATENCY_FIELDS.items() if key in attributes}
    for name, lacks in _LACKS.items():
        if name not in values:
            raise RejectedError(lacks)
    e2e_s, lasted_s = values.pop("e2e_s"), (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    first_token_s = values["first_token_s"]
    decode_s = values.setdefault("decode_s", e2e_s - first_token_s)
    if (
        values.get("cached_tokens", 0) > values["prompt_tokens"]
        or decode_s < 0.0
        or (values["output_tokens"] > 1 and decode_s == 0.0)
        or first_token_s + decode_s > lasted_s + words.SPAN_SLACK_S
    ):
        raise RejectedError(Skip.INVALID)
    return RequestSpan(
        span_id=span.span_id,
        trace_id=span.trace_id,
        arrival_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
        model=next((str(attributes[key]) for key in words.MODELS if key in attributes), "")[: words.FACT_LENGTH_MAX],
        **values,
    )


AcceptSpan = Callable[[str, bytes, int], Skip | None]
"""(instance, span id, end unix ns) -> a reason to leave the span out, or None; see collector.join.spans."""


def latest_unix_ns(arrived_unix_ns: int) -> int:
    """Latest time that events of an export may bear, by its arrival; 0: its arrival is unknown."""
    return min(arrived_unix_ns + words.AHEAD_MAX_NS, words.UNIX_MAX) if arrived_unix_ns else words.UNIX_MAX


def decode_exports(exports: Sequence[Export], accept_span: AcceptSpan, counts: Counts) -> list[Telemetry]:
    """Telemetry of each resource of each export, in order; unusable spans and events are counted.

    Equal resources of an export are one, as a Collector sends them. Times far ahead of its arrival are out of range.
    """
    decoded: list[Telemetry] = []
    reader = _SpanReader(accept_span, counts)
    for export in exports:
        try:
            request = ReadExport.FromString(export.payload)
        except DecodeError:  # admission has parsed the envelope only
            counts[table.DECODED_SPANS, Skip.UNDECODABLE] += export.spans
            continue
        known: dict[tuple[object, ...], Telemetry] = {}
        for resource in request.resource_spans:
            told = _resource(resource.resource.attributes, export)
            telemetry = known.setdefault((told.instance, told.host, *told.facts.items()), told)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    reader.read(telemetry, scope.scope.name, span)
        decoded += known.values()
    for columns in reader.columns.values():
        columns.hand_out()
    return decoded


class _SpanReader:
    """Reads spans into telemetry, and counts each of them and its events."""

    def __init__(self, accept_span: AcceptSpan, counts: Counts) -> None:
        self._accept_span, self._counts = accept_span, counts
        self.columns = {
            words.SUMMARY_EVENT: _EventColumns("steps", _summaries, counts),
            words.SNAPSHOT_EVENT: _EventColumns("snapshots", _snapshots, counts),
        }

    def read(self, telemetry: Telemetry, scope: str, span: Any) -> None:
        """Read one span, or count why it cannot be used."""
        counts = self._counts
        counts[table.SDK_DROPPED_EVENTS,] += span.dropped_events_count
        try:
            if scope == words.STEP_SCOPE:
                self._check(telemetry, span)
                for event in span.events:
                    columns = self.columns.get(event.name)
                    if columns is None:
                        counts[table.DECODED_EVENTS, Skip.UNKNOWN_SCOPE] += 1
                        continue
                    columns.waiting.append((event, telemetry))
                    if len(columns.waiting) == _AT_ONCE:
                        columns.convert()
            elif scope == words.CORE_SCOPE:
                self._check(telemetry, span)
                telemetry.core.append(core_span(span, counts, telemetry))
            elif (scope, span.name) == (words.API_SCOPE, words.API_SPAN):
                self._check(telemetry, span)
                telemetry.api.append(api_span(span, counts))
            else:
                attributes = words.scalars(span.attributes, words.REQUEST_ATTRIBUTES)
                if attributes.keys() <= words.MODELS.keys():
                    raise RejectedError(Skip.UNKNOWN_SCOPE)
                self._check(telemetry, span)
                telemetry.requests.append(request_span(span, attributes))
                _count_events(len(span.events), 0, counts)
        except RejectedError as rejected:
            counts[table.DECODED_SPANS, rejected.reason] += 1
            counts[table.DECODED_EVENTS, rejected.reason] += len(span.events)
        else:
            counts[table.DECODED_SPANS, table.ACCEPTED] += 1

    def _check(self, telemetry: Telemetry, span: Any) -> None:
        """Raises RejectedError with the reason if a span cannot be used; each span is accepted once."""
        if (
            len(span.span_id) != words.SPAN_ID_BYTES
            or len(span.parent_span_id) not in (0, words.SPAN_ID_BYTES)
            or len(span.trace_id) not in (0, words.TRACE_ID_BYTES)
            or len(telemetry.instance) > words.NAME_LENGTH_MAX
        ):
            raise RejectedError(Skip.OUT_OF_RANGE)  # all are remembered: their length bounds the memory that takes
        end_unix_ns = span.end_time_unix_nano
        _check_time(telemetry, end_unix_ns)
        if span.start_time_unix_nano > end_unix_ns:
            raise RejectedError(Skip.INVALID)
        if reason := self._accept_span(telemetry.instance, span.span_id, end_unix_ns):
            raise RejectedError(reason)


ReadEvents = Callable[[Sequence[Any], Sequence[Telemetry]], tuple[NDArray[np.void], NDArray[np.object_]]]
"""Events and whose they are, to one row each and the outcome of each."""


class _EventColumns:
    """Events of one kind become rows of a column of telemetry, together for all resources.

    A call of numpy costs more than its work for one event.

    Attributes:
        waiting: events that are no rows yet, each with whose it is.
    """

    def __init__(self, column: str, read: ReadEvents, counts: Counts) -> None:
        self._column, self._read, self._counts = column, read, counts
        self.waiting: list[tuple[Any, Telemetry]] = []
        self._rows: list[NDArray[np.void]] = []
        self._owners: list[Telemetry] = []

    def hand_out(self) -> None:
        """Give all telemetry its rows, in the order of its events."""
        if self.waiting:
            self.convert()
        if not self._rows:
            return
        rows, places = np.concatenate(self._rows), defaultdict(list)
        for place, owner in enumerate(self._owners):
            places[id(owner)].append(place)
        for own in places.values():
            setattr(self._owners[own[0]], self._column, rows[own])

    def convert(self) -> None:
        """Make rows of the events that wait, and count what became of each."""
        events, owners = zip(*self.waiting, strict=True)
        rows, fates = self._read(events, owners)
        for fate, count in Counter(fates.tolist()).items():
            self._counts[table.DECODED_EVENTS, fate] += count
        accepted = fates == table.ACCEPTED
        self._rows.append(rows[accepted])
        self._owners += itertools.compress(owners, accepted)
        self.waiting.clear()


def _snapshots(events: Sequence[Any], _: object) -> tuple[NDArray[np.void], NDArray[np.object_]]:
    return read_columns(events, words.SNAPSHOT_FIELDS, SNAPSHOT_DTYPE)


def _summaries(events: Sequence[Any], owners: Sequence[Telemetry]) -> tuple[StepColumns, NDArray[np.object_]]:
    """Read steps, and the outcome of each; a step ahead of the arrival is out of range even if its span is not."""
    steps, fates = read_columns(events, words.SUMMARY_FIELDS, STEP_DTYPE)
    steps["unix_ns"] = np.array([event.time_unix_nano for event in events], np.uint64)  # from 2^63 on below 0
    attributes = [event.attributes for event in events]
    steps["kv_usage_ratio"] = [
        each[words.KV_USAGE].double_value if words.KV_USAGE in each else math.nan for each in attributes
    ]
    unix_ns, usage = steps["unix_ns"], steps["kv_usage_ratio"]
    latest_unix_ns = np.array([owner.latest_unix_ns for owner in owners])
    within = (unix_ns >= words.UNIX_MIN) & (unix_ns <= latest_unix_ns) & (usage >= 0.0) & (usage <= 1.0)
    agreeing = steps["prefill_tokens"] + steps["decode_tokens"] == steps["scheduled_tokens"]
    agreeing &= steps["ts_end_ns"] >= steps["ts_start_ns"]
    agreeing &= steps["kv_blocks_free"] <= steps["kv_blocks_total"]
    sound = fates == table.ACCEPTED
    fates[sound & ~agreeing] = Skip.INVALID
    fates[sound & ~within] = Skip.OUT_OF_RANGE
    fates[sound & np.isnan(usage)] = Skip.MISSING_ATTRIBUTE
    return steps, fates


def _check_time(telemetry: Telemetry, unix_ns: int) -> None:
    """Raises RejectedError where a time is out of range; the newest one ahead is remembered."""
    if not words.UNIX_MIN <= unix_ns <= telemetry.latest_unix_ns:
        if unix_ns > telemetry.latest_unix_ns:
            telemetry.too_new_unix_ns = max(telemetry.too_new_unix_ns, unix_ns)
        raise RejectedError(Skip.OUT_OF_RANGE)


def _resource(attributes: Any, export: Export) -> Telemetry:
    """Empty telemetry of a resource, with its facts as strings of bounded length.

    The role of a server is in the name of its service, unless a fact names it.
    """
    named = sorted([key for key in attributes if key.startswith(words.FACT_PREFIX)])[: words.FACTS_MAX]
    values = words.scalars(attributes, (words.INSTANCE, words.POD, words.SERVICE, words.HOST, words.GPU_NAME, *named))
    _, _, role = str(values.get(words.SERVICE, "")).rpartition("-")
    facts = {words.FACT_PREFIX + "role": role} if role in words.ROLES else {}
    facts |= {key: str(values[key])[: words.FACT_LENGTH_MAX] for key in (words.GPU_NAME, *named) if key in values}
    return Telemetry(
        instance=words.instance_of(values, export.peer),
        facts=facts,
        host=str(values.get(words.HOST, ""))[: words.FACT_LENGTH_MAX],
        peer=export.peer,
        recording=export.recording,
        arrived_unix_ns=export.arrived_unix_ns,
        latest_unix_ns=latest_unix_ns(export.arrived_unix_ns),
    )
