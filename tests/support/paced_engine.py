"""An engine whose steps take as long as a test says, and the exports it would send."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.step_exports import put, scope_in, step_attributes

STEPS_PER_SPAN = 16


class PacedEngine:
    """Decodes one to eight requests per step; a step takes (4 ms + 2 ms per request) times ``factor``, within 2 %.

    With ``prefill_us`` every fourth step computes a prompt of 100 to 300 tokens besides, each of which takes so long.
    """

    def __init__(self, instance: str, start_unix_ns: int, seed: int = 1, **facts: str) -> None:
        self.instance = instance
        self.unix_ns = start_unix_ns
        self._offset_ns = start_unix_ns - 10**12 - seed * 10**9
        self._facts = facts
        self._step = 0
        self._random = np.random.default_rng(seed)

    def exports(self, steps: int, factor: float = 1.0, *, unit_ns: int = 1, prefill_us: float = 0.0) -> list[bytes]:
        """The next so many steps, one span each 16 of them; stamps are whole multiples of ``unit_ns``."""
        return [self._export(STEPS_PER_SPAN, factor, unit_ns, prefill_us) for _ in range(steps // STEPS_PER_SPAN)]

    def pause_until(self, unix_ns: int) -> None:
        """No step is scheduled before."""
        self.unix_ns = max(self.unix_ns, unix_ns)

    def _export(self, steps: int, factor: float, unit_ns: int, prefill_us: float) -> bytes:
        request = ExportTraceServiceRequest()
        scope = scope_in(request, {"service.instance.id": self.instance, **self._facts})
        span = scope.spans.add(name="scheduler_steps_1", start_time_unix_nano=self.unix_ns)
        for _ in range(steps):
            self._step += 1
            requests = int(self._random.integers(1, 9))
            prompt = int(self._random.integers(100, 301)) if prefill_us and self._step % 4 == 0 else 0
            start_ns = (self.unix_ns - self._offset_ns) // unit_ns * unit_ns
            changes = {
                "step.ts_start_ns": start_ns,
                "step.ts_end_ns": start_ns + 90_000 // unit_ns * unit_ns,
                "queue.running_depth": requests + bool(prompt),
                "batch.num_prefill_reqs": int(bool(prompt)),
                "batch.prefill_tokens": prompt,
                "batch.num_decode_reqs": requests,
                "batch.scheduled_tokens": requests + prompt,
                "batch.decode_tokens": requests,
                "batch.context_tokens": 200 * requests + self._step % 7,
                "batch.context_tokens_single": 200 * requests + self._step % 7,
            }
            event = span.events.add(name="step.BATCH_SUMMARY", time_unix_nano=start_ns + self._offset_ns)
            put(event, step_attributes(self._step, **changes))
            took_us = ((4000 + 2000 * requests) * factor + prefill_us * prompt) * self._random.normal(1.0, 0.02)
            self.unix_ns += int(took_us * 1000)
        span.end_time_unix_nano = self.unix_ns
        name = f"{self.instance}/{self._step}".encode()
        span.trace_id, span.span_id = name.rjust(16, b"-")[-16:], name.rjust(8, b"-")[-8:]
        return request.SerializeToString()


def in_turns(*exports: Iterable[bytes]) -> list[bytes]:
    """The first of each, then the second of each, and so on."""
    return [payload for together in zip(*exports, strict=True) for payload in together]
