"""What is known of ARRIVED -> QUEUED beside the rows of idle arrivals, and of a step that the engine schedules ahead.

Requests that meet a busy engine wait for the running step, which no coefficient may carry: they are in the plain mean
only. Where hardly a request finds the engine idle, the median of ARRIVED -> HANDOFF stands in for the API's own work.

Of an un-forked server, w is what passes from arrival to first token without queue and prefill. Its lower end is the
API's own time, for the rest of a running step is uniform between 0 and s:

    api = w10 - 0.1 s, s = (w50 - w10) / 0.4          se = 0.354 s / sqrt(n)

(variances of sample quantiles: Kendall and Stuart, The Advanced Theory of Statistics 1, 10.10). Of m requests that
ended between two pages w is the mean, which is nearer to half a step. So (1 - 1 / sqrt m) / 2 of a step is taken off,
at the pace of their tokens.

Prefill tells how many steps pass until the first token:

    steps = (prefill - b P - e) / d

P are prompt tokens at their price b in ``step_time``; e is what the experts cost that only a step with a prompt
touches; d is a step of the batch that the request met, by ``step_time``, or of its own pace where nobody tells the
batch, as on a page. Prompts that may take several steps are left out.

Where the longest third of prompts takes more than 1.5 steps in the median, the engine schedules a step ahead
(asynchronous): most of their time is told by their tokens. Where the shortest third or the longest is off by three
quarters of a step even so, as with sparse attention or speculative decoding, coefficients of means lack what prompts
cost, and nothing is usable.

Spans may tell the time to the first token alone. It takes the place of prefill, and has half a running step and api as
well: more than 2.5 steps show one scheduled ahead, and the median of the rest is api.

Times are in microseconds. Fewer than 20 requests tell nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from collector.decode import MISSING, ApiSpan, CoreSpan, SpanEventKind
from online import (
    FeatureSnapshot,
    Floats,
    ModelSnapshot,
    Reason,
    TargetSnapshot,
    median_of,
)

ARRIVALS_MAX = 2048
"""Requests of each process that are remembered."""
_REQUESTS_MIN = 20
_AHEAD, _OFF = 1.5, 0.75
"""Steps until the first token that show one scheduled ahead; how far off they may be even so."""
_STEPS_UNTOLD = 1.5
"""Of a request that tells its first token alone: half a running step, and its own."""
_SPREAD_TO_SE = 1.57
"""From the mean absolute deviation to the standard error of a median, times the root of n, of a normal distribution."""
_PRICE_OF_A_PROMPT = (
    "short or long prompts take a step more or less than the coefficients say, as with sparse attention or speculative "
    "decoding, and only telemetry of single steps tells why"
)
TOKEN_BUDGET = 2048.0
"""Of a step where nobody told ``max_num_batched_tokens``: longer prompts may take several."""
HANDOFFS_MAX = 512

Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e200)]


class BusyArrival(NamedTuple):
    """A request that met others, none of whom waited for a first token; or several that ended together, their means.

    ``wait_us``: its time to the first token, less queue and prefill where those are told; ``pace_us``: of its own
    tokens; ``in_flight``: those it met and itself, per engine; 0 where they were not counted. ``prefill_us``: from when
    it was scheduled to its first token; 0 where nobody told, or its prompt may have taken several steps.
    ``context_tokens``: of those that it met, together.
    """

    wait_us: Annotated[float, msgspec.Meta(ge=-1e200, le=1e200)]
    pace_us: Amount
    prompt_tokens: Amount
    in_flight: Amount = 0.0
    prefill_us: Amount = 0.0
    requests: Annotated[float, msgspec.Meta(ge=1.0, le=1e100)] = 1.0
    is_known: bool = False
    """Queue and prefill are."""
    context_tokens: Amount = 0.0


Arrivals = NDArray[np.void]
"""Of ``_ARRIVAL_DTYPE``: requests by the names of BusyArrival."""
_ARRIVAL_DTYPE = np.dtype([(name, "?" if name == "is_known" else "f8") for name in BusyArrival._fields])


class ApiQueueing(msgspec.Struct):
    """Sums over all requests of one emitter, and the latest of them, the newest last; a checkpoint keeps it as it is.

    ``arrivals`` met a busy engine.
    """

    requests: Amount = 0.0
    wait_us: Amount = 0.0
    handoffs_us: list[Amount] = []
    arrivals: list[BusyArrival] = []

    def add(self, span: CoreSpan, api: ApiSpan) -> None:
        """Count one request with its API span."""
        queued = span.events[0]
        if api.arrived_ns == MISSING or queued.kind is not SpanEventKind.QUEUED or queued.ts_ns < api.arrived_ns:
            return
        self.requests += 1.0
        self.wait_us += (queued.ts_ns - api.arrived_ns) / 1e3
        if api.handoff_ns >= api.arrived_ns:
            self.handoffs_us.append((api.handoff_ns - api.arrived_ns) / 1e3)
            del self.handoffs_us[:-HANDOFFS_MAX]

    def add_arrivals(self, arrivals: Iterable[BusyArrival]) -> None:
        """Take requests that met a busy engine."""
        self.arrivals.extend(arrivals)
        del self.arrivals[:-ARRIVALS_MAX]

    def take_arrivals(self) -> list[BusyArrival]:
        """For the engine that they met; they are not held any more."""
        taken, self.arrivals = self.arrivals, []
        return taken


def with_fallbacks(
    target: TargetSnapshot | None,
    queueings: Iterable[ApiQueueing],
    step: TargetSnapshot | None = None,
    *,
    hits_hidden: bool = False,
) -> TargetSnapshot | None:
    """The target with the plain mean of all requests; with too few idle rows, what stands in their place.

    Args:
        target: learned from the rows of idle arrivals.
        queueings: what the configuration's emitters remember.
        step: what the same configuration publishes of its steps.
        hits_hidden: prompts may have been in the prefix cache, and nobody tells.
    """
    emitters = list(queueings)
    arrivals = np.array([each for queueing in emitters for each in queueing.arrivals], _ARRIVAL_DTYPE)
    handoffs_us = [each for queueing in emitters for each in queueing.handoffs_us]
    told, untold = arrivals[arrivals["is_known"]], arrivals[~arrivals["is_known"]]
    costs = _StepCosts.of(step, hits_hidden=hits_hidden)
    waited_us, steps_us = costs.waited(told["prefill_us"], told)
    ends = _ends(waited_us / steps_us)
    ahead = ends is not None and ends[1] > _AHEAD
    idle_rows = max((model.rows for model in target.models.values()), default=0) if target is not None else 0
    if idle_rows < _REQUESTS_MIN and len(handoffs_us) >= _REQUESTS_MIN:
        target = _only_intercept(median_of(handoffs_us), len(handoffs_us))
    elif idle_rows < _REQUESTS_MIN:
        target = _of_told(told, ahead=ahead) or _of_untold(untold, costs) or target
    if target is None:
        return None
    if target.step_ahead_us is None and ahead:
        target = msgspec.structs.replace(target, step_ahead_us=0.0)
    if ends is not None and any(abs(end - 1.0 - ahead) > _OFF for end in ends):
        target = msgspec.structs.replace(target, doubts=[_PRICE_OF_A_PROMPT])
    ended = told[told["in_flight"] == 0.0]  # of pages, on which each request is counted
    requests = sum(queueing.requests for queueing in emitters) + float(ended["requests"].sum())
    wait_us = sum(queueing.wait_us for queueing in emitters) + float(ended["wait_us"] @ ended["requests"])
    return msgspec.structs.replace(target, mean_us=wait_us / requests) if requests else target


class _StepCosts(NamedTuple):
    """What ``step_time`` says that a prompt token, and the experts that only a step with a prompt touches, cost.

    And a step without prompts: ``step_us``, ``request_us`` for each request, ``context_us`` for each token of their
    contexts.
    """

    prefill_us_per_token: float
    experts_us: float
    step_us: float
    request_us: float
    context_us: float

    @classmethod
    def of(cls, step: TargetSnapshot | None, *, hits_hidden: bool) -> _StepCosts:
        """Where hits are hidden, a data sheet's price of a computed token says nothing of a prompt that was cached."""
        model = step.models.get("portable") if step is not None else None
        features = {feature.name: feature for feature in model.features} if model is not None else {}
        names = ("prefill_tokens", "active_experts", "intercept", "requests", "decode_context_tokens")
        prefill_us, experts_us, step_us, request_us, context_us = (
            features[name].coefficient if name in features else 0.0 for name in names
        )
        touched = (features["active_experts"].mean or 0.0) if "active_experts" in features else 0.0
        if hits_hidden and prefill_us and features["prefill_tokens"].status == "prior_only":
            prefill_us = 0.0
        return cls(prefill_us, experts_us * (1.0 - touched), step_us + experts_us * touched, request_us, context_us)

    def waited(self, first_us: Floats, arrivals: Arrivals) -> tuple[Floats, Floats]:
        """What their prompts leave of ``first_us``, until their first tokens; the shortest prompt first.

        And a step of the batch that each met; where nobody told it, or the coefficients, of its own pace.
        """
        order = np.argsort(arrivals["prompt_tokens"], kind="stable")
        known, first_us = arrivals[order], first_us[order]
        met, prompts_us = known["in_flight"], self.prefill_us_per_token * known["prompt_tokens"] + self.experts_us
        batch_us = self.step_us + self.request_us * met + self.context_us * known["context_tokens"]
        steps_us = np.where((met > 0.0) & (batch_us >= 1.0), batch_us, known["pace_us"])
        is_timed = (first_us >= 1.0) & (steps_us >= 1.0)
        return (first_us - prompts_us)[is_timed], steps_us[is_timed]


