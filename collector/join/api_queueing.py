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
Prompts that take several steps are left out. Of a page, a window in which requests ended says the same of their means,
by their pace, for it tells of no batch, and w where it was one. Where spans tell neither, a request gets its first
token after

    T = api + (1/2 + a + 1) s + b P        s: time of a step, its own pace   P: prompt tokens   b: of ``step_time``

half a running step, its own prefill, and a steps that were handed over before it came: a = 0 where the engine schedules
when a step ends, 1 where it schedules one ahead (asynchronous). a is the one of the two whose residuals of T on (1, P)
are smaller in the mean of their absolute values; api is the median of what remains, se = 1.2533 * 1.4826 MAD / sqrt(n).
A wait for a slot would spoil it: such requests are left out, by somebody else who waits too, or because T / s is twice
the median.

The API's process hands out the tokens of all that run, the newest last, so that api grows with each of the n requests
that were in flight on arrival, the request included. With d what a step grows by with each of them, by ``step_time``,
r is w - d n / 2 or T - (3/2 + a) d n - b P, and the slope that of least squares

    c = sum m r / sum m^2          se = sqrt(V) / sum m^2          m: what a line through P leaves of n

of those within three robust standard deviations of the median of r (Frisch and Waugh, Econometrica 1933: busy hours
may have longer prompts). V is the sum of squares of m times the residual, summed before over 32 requests in order,
which share their noise (online/rls/error_bars.py), but at least over each. Published is c (1 - (se / c)^2), none where
c < se: what is hardly there comes and goes without a jump (Breiman's garrote, Technometrics 1995). api is of x requests
in flight, for which median(r) = median(r - c n) + c x: between the fewest and the most.

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
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from collector.decode import MISSING, ApiSpan, CoreSpan, SpanEventKind
from online import (
    FeatureSnapshot,
    Floats,
    InFlightSnapshot,
    IntervalSnapshot,
    ModelSnapshot,
    Reason,
    TargetSnapshot,
    median_of,
)

ARRIVALS_MAX = 2048
"""Requests of each process that are remembered."""
_REQUESTS_MIN = 20
_STEP_MET, _STEPS_WAITED = 0.5, 1.5
_WAITED_MORE = 2.0
"""In medians of T / s: who waited longer waited for something else."""
_ALIKE = 32
_NO_SPREAD = 0.01
"""Of the number in flight, beside what the prompts say of it: a variance below tells nothing."""
_MAD_TO_SD, _OUTLIER = 1.4826, 3.0
_LEAST_US = 1e-3
"""Less per request is none."""
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


class StepCosts(NamedTuple):
    """What ``step_time`` says that a prompt token, one more request with its context and a prompt's experts cost.

    And a step without prompts: ``step_us``, ``bare_request_us`` for each request, ``context_us`` for each token of
    their contexts.
    """

    prefill_us_per_token: float = 0.0
    us_per_request: float = 0.0
    experts_us: float = 0.0
    step_us: float = 0.0
    bare_request_us: float = 0.0
    context_us: float = 0.0


def first_tokens_of(
    processes: Sequence[Sequence[BusyArrival]], costs: StepCosts, *, told: bool
) -> TargetSnapshot | None:
    """The formula on the requests of some processes that tell their queue, or on those that do not; None of too few.

    A step scheduled ahead is in the intercept: a simulator that knows of none is right in the mean.
    """
    rows = _rows_of(processes, told=told)
    if told:
        waits_us = rows[rows[:, 5] == 1.0, 0]
    else:
        rows = _without_slot_waits(_timed(rows))
        waits_us = rows[:, 0]
    if len(waits_us) < _REQUESTS_MIN:
        return None
    if told:
        ahead, steps = prefills_wait_a_step(rows, costs), _STEP_MET
        low_us, middle_us = np.quantile(waits_us, (0.1, 0.5)).tolist()
        step_us = (middle_us - low_us) / 0.4
        api_us, spread_us = low_us - 0.1 * step_us, 0.354 * step_us
        costs = StepCosts(0.0, costs.us_per_request)
    else:
        pace_us, prompts = rows[:, 1], rows[:, 2]
        misfits_us = [np.abs(_without_line(waits_us - n * pace_us, prompts)).mean() for n in (1.5, 2.5)]
        ahead = bool(misfits_us[1] < misfits_us[0])
        steps = _STEPS_WAITED + ahead
        rest_us = waits_us - steps * pace_us - costs.prefill_us_per_token * prompts
        api_us = median_of(rest_us)
        spread_us = 1.2533 * _MAD_TO_SD * median_of(np.abs(rest_us - api_us))
    ahead_us = median_of(rows[:, 1]) if ahead else None
    target = _only_intercept(max(api_us, 0.0) + (ahead_us or 0.0), len(rows), spread_us / math.sqrt(len(waits_us)))
    return msgspec.structs.replace(target, step_ahead_us=ahead_us, in_flight=_per_request(rows, steps, costs))


def prefills_wait_a_step(rows: Floats, costs: StepCosts) -> bool:
    """Whether prefills take a step more than their own, which was handed over before them."""
    known = _timed(rows[rows[:, 4] > 0.0])
    if len(known) < _REQUESTS_MIN:
        return False
    _, pace_us, prompt_tokens, in_flight, prefill_us, _, _, context = known.T
    batch_us = costs.step_us + costs.bare_request_us * in_flight + costs.context_us * context
    step_us = np.where((in_flight > 0.0) & (batch_us >= 1.0), batch_us, pace_us)
    own_us = costs.prefill_us_per_token * prompt_tokens + costs.experts_us
    return median_of((prefill_us - own_us) / step_us) > _STEPS_WAITED


def _rows_of(processes: Sequence[Sequence[BusyArrival]], *, told: bool) -> Floats:
    """Those that tell their queue, or that do not, a row each: (n, fields of BusyArrival)."""
    rows = [msgspec.structs.astuple(each) for arrivals in processes for each in arrivals if each.is_known == told]
    return np.array(rows, float).reshape(-1, len(BusyArrival.__struct_fields__))


def _timed(rows: Floats) -> Floats:
    """Those that waited, and whose steps took, a microsecond or more."""
    return rows[(rows[:, :2] >= 1.0).all(axis=1)]


def _without_slot_waits(rows: Floats) -> Floats:
    steps_waited = rows[:, 0] / rows[:, 1]
    usual: Floats = rows[steps_waited <= _WAITED_MORE * median_of(steps_waited)] if len(rows) else rows
    return usual


def _without_line(values: Floats, prompt_tokens: Floats) -> Floats:
    """What a line through the prompt tokens leaves of them."""
    columns = np.stack((np.ones(len(values)), prompt_tokens / max(float(prompt_tokens.max()), 1.0)), axis=1)
    solution, *_ = np.linalg.lstsq(columns, values, rcond=None)
    left: Floats = values - columns @ solution
    return left


def _per_request(rows: Floats, steps: float, costs: StepCosts) -> InFlightSnapshot | None:
    """What is published of c, and the x that api is of."""
    rest_us, prompt_tokens, in_flight = _grown(rows, steps, costs)
    if len(rest_us) < _REQUESTS_MIN:
        return None
    apart, left_us = _without_line(np.stack((in_flight, rest_us), axis=1), prompt_tokens).T
    square = float(apart @ apart)
    if square < _NO_SPREAD * len(left_us):
        return None
    slope_us = float(apart @ left_us) / square
    scores = apart * (left_us - slope_us * apart)
    alike = np.add.reduceat(scores, np.arange(0, len(scores), _ALIKE))
    stderr_us = math.sqrt(max(float(scores @ scores), float(alike @ alike))) / square
    slope_us -= stderr_us * stderr_us / max(slope_us, stderr_us, _LEAST_US)
    if slope_us < _LEAST_US:
        return None
    requests = (median_of(rest_us) - median_of(rest_us - slope_us * in_flight)) / slope_us
    requests = min(max(requests, float(in_flight.min())), float(in_flight.max()))  # rounding
    return InFlightSnapshot(requests=requests, us_per_request=slope_us, stderr_us=stderr_us)


def _grown(rows: Floats, steps: float, costs: StepCosts) -> tuple[Floats, Floats, Floats]:
    """r, P and n of those that were counted and are no outliers."""
    wait_us, _, prompt_tokens, in_flight = _timed(rows[rows[:, 3] > 0.0]).T[:4]
    rest_us = wait_us - steps * costs.us_per_request * in_flight - costs.prefill_us_per_token * prompt_tokens
    away_us = np.abs(rest_us - median_of(rest_us)) if len(rest_us) else rest_us
    near = away_us <= _OUTLIER * _MAD_TO_SD * (median_of(away_us) if len(away_us) else 0.0)
    return rest_us[near], prompt_tokens[near], in_flight[near]


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

    def give_arrivals(self, other: ApiQueueing, engines: float) -> None:
        """Hand them to an engine; of those in flight, so many have their part, fewer than one with more processes."""
        given, self.arrivals = self.arrivals, []
        for each in given:
            own = {"in_flight": each.in_flight / engines, "context_tokens": each.context_tokens / engines}
            other.add_arrivals([msgspec.structs.replace(each, **own)])

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
    told = first_tokens_of(arrivals, costs, told=True)
    if idle_rows < _REQUESTS_MIN and len(handoffs_us) >= _REQUESTS_MIN:
        target = _only_intercept(median(handoffs_us), len(handoffs_us))
    elif idle_rows < _REQUESTS_MIN:
        of_pages = _of_pages(known, requests) if target is None and requests >= _REQUESTS_MIN else None
        if of_pages is not None and of_pages.mean_us is not None:
            mean_us = of_pages.mean_us
        target = told or first_tokens_of(arrivals, costs, told=False) or of_pages or target
    elif target is not None and told is not None and told.in_flight is not None:
        target = msgspec.structs.replace(target, in_flight=msgspec.structs.replace(told.in_flight, requests=1.0))
    if target is None:
        return None
    if target.step_ahead_us is None and prefills_wait_a_step(_rows_of(arrivals, told=True), costs):
        target = msgspec.structs.replace(target, step_ahead_us=0.0)
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
    """One more request brings the context that each has in the mean.

    Where hits are hidden, a data sheet's price of a computed token says nothing of a prompt that may have been cached.
    """
    model = step.models.get("portable") if step is not None else None
    features = {feature.name: feature for feature in model.features} if model is not None else {}
    names = ("intercept", "prefill_tokens", "requests", "decode_context_tokens", "active_experts")
    step_us, prefill_us, request_us, context_us, experts_us = (
        features[name].coefficient if name in features else 0.0 for name in names
    )
    requests, context, touched = (features[name].mean or 0.0 if name in features else 0.0 for name in names[2:])
    if hits_hidden and prefill_us and features["prefill_tokens"].status == "prior_only":
        prefill_us = 0.0
    return StepCosts(
        prefill_us,
        request_us + (context_us * context / max(requests, 1.0) if "requests" in features else 0.0),
        experts_us * (1.0 - touched),
        step_us + experts_us * touched,
        request_us,
        context_us,
    )


def _only_intercept(
    intercept_us: float, rows: int, stderr: float | None = None, effective_rows: float | None = None
) -> TargetSnapshot:
    intercept = FeatureSnapshot(
        name="intercept", unit="us", coefficient=intercept_us, stderr=stderr, status="weak", reason=Reason.DERIVED
    )
    effective = float(rows) if effective_rows is None else effective_rows
    model = ModelSnapshot(features=[intercept], rows=rows, effective_rows=effective)
    return TargetSnapshot(vector="alpha", unit="us", champion="portable", models={"portable": model})
