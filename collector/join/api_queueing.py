"""What is known of ARRIVED -> QUEUED beside the rows of idle arrivals, and of what requests wait until the first token.

Requests that meet a busy engine wait for the running step, which no coefficient may carry: they are in the plain mean
only. Where hardly a request finds the engine idle, ARRIVED -> HANDOFF stands in for the API's own work; where there are
only a page's sums, the plain mean less the mean wait for the running step; of an un-forked server, what the steps leave
of the time T to the first token of requests that meet a busy engine in which nobody waits for a first token.

Where spans tell queue and prefill, w = T - queue - prefill is the API's own time and the rest of a running decode step,
uniform on (0, s): the API's own time is the lower end of a uniform distribution, by its P10 and P50,

    api = w10 - 0.1 s, s = (w50 - w10) / 0.4          se = 0.354 s / sqrt(n)

(variances of sample quantiles: Kendall and Stuart, The Advanced Theory of Statistics 1, 10.10). Prefill then tells the
steps that were handed over before it came:

    waited = (prefill - b P - e) / d        d: time of a step of the batch that it met, by ``step_time``
                                            e: what the experts cost that only a step with a prompt touches

The median of ``waited`` over the longest third of prompts is above 1.5 where a step is scheduled ahead, else around 1:
their tokens say most of b P. Their own pace is no d: it has the prompts of others, too. Prompts that take several steps
are left out. Where prefills of the shortest or of the longest third differ from b P + e + (1 + a) d by a quarter in the
median, as where any prompt costs a time of its own, coefficients of means lack what prompts cost: nothing is usable. Of
a page, a window in which requests ended says the same of their means, by their pace, for it tells of no batch, and w
where it was one. Where spans tell neither, a request gets its first token after

    T = api + (1/2 + a + 1) s + b P        s: time of a step, its own pace   P: prompt tokens   b: of ``step_time``

half a running step, its own prefill, and a steps that were handed over before it came: a = 0 where the engine schedules
when a step ends, 1 where it schedules one ahead (asynchronous). a is the one of the two that leaves the smaller mean
absolute deviation; api is the median of what remains. Who waited for a slot beside somebody else is left out.

Of pages the latest 60 quarter minutes i are kept, with m_i requests that waited W_i in sum, watched for t_i seconds in
which a request would have waited s_i for the running step:

    own   = max(sum W / sum m - sum t s / sum t, 0)
    own_i = max(W_i / m_i - s_i, 0)         P10, P50 and P90 of own_i / own are the interval

No page has a histogram of this wait, so that there is no median of requests, only of quarter minutes.
Times are in microseconds; nothing is told by fewer than 20 requests.
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
    IntervalSnapshot,
    ModelSnapshot,
    Reason,
    TargetSnapshot,
    median_of,
)

ARRIVALS_MAX = 2048
"""Requests of each process that are remembered."""
_REQUESTS_MIN = 20
_STEPS_WAITED = (1.5, 2.5)
"""Half a running step and its own; and one that was handed over before."""
_SPREAD_TO_SE = 1.57
"""From the mean absolute deviation to the standard error of a median, times the root of n, of a normal distribution."""
_PREFILL_OFF = math.log(1.25)
_PRICE_OF_A_PROMPT = (
    "short or long prompts take a quarter more or less than the coefficients say, as with sparse attention or "
    "speculative decoding, and only telemetry of single steps tells why"
)
TOKEN_BUDGET = 2048.0
"""Of a step where nobody told ``max_num_batched_tokens``: longer prompts may take several."""
HANDOFFS_MAX = 512
_PIECE_S = 15.0
PIECES_MAX = 60
_PIECES_MIN = 8

Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e300)]


class BusyArrival(NamedTuple):
    """A request that met others, none of whom waited for a first token; or several that ended together, their means.

    ``wait_us``: its time to the first token, less queue and prefill where those are told; ``pace_us``: of its own
    tokens; ``in_flight``: those it met and itself, per engine; 0 where they were not counted. ``prefill_us``: from when
    it was scheduled to its first token; 0 where nobody told, or its prompt may have taken several steps.
    ``context_tokens``: of those that it met, together.
    """

    wait_us: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
    pace_us: Amount
    prompt_tokens: Amount
    in_flight: Amount = 0.0
    prefill_us: Amount = 0.0
    requests: Amount = 1.0
    is_known: bool = False
    """Queue and prefill are."""
    context_tokens: Amount = 0.0


Arrivals = NDArray[np.void]
"""Of ``_ARRIVAL_DTYPE``: requests by the names of BusyArrival."""
_ARRIVAL_DTYPE = np.dtype([(name, "?" if name == "is_known" else "f8") for name in BusyArrival._fields])


class WaitsOfPages(NamedTuple):
    """Of a quarter of a minute: how many requests ended and what they waited, together.

    For how long it was watched what a request would have waited for the running step, and that, times these seconds.
    """

    requests: Amount = 0.0
    wait_us: Amount = 0.0
    watched_s: Amount = 0.0
    step_wait_us_s: Amount = 0.0


class ApiQueueing(msgspec.Struct):
    """Sums over all requests of one emitter, and the latest of them, the newest last; a checkpoint keeps it as it is.

    ``arrivals`` met a busy engine; ``pieces`` are from pages, and the newest still grows.
    """

    requests: Amount = 0.0
    wait_us: Amount = 0.0
    handoffs_us: list[Amount] = []
    arrivals: list[BusyArrival] = []
    pieces: list[WaitsOfPages] = []

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

    def add_waits(self, waits: WaitsOfPages) -> None:
        """Take what happened between two pages."""
        if not self.pieces or self.pieces[-1].watched_s >= _PIECE_S:
            self.pieces.append(WaitsOfPages())
            del self.pieces[:-PIECES_MAX]
        self.pieces[-1] = WaitsOfPages(*map(sum, zip(self.pieces[-1], waits, strict=True)))


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
        queueings: what the configuration's emitters counted.
        step: what the same configuration publishes of its steps.
        hits_hidden: prompts may have been in the prefix cache, and nobody tells.
    """
    told = list(queueings)
    arrivals = np.array([each for queueing in told for each in queueing.arrivals], _ARRIVAL_DTYPE)
    pieces = np.array([each for queueing in told for each in queueing.pieces]).reshape(-1, len(WaitsOfPages._fields))
    handoffs_us = [each for queueing in told for each in queueing.handoffs_us]
    costs, is_known = _StepCosts.of(step, hits_hidden=hits_hidden), arrivals["is_known"]
    prefills_us, own_us, step_us = _prefills(arrivals[is_known], costs)
    waited = (prefills_us - own_us) / step_us
    third = math.ceil(len(waited) / 3)
    ahead = len(waited) >= _REQUESTS_MIN and median_of(waited[-third:]) > _STEPS_WAITED[0]
    idle_rows = max((model.rows for model in target.models.values()), default=0) if target is not None else 0
    if idle_rows < _REQUESTS_MIN and len(handoffs_us) >= _REQUESTS_MIN:
        target = _only_intercept(median_of(handoffs_us), len(handoffs_us))
    elif idle_rows < _REQUESTS_MIN:
        by_spans = _of_waits(arrivals[is_known], ahead=ahead) or _of_first_tokens(arrivals[~is_known], costs)
        target = by_spans or target or _of_pages(*pieces.T)
    if target is None:
        return None
    if target.step_ahead_us is None and ahead:
        target = msgspec.structs.replace(target, step_ahead_us=0.0)
    off = np.log(prefills_us / (own_us + (1.0 + ahead) * step_us))
    if third >= _REQUESTS_MIN and any(abs(median_of(end)) > _PREFILL_OFF for end in (off[:third], off[-third:])):
        target = msgspec.structs.replace(target, doubts=[_PRICE_OF_A_PROMPT])
    requests, waits_us, *_ = pieces.sum(axis=0)
    requests += sum(queueing.requests for queueing in told)
    waits_us += sum(queueing.wait_us for queueing in told)
    return msgspec.structs.replace(target, mean_us=float(waits_us / requests)) if requests else target


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


