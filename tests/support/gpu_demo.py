"""Write ``tests/data/simulated/h100``, which ``tracefit demo --gpu`` plays: three minutes of Llama 3.1 8B on an H100.

The server is that of :mod:`tests.support.gpu_server`, on times composed of measured kernels. Its clients send again as
soon as they are answered, every nine seconds in another number and with other sizes. Attributes that a sidecar can do
without are left out.

    python -m tests.support.gpu_demo
"""

from __future__ import annotations

import gzip

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.gpu_server import serve, step_exports
from tests.support.otlp_bytes import varint
from tests.support.paths import DATA
from tests.support.vllm_scheduler import Traffic

MACHINE, SECONDS, PHASE_S = "llama8b-h100", 180, 9
PHASES = ((1, 300, 150), (16, 1500, 100), (48, 150, 400), (128, 300, 150), (4, 900, 200), (96, 500, 250), (8, 200, 100))
"""Clients, and their mean prompt and output tokens, in turns."""
LEFT_OUT = {"step.ts_output_ns", "batch.context_tokens"}


def record():
    """The exports, in order."""
    traffic = Traffic(1)
    for number in range(SECONDS // PHASE_S):
        begin_ns, end_ns = (at * PHASE_S * 10**9 for at in (number, number + 1))
        traffic.closed(begin_ns, end_ns, *PHASES[number % len(PHASES)], 0.5, 0.0)
    for payload in step_exports(MACHINE, serve(MACHINE, SECONDS, 1, traffic=traffic)):
        export = ExportTraceServiceRequest.FromString(payload)
        (span,) = export.resource_spans[0].scope_spans[0].spans
        for event in span.events:
            kept = [each for each in event.attributes if each.key not in LEFT_OUT]
            del event.attributes[:]
            event.attributes.extend(kept)
        yield export.SerializeToString()


if __name__ == "__main__":
    folder = DATA / "simulated" / "h100"
    folder.mkdir(parents=True, exist_ok=True)
    data = b"".join(varint(len(each)) + each for each in record())
    (folder / "otlp.pb.gz").write_bytes(gzip.compress(data, mtime=0))
