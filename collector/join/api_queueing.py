"""What is known of ARRIVED -> QUEUED beside the rows of idle arrivals, and of what requests wait until the first token.

Requests that meet a busy engine wait for the running step, which no coefficient may carry: they are in the plain mean
only. Where hardly a request finds the engine idle, ARRIVED -> HANDOFF stands in for the API's own work; where there are
only a page's sums, the plain mean less the mean wait for the running step; of an un-forked server, what the steps leave
of the time T to the first token of requests that meet a busy engine in which nobody waits for a first token.

Where spans tell queue and prefill, w = T - queue - prefill is the API's own time and the rest of a running decode step,
uniform on (0, s): the API's own time is the lower end of a uniform distribution, by its P10 and P50,

    api = w10 - 0.1 s, s = (w50 - w10) / 0.4          se = 0.354 s / sqrt(n)

(variances of sample quantiles: Kendall and Stuart, The Advanced Theory of Statistics 1, 10.10). Prefill then tells the
steps that were handed over before it came. With d what a step of the batch that it met takes by ``step_time``, and e
what the experts cost that only a step with a prompt touches, half of the requests have (prefill - b P - e) / d above
1.5 where one is scheduled ahead, and around 1 where none is. Their own pace is no d: it has the prompts of others, too.
Prompts that take several steps are left out. Where it is above 2.5 in the median of the shortest third of prompts
(on a page, prompts that share a step take longer), any prompt costs a time of its own, as with sparse attention, which
coefficients of means do not have: nothing is usable. Of a page, a window in which requests ended says the same of their
means, by their pace, for it tells of no batch, and w where it was one. Where spans tell neither, a request gets its
first token after

    T = api + (1/2 + a + 1) s + b P        s: time of a step, its own pace   P: prompt tokens   b: of ``step_time``

half a running step, its own prefill, and a steps that were handed over before it came: a = 0 where the engine schedules
when a step ends, 1 where it schedules one ahead (asynchronous). a is the one of the two whose residuals of T on (1, P)
are smaller in the mean of their absolute values; api is the median of what remains, se = 1.2533 * 1.4826 MAD / sqrt(n).
A wait for a slot would spoil it: such requests are left out, by somebody else who waits too, or because T / s is twice
the median.

Sums of pages are kept by quarter minutes i, with m_i requests that waited W_i in sum, watched for t_i seconds in which
a request would have waited s_i for the running step, and forgotten with a half-life of H = 600 seconds watched, as
coefficients are:

    w_i   = 2^-(seconds watched since / H)
    own   = max(sum w W / sum w m - sum w t s / sum w t, 0)
    own_i = max(W_i / m_i - s_i, 0)         P10, P50 and P90 of own_i / own, by weights w_i m_i, are the interval

No page has a histogram of this wait, so that there is no median of requests, only of quarter minutes.
Times are in microseconds; nothing is told by fewer than 20 requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
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
_WAITED_MORE = 2.0
"""In medians of T / s: who waited longer waited for something else."""
_MAD_TO_SD = 1.4826
_PRICE_OF_A_PROMPT = (
    "a short prompt takes more than a step beside its tokens, as with sparse attention or speculative decoding, and "
    "only telemetry of single steps tells that"
)
TOKEN_BUDGET = 2048.0
"""Of a step where nobody told ``max_num_batched_tokens``: longer prompts may take several."""
HANDOFFS_MAX = 512
PIECES_MAX = 256
"""More than six half-lives."""
_PIECE_S, _HALF_LIFE_S = 15.0, 600.0
_PIECES_MIN = 8

_AMOUNT_MAX = 1e18
"""Sums stay there: senders and pages may claim any wait, and what a checkpoint holds is bounded."""
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=_AMOUNT_MAX)]
Piece = tuple[Amount, Amount, Amount, Amount]
"""Of a quarter of a minute: requests and their waits; seconds watched, and these times what one would have waited."""


class BusyArrival(msgspec.Struct, frozen=True, array_like=True):
    """A request that met others, none of whom waited for a first token; or several that ended together, their means.

    ``wait_us``: its time to the first token, less queue and prefill where those are told; ``pace_us``: of its own
    tokens; ``in_flight``: those it met and itself, per engine; 0 where they were not counted. ``prefill_us``: from when
    it was scheduled to its first token; 0 where nobody told, or its prompt may have taken several steps.
    ``context_tokens``: of those that it met, together.
    """

    wait_us: Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
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
_ARRIVAL_DTYPE = np.dtype([(name, float) for name in BusyArrival.__struct_fields__])


class StepCosts(NamedTuple):
    """What ``step_time`` says that a prompt token, and the experts that only a step with a prompt touches, cost.

    And a step without prompts: ``step_us``, ``request_us`` for each request, ``context_us`` for each token of their
    contexts.
    """

    prefill_us_per_token: float = 0.0
    experts_us: float = 0.0
    step_us: float = 0.0
    request_us: float = 0.0
    context_us: float = 0.0


def first_tokens_of(
    processes: Iterable[Iterable[BusyArrival]], costs: StepCosts, *, known: bool
) -> TargetSnapshot | None:
    """The formula on the requests of some processes that tell their queue, or on those that do not; None of too few.

    A step scheduled ahead is in the intercept: a simulator that knows of none is right in the mean.
    """
    arrivals = _arrivals_of(processes, known=known)
    if not known:
        arrivals = _without_slot_waits(_timed(arrivals))
    waits_us = arrivals["wait_us"][arrivals["requests"] == 1.0] if known else arrivals["wait_us"]
    if len(waits_us) < _REQUESTS_MIN:
        return None
    pace_us, prompts = arrivals["pace_us"], arrivals["prompt_tokens"]
    if known:
        low_us, middle_us = np.quantile(waits_us, (0.1, 0.5)).tolist()
        step_us = (middle_us - low_us) / 0.4
        api_us, spread_us, ahead = low_us - 0.1 * step_us, 0.354 * step_us, prefills_wait_a_step(arrivals, costs)
    else:
        misfits_us = [_misfit(waits_us - steps * pace_us, prompts) for steps in _STEPS_WAITED]
        ahead = misfits_us[1] < misfits_us[0]
        rest_us = waits_us - _STEPS_WAITED[ahead] * pace_us - costs.prefill_us_per_token * prompts
        api_us = median_of(rest_us)
        spread_us = 1.2533 * _MAD_TO_SD * median_of(np.abs(rest_us - api_us))
    ahead_us = median_of(pace_us) if ahead else None
    stderr_us = spread_us / math.sqrt(len(waits_us))
    target = _only_intercept(max(api_us, 0.0) + (ahead_us or 0.0), len(arrivals), stderr_us)
    return msgspec.structs.replace(target, step_ahead_us=ahead_us)


def prefills_wait_a_step(arrivals: Arrivals, costs: StepCosts) -> bool:
    """Whether prefills take a step more than their own, which was handed over before them."""
    steps = _steps_of_prefills(arrivals, costs)
    return len(steps) >= _REQUESTS_MIN and median_of(steps) > _STEPS_WAITED[0]


def short_prompts_take_longer(arrivals: Arrivals, costs: StepCosts) -> bool:
    """Whether the shortest third of prompts takes longer, in the median, than its tokens and a step ahead of it."""
    steps = _steps_of_prefills(arrivals, costs)
    short = steps[: len(steps) // 3]
    return len(short) >= _REQUESTS_MIN and median_of(short) > _STEPS_WAITED[1]


def _steps_of_prefills(arrivals: Arrivals, costs: StepCosts) -> Floats:
    """(prefill - b P - e) / d of those whose prefill is known, the shortest prompt first."""
    known = np.sort(_timed(arrivals[arrivals["prefill_us"] > 0.0]), order="prompt_tokens")
    met = known["in_flight"]
    batch_us = costs.step_us + costs.request_us * met + costs.context_us * known["context_tokens"]
    step_us = np.where((met > 0.0) & (batch_us >= 1.0), batch_us, known["pace_us"])
    own_us = costs.prefill_us_per_token * known["prompt_tokens"] + costs.experts_us
    return (known["prefill_us"] - own_us) / step_us


def _arrivals_of(processes: Iterable[Iterable[BusyArrival]], *, known: bool) -> Arrivals:
    """Those that tell their queue, or that do not."""
    chosen = (each for arrivals in processes for each in arrivals if each.is_known == known)
    return np.array([*map(msgspec.structs.astuple, chosen)], _ARRIVAL_DTYPE)


def _timed(arrivals: Arrivals) -> Arrivals:
    """Those that waited, and whose steps took, a microsecond or more."""
    return arrivals[(arrivals["wait_us"] >= 1.0) & (arrivals["pace_us"] >= 1.0)]


def _without_slot_waits(arrivals: Arrivals) -> Arrivals:
    steps_waited = arrivals["wait_us"] / arrivals["pace_us"]
    return arrivals[steps_waited <= _WAITED_MORE * median_of(steps_waited)] if len(arrivals) else arrivals


def _misfit(values: Floats, prompt_tokens: Floats) -> float:
    """How far values are from their line in the prompt tokens, in the mean."""
    columns = np.stack((np.ones(len(values)), prompt_tokens / max(float(prompt_tokens.max()), 1.0)), axis=1)
    solution, *_ = np.linalg.lstsq(columns, values, rcond=None)
    return float(np.abs(values - columns @ solution).mean())


class ApiQueueing(msgspec.Struct):
    """Sums over all requests of one emitter, and the latest of them, the newest last; a checkpoint keeps it as it is.

    ``arrivals`` met a busy engine; ``pieces`` are from pages, and the newest still grows.
    """

    requests: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    wait_us: Amount = 0.0
    handoffs_us: list[Amount] = []
    arrivals: list[BusyArrival] = []
    pieces: list[Piece] = []

    def add(self, span: CoreSpan, api: ApiSpan) -> None:
        """Count one request with its API span."""
        queued = span.marks[0]
        if api.arrived_ns == MISSING or queued.kind is not SpanEventKind.QUEUED or queued.ts_ns < api.arrived_ns:
            return
        self.requests += 1
        self.wait_us = min(self.wait_us + (queued.ts_ns - api.arrived_ns) / 1e3, _AMOUNT_MAX)
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

    def add_counted(self, requests: float, wait_us: float) -> None:
        """Count requests whose wait is known as a sum."""
        self.requests += round(min(requests, _AMOUNT_MAX - self.requests))
        self.wait_us = min(self.wait_us + wait_us, _AMOUNT_MAX)
        self._count((requests, wait_us, 0.0, 0.0))

    def watch(self, seconds: float, step_wait_us: float) -> None:
        """Add a time in which a request would have waited so long for the running step."""
        self._count((0.0, 0.0, seconds, seconds * step_wait_us))

    def _count(self, more: Piece) -> None:
        if not self.pieces or self.pieces[-1][2] >= _PIECE_S:
            self.pieces.append((0.0, 0.0, 0.0, 0.0))
            del self.pieces[:-PIECES_MAX]
        counted, waited_us, watched_s, step_waits = (
            min(a + b, _AMOUNT_MAX) for a, b in zip(self.pieces[-1], more, strict=True)
        )
        self.pieces[-1] = counted, waited_us, watched_s, step_waits


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
    known, costs = list(queueings), _costs_of(step, hits_hidden=hits_hidden)
    arrivals = [queueing.arrivals for queueing in known]
    requests = sum(queueing.requests for queueing in known)
    handoffs_us = [value for queueing in known for value in queueing.handoffs_us]
    idle_rows = max((model.rows for model in target.models.values()), default=0) if target is not None else 0
    mean_us = sum(queueing.wait_us for queueing in known) / requests if requests else 0.0
    if idle_rows < _REQUESTS_MIN and len(handoffs_us) >= _REQUESTS_MIN:
        target = _only_intercept(median(handoffs_us), len(handoffs_us))
    elif idle_rows < _REQUESTS_MIN:
        of_pages = _of_pages(known, requests) if target is None and requests >= _REQUESTS_MIN else None
        if of_pages is not None and of_pages.mean_us is not None:
            mean_us = of_pages.mean_us
        by_spans = (first_tokens_of(arrivals, costs, known=known) for known in (True, False))
        target = next(filter(None, by_spans), None) or of_pages or target
    if target is None:
        return None
    known_arrivals = _arrivals_of(arrivals, known=True)
    if target.step_ahead_us is None and prefills_wait_a_step(known_arrivals, costs):
        target = msgspec.structs.replace(target, step_ahead_us=0.0)
    if short_prompts_take_longer(known_arrivals, costs):
        target = msgspec.structs.replace(target, doubts=[_PRICE_OF_A_PROMPT])
    return target if requests == 0 else msgspec.structs.replace(target, mean_us=mean_us)


def _of_pages(queueings: Iterable[ApiQueueing], requests: int) -> TargetSnapshot | None:
    """What is remembered of pages, with its scatter from one piece to the next."""
    pieces = [np.array(queueing.pieces).reshape(-1, 4)[::-1] for queueing in queueings]
    since_s = np.concatenate([each[:, 2].cumsum() - each[:, 2] for each in pieces])
    weight, (counted, waited_us, watched_s, step_waits) = 2.0 ** -(since_s / _HALF_LIFE_S), np.concatenate(pieces).T
    shares, watched = weight * counted, float(weight @ watched_s)
    if not (shares.sum() > 0.0 and watched > 0.0):
        return None
    mean_us = float(weight @ waited_us / shares.sum())
    own_us = max(mean_us - float(weight @ step_waits) / watched, 0.0)
    both = (counted > 0.0) & (watched_s > 0.0)
    each_us = np.maximum(waited_us[both] / counted[both] - step_waits[both] / watched_s[both], 0.0)
    stderr, interval = None, None
    if len(each_us) >= _PIECES_MIN and own_us > 0.0:
        order = np.argsort(each_us)
        passed = np.cumsum(shares[both][order])
        at = np.searchsorted(passed, passed[-1] * np.array((0.1, 0.5, 0.9)))
        low, middle, high = (each_us[order][at] / own_us).tolist()
        interval = IntervalSnapshot(p10=low, p50=middle, p90=high)
        stderr = float(np.linalg.norm(shares[both] / shares.sum() * (each_us - own_us)))
    target = _only_intercept(own_us, requests, stderr, effective_rows=float(shares.sum()))
    return msgspec.structs.replace(target, interval=interval, mean_us=mean_us)


def _costs_of(step: TargetSnapshot | None, *, hits_hidden: bool) -> StepCosts:
    """Where hits are hidden, a data sheet's price of a computed token says nothing of a prompt that may be cached."""
    model = step.models.get("portable") if step is not None else None
    features = {feature.name: feature for feature in model.features} if model is not None else {}
    names = ("prefill_tokens", "active_experts", "intercept", "requests", "decode_context_tokens")
    prefill_us, experts_us, step_us, request_us, context_us = (
        features[name].coefficient if name in features else 0.0 for name in names
    )
    touched = (features["active_experts"].mean or 0.0) if "active_experts" in features else 0.0
    if hits_hidden and prefill_us and features["prefill_tokens"].status == "prior_only":
        prefill_us = 0.0
    return StepCosts(prefill_us, experts_us * (1.0 - touched), step_us + experts_us * touched, request_us, context_us)


def _only_intercept(
    intercept_us: float, rows: int, stderr: float | None = None, effective_rows: float | None = None
) -> TargetSnapshot:
    intercept = FeatureSnapshot(
        name="intercept", unit="us", coefficient=intercept_us, stderr=stderr, status="weak", reason=Reason.DERIVED
    )
    effective = float(rows) if effective_rows is None else effective_rows
    model = ModelSnapshot(features=[intercept], rows=rows, effective_rows=effective)
    return TargetSnapshot(vector="alpha", unit="us", champion="portable", models={"portable": model})