def _prefills(arrivals: Arrivals, costs: _StepCosts) -> tuple[Floats, Floats, Floats]:
    """Of those whose prefill is known, the shortest prompt first: prefill, b P + e and d."""
    known = np.sort(_timed(arrivals[arrivals["prefill_us"] > 0.0]), order="prompt_tokens")
    met = known["in_flight"]
    batch_us = costs.step_us + costs.request_us * met + costs.context_us * known["context_tokens"]
    step_us = np.where((met > 0.0) & (batch_us >= 1.0), batch_us, known["pace_us"])
    return known["prefill_us"], costs.prefill_us_per_token * known["prompt_tokens"] + costs.experts_us, step_us


def _timed(arrivals: Arrivals) -> Arrivals:
    """Those that waited, and whose steps took, a microsecond or more."""
    return arrivals[(arrivals["wait_us"] >= 1.0) & (arrivals["pace_us"] >= 1.0)]


def _of_waits(arrivals: Arrivals, *, ahead: bool) -> TargetSnapshot | None:
    """The API's own time by requests that tell their queue and their prefill; None of too few."""
    waits_us = arrivals["wait_us"][arrivals["requests"] == 1.0]
    if len(waits_us) < _REQUESTS_MIN:
        return None
    low_us, middle_us = np.quantile(waits_us, (0.1, 0.5)).tolist()
    step_us = (middle_us - low_us) / 0.4
    return _of_busy(low_us - 0.1 * step_us, 0.354 * step_us, arrivals, ahead=ahead)


