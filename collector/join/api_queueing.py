"""What requests that meet others tell of ``api_queueing``, and of a step that the engine schedules ahead.

``api_queueing`` is learned from requests that find the engine idle. Where hardly one does, others stand in: of a fork
the median of ARRIVED -> HANDOFF, which is the API's own work. Else they wait for the running step as well, but one in
twenty hardly waits at all:

    api = 5 % quantile of w - (1 - 1 / sqrt m) s / 2

w is what passes from arrival to first token, without queue and prefill. Of m requests that ended between two pages it
is their mean, which is nearer to half a step s, at the pace of their tokens.

More may pass from when a prompt is scheduled to its first token than the coefficients tell. It is taken to be the same
for all prompts, and is part of ``api_queueing``:

    rest = max(median of prefill - b P - e - d, 0)

P are prompt tokens at their price b in ``step_time``; e is what the experts cost that only a step with a prompt
touches; d is a step of the batch that the request met, by ``step_time``, or s where nobody tells the batch, as on a
page. Prompts that may take several steps are left out.

Where the rest of the longest third of prompts is above d / 2, the engine schedules a step ahead (asynchronous): most of
their time is told by their tokens. Where that of the shortest third is below d / 4 as well as theirs, it schedules
none; else nobody knows. Where without that step the shortest third or the longest is off by another one, as with sparse
attention or speculative decoding, no constant is right, and nothing is usable.

Spans may tell the time to the first token alone. Then it takes the place of prefill. Half of the running step is taken
off as well; api is in the rest, for which both bounds are higher by d / 2, and raises no doubt.

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
from online import FeatureSnapshot, Floats, ModelSnapshot, Reason, TargetSnapshot, median_of

ARRIVALS_MAX = 2048
"""Requests of each process that are remembered."""
HANDOFFS_MAX = 512
TOKEN_BUDGET = 2048.0
"""Of a step where nobody told ``max_num_batched_tokens``: longer prompts may take several."""
_REQUESTS_MIN = 20
_FASTEST = 0.05
_SPREAD_TO_SE = 1.57
"""From the mean absolute deviation to the standard error of a median, times the root of n, of a normal distribution."""
_PRICE_OF_A_PROMPT = (
    "short or long prompts take a step more or less than the coefficients say, as with sparse attention or speculative "
    "decoding, and only telemetry of single steps tells why"
)

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
    """The target with the plain mean of all requests, and with what coefficients leave of prefills.

    With too few idle rows others stand in their place.

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
    idle_rows = max((model.rows for model in target.models.values()), default=0) if target is not None else 0
    is_told = max(idle_rows, len(told)) >= _REQUESTS_MIN
    if idle_rows < _REQUESTS_MIN and len(handoffs_us) >= _REQUESTS_MIN:
        target = _only_intercept(median_of(handoffs_us), len(handoffs_us))
    elif idle_rows < _REQUESTS_MIN and is_told:
        target = _only_intercept(_own_time(told), len(told))
    elif idle_rows < _REQUESTS_MIN <= len(untold):
        target = _only_intercept(0.0, len(untold))
    if target is None:
        return None
    ended = told[told["in_flight"] == 0.0]  # of pages, on which each request is counted
    requests = sum(queueing.requests for queueing in emitters) + float(ended["requests"].sum())
    wait_us = sum(queueing.wait_us for queueing in emitters) + float(ended["wait_us"] @ ended["requests"])
    target = msgspec.structs.replace(target, mean_us=wait_us / requests) if requests else target
    costs = _StepCosts.of(step, hits_hidden=hits_hidden)
    return _with_rest(target, told if is_told else untold, costs, is_told=is_told)


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

    def steps_us(self, arrivals: Arrivals) -> Floats:
        """A step of the batch that each met; where nobody told it, or the coefficients, of its own pace."""
        met = arrivals["in_flight"]
        steps_us = self.step_us + self.request_us * met + self.context_us * arrivals["context_tokens"]
        return np.where((met > 0.0) & (steps_us >= 1.0), steps_us, arrivals["pace_us"])


def _own_time(told: Arrivals) -> float:
    """The API's own time, of those that hardly waited for a step."""
    half_us = told["pace_us"] / 2.0
    waits_us = told["wait_us"] - (1.0 - 1.0 / np.sqrt(told["requests"])) * half_us
    return max(float(np.quantile(waits_us, _FASTEST)), 0.0)


def _with_rest(target: TargetSnapshot, arrivals: Arrivals, costs: _StepCosts, *, is_told: bool) -> TargetSnapshot:
    """The target with what coefficients leave of the time to first tokens, and what that says.

    A step scheduled ahead is in the intercept: a simulator that knows of none is right in the mean.
    """
    arrivals = np.sort(arrivals, order="prompt_tokens")
    first_us, steps = (arrivals["prefill_us"], 1.0) if is_told else (arrivals["wait_us"], 1.5)
    steps_us = costs.steps_us(arrivals)
    rests_us = first_us - costs.prefill_us_per_token * arrivals["prompt_tokens"] - costs.experts_us - steps * steps_us
    is_timed = (first_us >= 1.0) & (steps_us >= 1.0)
    rests_us, steps_us = rests_us[is_timed], steps_us[is_timed]
    if len(rests_us) < _REQUESTS_MIN:
        return target
    rests, third = rests_us / steps_us, math.ceil(len(rests_us) / 3)
    short, long = median_of(rests[:third]), median_of(rests[-third:])
    ahead, surely_not = long > steps - 0.5, max(short, long) < steps - 0.75
    is_off = is_told and any(abs(rest - ahead) > 1.0 for rest in (short, long))
    rest_us = max(median_of(rests_us), 0.0)
    stderr_us = _SPREAD_TO_SE * float(np.abs(rests_us - rest_us).mean()) / math.sqrt(len(rests_us))
    return msgspec.structs.replace(
        target,
        models={name: _later(model, rest_us, stderr_us) for name, model in target.models.items()},
        step_ahead_us=median_of(steps_us) if ahead else 0.0 if surely_not else None,
        doubts=[_PRICE_OF_A_PROMPT] if is_off else [],
    )


def _later(model: ModelSnapshot, by_us: float, stderr_us: float) -> ModelSnapshot:
    """A model whose intercept is so much larger, with that error where it had none."""
    replace, features = msgspec.structs.replace, {each.name: each for each in model.features}
    if (intercept := features.get("intercept")) is not None:
        error_us = stderr_us if intercept.stderr is None else intercept.stderr
        later_us = intercept.coefficient + by_us
        features["intercept"] = replace(intercept, coefficient=later_us, stderr=error_us)
    return replace(model, features=[*features.values()])


def _only_intercept(intercept_us: float, rows: int) -> TargetSnapshot:
    intercept = FeatureSnapshot(
        name="intercept", unit="us", coefficient=intercept_us, status="weak", reason=Reason.DERIVED
    )
    model = ModelSnapshot(features=[intercept], rows=rows, effective_rows=float(rows))
    return TargetSnapshot(vector="alpha", unit="us", champion="portable", models={"portable": model})
