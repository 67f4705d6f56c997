"""What the way in costs, in CPU time and as ratios, so that a busy machine does not decide the outcome."""

from __future__ import annotations

import time

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.receive.count import count_spans
from tests.support.step_exports import make_export

STEPS = 1000
ROUNDS = 15


def cpu_us_per_step(work, payload):
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.process_time()
        work(payload)
        best_s = min(best_s, time.process_time() - start_s)
    return best_s / STEPS * 1e6


def test_the_envelope_costs_a_third_of_a_full_parse_at_most(record_property):
    payload = make_export(spans=STEPS // 100, steps_per_span=100).SerializeToString()
    envelope_us = cpu_us_per_step(count_spans, payload)
    parse_us = cpu_us_per_step(ExportTraceServiceRequest.FromString, payload)
    record_property("envelope_us_per_step", envelope_us)
    print(f"envelope {envelope_us:.3f} us, full parse {parse_us:.3f} us per step")
    assert envelope_us < parse_us / 3