def _ends(steps: Floats) -> tuple[float, float] | None:
    """Medians of the shortest and of the longest third of prompts; None of too few."""
    third = math.ceil(len(steps) / 3)
    return (median_of(steps[:third]), median_of(steps[-third:])) if len(steps) >= _REQUESTS_MIN else None


def _of_told(told: Arrivals, *, ahead: bool) -> TargetSnapshot | None:
    """The API's own time by requests that tell their queue and their prefill; None of too few."""
    if len(told) < _REQUESTS_MIN:
        return None
    waits_us = told["wait_us"] - (1.0 - 1.0 / np.sqrt(told["requests"])) / 2.0 * told["pace_us"]
    low_us, middle_us = np.quantile(waits_us, (0.1, 0.5)).tolist()
    step_us = (middle_us - low_us) / 0.4
    return _of_busy(low_us - 0.1 * step_us, told, 0.354 * step_us / math.sqrt(len(told)), ahead=ahead)


def _of_untold(untold: Arrivals, costs: _StepCosts) -> TargetSnapshot | None:
    """The same by requests that tell their first token alone."""
    waited_us, steps_us = costs.waited(untold["wait_us"], untold)
    if (ends := _ends(waited_us / steps_us)) is None:
        return None
    ahead = ends[1] > _STEPS_UNTOLD + 1.0
    rests_us = waited_us - (_STEPS_UNTOLD + ahead) * steps_us
    api_us = median_of(rests_us)
    stderr_us = _SPREAD_TO_SE * float(np.abs(rests_us - api_us).mean()) / math.sqrt(len(rests_us))
    return _of_busy(api_us, untold, stderr_us, ahead=ahead)


def _of_busy(api_us: float, arrivals: Arrivals, stderr_us: float, *, ahead: bool) -> TargetSnapshot:
    """A step scheduled ahead is in the intercept: a simulator that knows of none is right in the mean."""
    ahead_us = median_of(arrivals["pace_us"]) if ahead else None
    target = _only_intercept(max(api_us, 0.0) + (ahead_us or 0.0), len(arrivals), stderr_us)
    return msgspec.structs.replace(target, step_ahead_us=ahead_us)


def _only_intercept(intercept_us: float, rows: int, stderr_us: float | None = None) -> TargetSnapshot:
    intercept = FeatureSnapshot(
        name="intercept", unit="us", coefficient=intercept_us, stderr=stderr_us, status="weak", reason=Reason.DERIVED
    )
    model = ModelSnapshot(features=[intercept], rows=rows, effective_rows=float(rows))
    return TargetSnapshot(vector="alpha", unit="us", champion="portable", models={"portable": model})
