"""Parse each export of a recording, make a dict of every event, and nothing else: prints the CPU seconds of that.

python -m tests.bench.plain_reader RECORDING
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.recordings import messages


def read(payloads: list[bytes]) -> int:
    """Events read."""
    events = 0
    for payload in payloads:
        for resource in ExportTraceServiceRequest.FromString(payload).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    for event in span.events:
                        {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in event.attributes}
                    events += len(span.events)
    return events


if __name__ == "__main__":
    unfolded = list(messages(Path(sys.argv[1])))  # before the clock starts
    began_s = time.process_time()
    events = read(unfolded)
    print(time.process_time() - began_s, events)
