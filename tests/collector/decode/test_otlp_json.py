"""OTLP/JSON: the same export as in protobuf, or a ValueError."""

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.decode.wire import json_to_protobuf
from tests.support.step_exports import every_kind_of_value, otlp_json


def test_every_kind_of_value_survives_the_json():
    request = every_kind_of_value()
    for ints in (str, int):
        line = otlp_json(request, ints=ints)
        assert ExportTraceServiceRequest.FromString(json_to_protobuf(line)) == request


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"resourceSpans": {}}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"endTimeUnixNano": "soon"}]}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"endTimeUnixNano": "-1"}]}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"kind": 99999999999}]}]}]}',
        b'{"resourceSpans": [{"resource": {"attributes": [{"value": {"intValue": "9223372036854775808"}}]}}]}',
        b'{"resourceSpans": [{"resource": {"attributes": [{"value": {"doubleValue": 1%b}}]}}]}' % (b"0" * 400),
        b'{"a":' * 100_000,
        b'{"resourceSpans": [{"resource": {"attributes": [{"value":' + b'{"arrayValue":{"values":[' * 5000,
    ],
)
def test_a_line_that_is_no_otlp_json_is_a_value_error(line):
    with pytest.raises(ValueError, match="not OTLP/JSON"):
        json_to_protobuf(line)


def test_keys_of_a_newer_protocol_are_ignored_and_enums_may_be_names():
    named = b'{"newer": {}, "kind": "SPAN_KIND_SERVER", "status": {"code": "STATUS_CODE_OK"}}'
    line = b'{"resourceSpans": [{"new": 1, "scopeSpans": [{"spans": [' + named + b']}]}], "newest": []}'
    (resource,) = ExportTraceServiceRequest.FromString(json_to_protobuf(line)).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert (span.kind, span.status.code) == (2, 1)
