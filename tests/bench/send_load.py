"""Send the load generator's stream to ``--target HOST:PORT`` and report what became of it.

Each worker is one engine on a connection of its own with one call in flight, as vLLM's exporter has, or several such
engines in turn. It retries as that exporter does: after the hint of RetryInfo, else after 1, 2, 4, … seconds, six times
in all. The first line says that the load begins, and how many steps have warmed the server up before; then comes the
report. Both are JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from dataclasses import dataclass, field

import grpc
import numpy as np
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from tests.support.otlp_load import ARRIVALS_PER_STEP, BETA_US, SPANS_PER_RPC, STEPS_PER_SPAN, Stream

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
RETRY_TRAILER = "google.rpc.retryinfo-bin"
RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
TRIES, DEADLINE_S = 6, 10.0
WARMED_S = 6.0
"""For the server to learn what it was warmed up with: exports gather for up to 5 s."""
LOOK_S = 0.25
"""Between the first line and the load: for whoever measures, to ask the server how far it is."""


@dataclass
class Outcome:
    """What one worker sent."""

    steps: int = 0
    dropped_steps: int = 0
    retries: int = 0
    latencies_ms: list[float] = field(default_factory=list)


class Worker(threading.Thread):
    """Engines that send in turn until their time or their calls are over."""

    def __init__(self, target: str, streams: list[Stream], warm: threading.Barrier, options: argparse.Namespace):
        super().__init__()
        self.outcome, self.warmed_steps = Outcome(), 0
        self._target, self._streams, self._warm, self._options = target, streams, warm, options

    def run(self) -> None:
        sizes = [("grpc.max_send_message_length", -1)]
        with contextlib.ExitStack() as stack:
            channels = [grpc.insecure_channel(self._target, options=sizes) for _ in self._streams]
            for channel in map(stack.enter_context, channels):
                grpc.channel_ready_future(channel).result(30)
            calls = [channel.unary_unary(METHOD) for channel in channels]
            number = 0
            while self.outcome.steps < self._options.warm_steps * len(calls):
                for call, stream in zip(calls, self._streams, strict=True):
                    self._send(call, stream.export(number))
                number += 1
            self.outcome, self.warmed_steps = Outcome(), self.outcome.steps
            self._warm.wait()  # all have done so
            self._warm.wait()  # and the load begins
            self._load(calls, number)

    def _load(self, calls, first: int) -> None:
        start_s, sent = time.monotonic(), 0
        pace = self._options.steps_per_sec / self._options.workers
        end_s = start_s + self._options.duration
        for number in range(first, first + self._options.max_rpcs):
            for call, stream in zip(calls, self._streams, strict=True):
                due_s = start_s + (sent / pace if pace else 0.0)
                if max(due_s, time.monotonic()) >= end_s:
                    return
                time.sleep(max(0.0, due_s - time.monotonic()))
                export = stream.export(number)
                self._send(call, export)
                sent += export.steps

    def _send(self, call, export) -> None:
        for attempt in range(TRIES):
            started_s = time.monotonic()
            try:
                answer = call(export.payload, timeout=DEADLINE_S)
            except grpc.RpcError as error:
                if error.code() not in RETRIED or attempt == TRIES - 1:
                    break
                self.outcome.retries += 1
                time.sleep(_wait_s(error, attempt))
                continue
            self.outcome.latencies_ms.append((time.monotonic() - started_s) * 1e3)
            if ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans:
                break
            self.outcome.steps += export.steps
            return
        self.outcome.dropped_steps += export.steps


def _wait_s(error: grpc.RpcError, attempt: int) -> float:
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_TRAILER:
            delay = RetryInfo.FromString(value).retry_delay
            return delay.seconds + delay.nanos / 1e9
    return 2.0**attempt


def report(workers: list[Worker], seconds: float) -> dict:
    """What all workers sent together."""
    outcomes = [worker.outcome for worker in workers]
    latencies_ms = np.array([ms for outcome in outcomes for ms in outcome.latencies_ms] or [float("nan")])
    steps = sum(outcome.steps for outcome in outcomes)
    return {
        "steps": steps,
        "seconds": seconds,
        "steps_per_sec": steps / seconds,
        "dropped_steps": sum(outcome.dropped_steps for outcome in outcomes),
        "retries": sum(outcome.retries for outcome in outcomes),
        "latency_ms": {
            "p50": float(np.percentile(latencies_ms, 50)),
            "p99": float(np.percentile(latencies_ms, 99)),
            "max": float(latencies_ms.max()),
        },
        "beta_us": BETA_US,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--steps-per-sec", type=float, default=0.0, help="over all workers; 0: as fast as it is taken")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds")
    parser.add_argument("--max-rpcs", type=int, default=sys.maxsize, help="calls of each engine")
    parser.add_argument("--warm-steps", type=int, default=0, help="steps of each engine before the load begins")
    parser.add_argument("--warmed-s", type=float, default=WARMED_S, help="seconds between those and the load")
    parser.add_argument("--workers", type=int, default=1, help="each with a call in flight")
    parser.add_argument("--engines-each", type=int, default=1, help="that a worker sends for in turn")
    parser.add_argument("--spans-per-rpc", type=int, default=SPANS_PER_RPC)
    parser.add_argument("--steps-per-span", type=int, default=STEPS_PER_SPAN)
    parser.add_argument("--pool-rpcs", type=int, default=20, help="calls of one lap")
    parser.add_argument("--lap-s", type=float, default=0.0, help="from lap to lap of an engine's clock, at least")
    parser.add_argument("--sample-rate", type=float, default=1.0)
    parser.add_argument("--model", default="", help="of all engines; without it each is a configuration of its own")
    parser.add_argument("--requests", action="store_true", help="journeys too")
    parser.add_argument("--arrivals-per-step", type=float, default=ARRIVALS_PER_STEP, help="requests, in the mean")
    options = parser.parse_args()
    streams = [
        Stream(
            1 + number, instance=f"load-{number}", spans_per_rpc=options.spans_per_rpc, pool_rpcs=options.pool_rpcs,
            sample_rate=options.sample_rate, requests=options.requests, steps_per_span=options.steps_per_span,
            model=options.model, arrivals_per_step=options.arrivals_per_step, lap_s=options.lap_s,
        )
        for number in range(options.workers * options.engines_each)
    ]  # fmt: skip
    warm = threading.Barrier(options.workers + 1)
    shares = [streams[number :: options.workers] for number in range(options.workers)]
    workers = [Worker(options.target, share, warm, options) for share in shares]
    for worker in workers:
        worker.start()
    warm.wait()
    steps = sum(worker.warmed_steps for worker in workers)
    time.sleep(options.warmed_s if steps else 0.0)
    sys.stdout.write(json.dumps({"warmed_steps": steps}) + "\n")
    sys.stdout.flush()
    time.sleep(LOOK_S)
    start_s = time.monotonic()
    warm.wait()
    for worker in workers:
        worker.join()
    json.dump(report(workers, time.monotonic() - start_s), sys.stdout)


if __name__ == "__main__":
    main()
