"""What is known of ARRIVED -> QUEUED beside the rows of idle arrivals.

Requests that meet a busy engine wait for the running step, which no coefficient may carry: they are in the plain mean
only. Where hardly a request finds the engine idle, ARRIVED -> HANDOFF stands in for the API's own work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import msgspec

from collector.decode import MISSING, ApiSpan, CoreSpan, MarkKind
from online import FeatureSnapshot, ModelSnapshot, TargetSnapshot
from online.state import saved

_IDLE_ROWS_MIN = 20
_HANDOFFS_MIN = 20
HANDOFFS_MAX = 512


@dataclass(slots=True)
class ApiQueueing:
    """Sums over all requests of one engine, and their latest hand-offs."""

    STATE = saved("api_queueing", fresh=lambda _: ApiQueueing())

    requests: int = 0
    wait_us: float = 0.0
    handoffs_us: deque[float] = field(default_factory=lambda: deque(maxlen=HANDOFFS_MAX))

    def add(self, span: CoreSpan, api: ApiSpan) -> None:
        """Count one request with its API span."""
        queued = span.marks[0]
        if api.arrived_ns == MISSING or queued.kind is not MarkKind.QUEUED or queued.ts_ns < api.arrived_ns:
            return
        self.requests += 1
        self.wait_us += (queued.ts_ns - api.arrived_ns) / 1e3
        if api.handoff_ns >= api.arrived_ns:
            self.handoffs_us.append((api.handoff_ns - api.arrived_ns) / 1e3)


def with_handoffs(target: TargetSnapshot | None, queueings: Iterable[ApiQueueing]) -> TargetSnapshot | None:
    """The target with the plain mean of all requests; with too few idle rows, the median hand-off in their place."""
    known = list(queueings)
    requests = sum(queueing.requests for queueing in known)
    handoffs_us = [value for queueing in known for value in queueing.handoffs_us]
    idle_rows = max((model.rows for model in target.models.values()), default=0) if target is not None else 0
    if idle_rows < _IDLE_ROWS_MIN and len(handoffs_us) >= _HANDOFFS_MIN:
        intercept = FeatureSnapshot(name="intercept", unit="us", coefficient=median(handoffs_us), status="weak")
        model = ModelSnapshot(features=[intercept], rows=len(handoffs_us), effective_rows=float(len(handoffs_us)))
        target = TargetSnapshot(vector="alpha", unit="us", champion="portable", models={"portable": model})
    if target is None or requests == 0:
        return target
    return msgspec.structs.replace(target, mean_us=sum(queueing.wait_us for queueing in known) / requests)