def _of_first_tokens(arrivals: Arrivals, costs: _StepCosts) -> TargetSnapshot | None:
    """The same by requests that tell their first token alone."""
    timed = _timed(arrivals)
    if len(timed) < _REQUESTS_MIN:
        return None
    rests_us = [
        timed["wait_us"] - steps * timed["pace_us"] - costs.prefill_us_per_token * timed["prompt_tokens"]
        for steps in _STEPS_WAITED
    ]
    apis_us = [median_of(rest_us) for rest_us in rests_us]
    spreads_us = [float(np.abs(rest_us - api_us).mean()) for rest_us, api_us in zip(rests_us, apis_us, strict=True)]
    ahead = spreads_us[1] < spreads_us[0]
    return _of_busy(apis_us[ahead], _SPREAD_TO_SE * spreads_us[ahead], timed, ahead=ahead)


def _of_busy(api_us: float, spread_us: float, arrivals: Arrivals, *, ahead: bool) -> TargetSnapshot:
    """A step scheduled ahead is in the intercept: a simulator that knows of none is right in the mean."""
    ahead_us = median_of(arrivals["pace_us"]) if ahead else None
    stderr_us = spread_us / math.sqrt(len(arrivals))
    target = _only_intercept(max(api_us, 0.0) + (ahead_us or 0.0), len(arrivals), stderr_us)
    return msgspec.structs.replace(target, step_ahead_us=ahead_us)


def _of_pages(requests: Floats, waits_us: Floats, watched_s: Floats, step_waits_us_s: Floats) -> TargetSnapshot | None:
    """What is remembered of pages, with its scatter from one piece to the next."""
    if requests.sum() < _REQUESTS_MIN or not watched_s.any():
        return None
    own_us = max(float(waits_us.sum() / requests.sum() - step_waits_us_s.sum() / watched_s.sum()), 0.0)
    both = (requests > 0.0) & (watched_s > 0.0)
    each_us = np.maximum(waits_us[both] / requests[both] - step_waits_us_s[both] / watched_s[both], 0.0)
    stderr_us, interval = None, None
    if len(each_us) >= _PIECES_MIN and own_us > 0.0:
        low, middle, high = (np.quantile(each_us, (0.1, 0.5, 0.9)) / own_us).tolist()
        interval = IntervalSnapshot(p10=low, p50=middle, p90=high)
        stderr_us = float(each_us.std() / math.sqrt(len(each_us)))
    target = _only_intercept(own_us, len(requests), stderr_us)
    return msgspec.structs.replace(target, interval=interval)


def _only_intercept(intercept_us: float, rows: int, stderr_us: float | None = None) -> TargetSnapshot:
    intercept = FeatureSnapshot(
        name="intercept", unit="us", coefficient=intercept_us, stderr=stderr_us, status="weak", reason=Reason.DERIVED
    )
    model = ModelSnapshot(features=[intercept], rows=rows, effective_rows=float(rows))
    return TargetSnapshot(vector="alpha", unit="us", champion="portable", models={"portable": model})
