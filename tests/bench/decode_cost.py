"""What decoding costs in CPU time per step summary: in columns, plainly, and as people write it."""

from __future__ import annotations

import random
import statistics
import time

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.decode import plain
from collector.decode.columnar import Decoder
from collector.telemetry import Counts, table
from tests.support import otlp_bytes as otlp

STEPS_PER_SPAN = 100
REPEATS = 9
REPEAT_S = 0.15


def dict_per_event(payload):
    """The reference: full parse, a dict for every event."""
    out = []
    for resource in ExportTraceServiceRequest.FromString(payload).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                out += map(_as_dict, span.events)
    return out


def _as_dict(event):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in event.attributes}


def payload(steps, seed=0):
    """An export of so many summaries, 100 to a span, values as wide as a busy server's."""
    rng = random.Random(seed)
    spans = []
    for first in range(0, steps, STEPS_PER_SPAN):
        events = [
            otlp.summary(
                3_000_000 + step,
                prefill=rng.choice((0, 0, 0, rng.randrange(2048))),
                decode=rng.randrange(4, 200),
                **{"step.duration_us": rng.randrange(20, 2000), "kv.blocks_total_gpu": 40_000},
            )
            for step in range(first, min(first + STEPS_PER_SPAN, steps))
        ]
        spans.append(otlp.step_span(events, span_id=rng.randbytes(8)))
    return otlp.export(("vllm.scheduler.step", spans))


def cost_us(run, steps):
    """Median CPU microseconds per step."""
    costs = []
    run()
    for _ in range(REPEATS):
        start_s, rounds = time.process_time(), 0
        while time.process_time() - start_s < REPEAT_S:
            run()
            rounds += 1
        costs.append((time.process_time() - start_s) / (rounds * steps) * 1e6)
    return statistics.median(costs)


def measure(steps):
    """Cost by decoder for calls of so many steps; the columnar one must not have asked the plain one."""
    data = payload(steps)
    decoder, counts = Decoder(), Counts()
    out = {
        "columnar": cost_us(lambda: decoder.decode([(data, "peer")], _admit_all, counts), steps),
        "plain": cost_us(lambda: plain.decode(data, "peer", _admit_all, Counts()), steps),
        "dict": cost_us(lambda: dict_per_event(data), steps),
    }
    if counts[table.DECODED_SUMMARIES, "plain"]:
        raise AssertionError("the columnar decoder fell back")
    return out


def _admit_all(_instance, _span_id, _end_unix_ns):
    return None
