"""Servers to measure, one per process: ``python -m tests.bench.servers KIND`` prints its port and runs until killed.

reference   generated servicer, a dict for every event, no learning: a receiver as people write it
intake      our receiver, envelope, admission and columnar decoding, no join and no learning
"""

from __future__ import annotations

import sys
import threading
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from prometheus_client import CollectorRegistry

from collector.config import GrpcConfig
from collector.config.schema import QueueConfig
from collector.decode.columnar import Decoder
from collector.join.dedupe import SpanWindow
from collector.receive.admission import AdmissionQueue
from collector.receive.intake import Intake
from collector.receive.otlp.otlp_grpc import OtlpGrpcReceiver
from collector.receive.otlp.way_in import WayIn
from collector.runtime.clock import SystemClock
from collector.runtime.health import Health
from collector.runtime.memory import tune_malloc
from collector.telemetry import Counts
from collector.telemetry.metrics import Metrics
from collector.telemetry.reasons import Transport


class _Reference(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, context):  # noqa: N802, ARG002 -- the generated name
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    for event in span.events:
                        {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in event.attributes}
        return ExportTraceServiceResponse()


def reference():
    server = grpc.server(futures.ThreadPoolExecutor(10), options=[("grpc.max_receive_message_length", 64 << 20)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Reference(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port, server


def intake():
    tune_malloc()
    config = QueueConfig()
    clock = SystemClock()
    queue = AdmissionQueue(clock, capacity_bytes=config.capacity_bytes, wait_s=config.wait_s, waiters_max=6)
    way_in = WayIn(Transport.GRPC, Intake(queue, Metrics(CollectorRegistry())), clock)
    receiver = OtlpGrpcReceiver(
        GrpcConfig(endpoint="127.0.0.1:0", max_recv_msg_size_mib=32),
        way_in,
        health=Health(clock),
        clock=clock,
        grace_s=0.0,
    )

    def work():
        decoder, counts, window = Decoder(), Counts(), SpanWindow(600 * 10**9, 100_000, 256)
        while True:
            batch = queue.take(config.batch_bytes, 1.0)
            if batch is not None:
                decoder.decode([(item.payload, item.peer) for item in batch.items], window.admit, counts)
                queue.done(batch.size_bytes)

    threading.Thread(target=work, daemon=True).start()
    receiver.start()
    return receiver.port, receiver


def main():
    port, server = {"reference": reference, "intake": intake}[sys.argv[1]]()
    sys.stdout.write(f"port {port}\n")
    sys.stdout.flush()
    threading.Event().wait()
    del server


if __name__ == "__main__":
    main()
