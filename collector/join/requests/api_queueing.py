"""What is known of ARRIVED -> QUEUED beside the rows of idle arrivals.

Requests that meet a busy engine wait for the running step, which no coefficient may carry: they are in the plain mean
only. Where hardly a request finds the engine idle, ARRIVED -> HANDOFF stands in for the API's own work; where there
are only a page's sums, the plain mean less the mean wait for the running step; of an un-forked server, what
the steps leave of the time to the first token (first_tokens.py).
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

from .first_tokens import FIRST_TOKENS_MAX, FirstTokens, explained, told

_IDLE_ROWS_MIN = 20
_HANDOFFS_MIN = 20
_COUNTED_MIN = 20
HANDOFFS_MAX = 512


@dataclass(slots=True)
class ApiQueueing:
    """Sums over all requests of one engine, and their latest hand-offs."""

    STATE = saved("api_queueing", fresh=lambda _: ApiQueueing())

    requests: int = 0
    wait_us: float = 0.0
    handoffs_us: deque[float] = field(default_factory=lambda: deque(maxlen=HANDOFFS_MAX))
    watched_s: float = 0.0
    """Of pages: the time in which ``step_waits_us_s`` was summed."""
    step_waits_us_s: float = 0.0
    """What a request that came at any of these moments would have waited for the running step."""
    first_tokens: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=FIRST_TOKENS_MAX))
    """Time to the first token, own pace and prompt tokens of requests that met nobody who waited for one, us."""
    told_waits_us: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST_TOKENS_MAX))
    """Of those whose spans tell queue and prefill: the time to the first token less these two."""

    def add(self, span: CoreSpan, api: ApiSpan) -> None:
        """Count one request with its API span."""
        queued = span.marks[0]
        if api.arrived_ns == MISSING or queued.kind is not MarkKind.QUEUED or queued.ts_ns < api.arrived_ns:
            return
        self.requests += 1
        self.wait_us += (queued.ts_ns - api.arrived_ns) / 1e3
        if api.handoff_ns >= api.arrived_ns:
            self.handoffs_us.append((api.handoff_ns - api.arrived_ns) / 1e3)

    def add_counted(self, requests: float, wait_us: float) -> None:
        """Count requests whose wait is known as a sum."""
        self.requests += round(requests)
        self.wait_us += wait_us

    def explained_first_tokens(self) -> FirstTokens | None:
        """What the steps leave of the time to the first token, and how far ahead they were scheduled."""
        return explained(self.first_tokens, 0.0)

    def watch(self, seconds: float, step_wait_us: float) -> None:
        """Add a time in which a request would have waited so long for the running step."""
        self.watched_s += seconds
        self.step_waits_us_s += seconds * step_wait_us


def with_stand_ins(
    target: TargetSnapshot | None, queueings: Iterable[ApiQueueing], step: TargetSnapshot | None = None
) -> TargetSnapshot | None:
    """The target with the plain mean of all requests; with too few idle rows, what stands in their place.

    Args:
        target: learned from the rows of idle arrivals.
        queueings: what the configuration's emitters counted.
        step: what the same configuration publishes of its steps.
    """
    known = list(queueings)
    requests = sum(queueing.requests for queueing in known)
    handoffs_us = [value for queueing in known for value in queueing.handoffs_us]
    idle_rows = max((model.rows for model in target.models.values()), default=0) if target is not None else 0
    mean_us = sum(queueing.wait_us for queueing in known) / requests if requests else 0.0
    watched_s = sum(queueing.watched_s for queueing in known)
    if idle_rows < _IDLE_ROWS_MIN and len(handoffs_us) >= _HANDOFFS_MIN:
        target = _only_intercept(median(handoffs_us), len(handoffs_us))
    elif target is None and requests >= _COUNTED_MIN and watched_s > 0.0:
        step_wait_us = sum(queueing.step_waits_us_s for queueing in known) / watched_s
        target = _only_intercept(max(mean_us - step_wait_us, 0.0), requests)
    elif idle_rows < _IDLE_ROWS_MIN:
        target = _of_first_tokens(known, step) or target
    if target is None or requests == 0:
        return target
    return msgspec.structs.replace(target, mean_us=mean_us)


def _of_first_tokens(queueings: list[ApiQueueing], step: TargetSnapshot | None) -> TargetSnapshot | None:
    """With the step scheduled ahead: a simulator that knows of none is right in the mean."""
    waits_us = [each for queueing in queueings for each in queueing.told_waits_us]
    waits = [each for queueing in queueings for each in queueing.first_tokens]
    found, rows = told(waits_us), len(waits_us)
    if found is None:
        found, rows = explained(waits, _prefill_us_per_token(step)), len(waits)
    if found is None:
        return None
    target = _only_intercept(found.api_us + found.step_ahead_us, rows, found.stderr_us)
    return msgspec.structs.replace(target, step_ahead_us=found.step_ahead_us) if found.scheduled_ahead else target


def _prefill_us_per_token(step: TargetSnapshot | None) -> float:
    model = step.models.get("portable") if step is not None else None
    features = model.features if model is not None else []
    return sum(feature.coefficient for feature in features if feature.name == "prefill_tokens")


def _only_intercept(intercept_us: float, rows: int, stderr: float | None = None) -> TargetSnapshot:
    intercept = FeatureSnapshot(name="intercept", unit="us", coefficient=intercept_us, stderr=stderr, status="weak")
    model = ModelSnapshot(features=[intercept], rows=rows, effective_rows=float(rows))
    return TargetSnapshot(vector="alpha", unit="us", champion="portable", models={"portable": model})
