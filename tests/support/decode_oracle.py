"""Two decoders side by side: everything they say must be the same."""

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.decode.columnar import decode_exports
from collector.decode.envelope import Export
from collector.decode.spans import read_spans
from collector.join.spans import SpanWindow
from collector.telemetry import Counts, table
from collector.telemetry.metrics import metric_of
from collector.telemetry.reasons import Skip
from tests.support.pipelines import total_of

SPANS_EACH = 3
"""Spans that are said to be in each export."""


def decode_plainly(payloads):
    counts, window, out = Counts(), SpanWindow(64), []
    for payload, peer in payloads:
        export = Export(payload, peer, "grpc", SPANS_EACH)
        try:
            request = ExportTraceServiceRequest.FromString(payload)
        except DecodeError:
            counts[table.DECODED_SPANS, Skip.UNDECODABLE] += SPANS_EACH
        else:
            out += read_spans(request, export, window.admit, counts)
    return out, counts, len(window)


def decode_in_columns(payloads):
    counts, window = Counts(), SpanWindow(64)
    exports = [Export(payload, peer, "grpc", SPANS_EACH) for payload, peer in payloads]
    return decode_exports(exports, window.admit, counts), counts, len(window)


def comparable(telemetry):
    """NaN-safe and exact: rows as bytes, records by their text. Steps are known by their ids, so in any order."""
    out = msgspec.structs.asdict(telemetry)
    out["steps"] = telemetry.steps.dtype, sorted(step.tobytes() for step in telemetry.steps)
    out["snapshots"] = telemetry.snapshots.dtype, telemetry.snapshots.shape, telemetry.snapshots.tobytes()
    return {name: repr(value) for name, value in out.items()}


def assert_same(payloads):
    """Both decoders agree on content, counts and the spans remembered; returns the columnar counts."""
    expected, plain_counts, plain_spans = decode_plainly(payloads)
    got, counts, spans = decode_in_columns(payloads)
    assert [*map(comparable, got)] == [*map(comparable, expected)]
    assert whoever_read(counts) == whoever_read(plain_counts)
    assert spans == plain_spans
    return counts


def whoever_read(counts):
    """The counts without zeros, and without who read a summary: all of them, whichever decoder it was."""
    assert counts.by_label(table.DECODED_SPANS).keys() | counts.by_label(table.DECODED_EVENTS).keys() <= {
        *Skip,
        table.ACCEPTED,
    }
    out = {row: count for row, count in counts.items() if metric_of(row) is not table.DECODED_SUMMARIES and count}
    return out, total_of(counts, table.DECODED_SUMMARIES)
