"""A live OTLP/gRPC receiver on a loopback port, and helpers to read what it got."""

from __future__ import annotations

import threading
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class Receiver:
    """Records requests; ``behave(call_number, context)`` may abort or wait before one is taken."""

    def __init__(self, behave=None, port=0):
        self.requests: list[ExportTraceServiceRequest] = []
        self.refused = 0
        self.metadata: list[dict[str, str]] = []
        self._behave = behave
        self._arrived = threading.Condition()
        self._calls = 0
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        self._server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def _export(self, request, context):
        self._calls += 1
        if self._behave is not None:
            try:
                self._behave(self._calls, context)
            except Exception:
                self.refused += 1
                raise
        with self._arrived:
            self.metadata.append(dict(context.invocation_metadata()))
            self.requests.append(ExportTraceServiceRequest.FromString(request))
            self._arrived.notify_all()
        return b""

    @property
    def target(self):
        return f"127.0.0.1:{self.port}"

    def wait(self, enough, timeout_s=100.0):
        """Wait until ``enough(self)`` holds; fails with what there is otherwise."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: enough(self), timeout_s), (
                f"{len(self.requests)} requests, {len(self.events())} events"
            )

    def spans(self, scope=None):
        return [
            span
            for request in list(self.requests)
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            if scope in (None, scope_spans.scope.name)
            for span in scope_spans.spans
        ]

    def events(self, name=None, scope=None):
        return [event for span in self.spans(scope) for event in span.events if name in (None, event.name)]

    def resources(self):
        return [attributes(rs.resource) for request in self.requests for rs in request.resource_spans]

    def close(self):
        self._server.stop(0).wait()


def attributes(message):
    """Attributes as a dict of Python values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in message.attributes}
