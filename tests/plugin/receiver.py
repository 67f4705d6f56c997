"""A live OTLP/gRPC receiver on a loopback port that reads what it gets."""

from __future__ import annotations

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.otlp_backend import Backend


class Receiver(Backend):
    """``metadata`` is that of all calls."""

    def __init__(self, port=0):
        self.metadata: list[dict[str, str]] = []

        super().__init__(lambda context: self.metadata.append(dict(context.invocation_metadata())), port)

    @property
    def requests(self):
        return [ExportTraceServiceRequest.FromString(payload) for payload in self.traces()]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def spans(self, scope=None):
        return [
            span
            for request in self.requests
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            if scope in (None, scope_spans.scope.name)
            for span in scope_spans.spans
        ]

    def steps(self):
        """Their numbers, in the order in which they came."""
        events = [event for span in self.spans() for event in span.events]
        return [attributes(event)["step.id"] for event in events if event.name == "step.BATCH_SUMMARY"]

    def resources(self):
        return [attributes(rs.resource) for request in self.requests for rs in request.resource_spans]


def attributes(message):
    """Attributes as a dict of Python values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in message.attributes}
