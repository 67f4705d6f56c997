"""ARRIVED -> FIRST_TOKEN of requests that meet a busy engine in which nobody waits for a first token.

Where spans tell queue and prefill, w = T - queue - prefill is the API's own time and the rest of a running decode step,
uniform on (0, s): the API's own time is the lower end of a uniform distribution, by its P10 and P50,

    api = w10 - 0.1 s, s = (w50 - w10) / 0.4          se = 0.354 s / sqrt(n)

(variances of sample quantiles: Kendall and Stuart, The Advanced Theory of Statistics 1, 10.10). Where they tell
neither, a request gets its first token after

    T = api + (1/2 + a + 1) s + b P        s: time of a step, its own pace   P: prompt tokens   b: of ``step_time``

half a running step, its own prefill, and a steps that were handed over before it came: a = 0 where the engine schedules
when a step ends, 1 where it schedules one ahead (asynchronous). a is the one of the two whose residuals of T on (1, P)
are smaller in the mean of their absolute values; api is the median of what remains. Microseconds.

Here se = 1.2533 * 1.4826 MAD / sqrt(n), that of a median.

The API's process hands out the tokens of all that run, the newest last, so that api grows with each of the n requests
that were in flight on arrival, the request included. With d what a step grows by with each of them,
by ``step_time`` (the own pace is that of a later batch, so it cannot say), r is w - d n / 2 or
T - (3/2 + a) d n - b P, and the slope that of least squares

    c = sum m r / sum m^2          se = sqrt(V) / sum m^2          m: what a line through P leaves of n

of those within three robust standard deviations of the median of r (Frisch and Waugh, Econometrica 1933: busy hours
may have longer prompts). V is the sum of squares of m times the residual, summed before over 32 requests in order,
which share their noise (as in online/rls), but at least over each. Published is c (1 - (se / c)^2), none where
c < se: what is hardly there comes and goes without a jump (Breiman's garrote, Technometrics 1995). api is a median, and
so of the number of requests x for which median(r) = median(r - c n) + c x: between the fewest and the most.

Guards: 20 requests at least; steps far from the own pace (the batch that grew since) average out. A wait for a slot
does not: such requests are left out, by somebody else who waits too, or because T / s is twice the median.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import msgspec
import numpy as np

from online import Floats, InFlightSnapshot, median_of

FIRST_TOKENS_MAX = 2048
LEVEL_MAX = 1024
"""Requests of each process that tell api; c, which hardly wanders but is hard to see, is told by twice as many."""
_FIRST_TOKENS_MIN = 20
_STEP_MET, _STEPS_WAITED = 0.5, 1.5
_SANE_MIN, _SANE_MAX = (1.0, 1.0, 0.0, 0.0), 1e12
"""No step is shorter than a microsecond, and no request waits so long, has so many tokens or meets so many."""
_WAITED_MORE = 2.0
"""In medians of T / s: who waited longer waited for something else."""
_ALIKE = 32
_NO_SPREAD = 0.01
"""Of the number in flight, beside what the prompts say of it: a variance below tells nothing."""
_MAD_TO_SD, _OUTLIER = 1.4826, 3.0
_LEAST_US = 1e-3
"""Less per request is none."""


class BusyArrival(msgspec.Struct, frozen=True, array_like=True):
    """A request that met others, none of whom waited for a first token.

    ``wait_us``: its time to the first token, less queue and prefill where its span tells them; ``pace_us``: of its own
    tokens; ``in_flight``: those it met and itself, per engine; 0 where they were not counted (in a state of an earlier
    version).
    """

    wait_us: float
    pace_us: float
    prompt_tokens: float
    in_flight: float = 0.0

    def among(self, engines: float) -> BusyArrival:
        """The same where so many engines share those in flight; with more processes than engines, fewer than one."""
        return msgspec.structs.replace(self, in_flight=self.in_flight / engines)


class FirstTokens(NamedTuple):
    """The API's own time, its standard error, whether the engine schedules a step ahead and how long that one is."""

    api_us: float
    stderr_us: float
    scheduled_ahead: bool = False
    step_ahead_us: float = 0.0
    in_flight: InFlightSnapshot | None = None


class StepCosts(NamedTuple):
    """What ``step_time`` says that a prompt token and one more request with its context cost: b and d."""

    prefill_us_per_token: float = 0.0
    us_per_request: float = 0.0


def explained(
    recent: Collection[BusyArrival], costs: StepCosts, arrivals: Collection[BusyArrival] = ()
) -> FirstTokens | None:
    """The formula on T, s and P of each of the recent requests, and c of all; None where they are too few."""
    known = _without_slot_waits(_sane(recent))
    if len(known) < _FIRST_TOKENS_MIN:
        return None
    first_token_us, pace_us, prompt_tokens, _ = known.T
    misfits_us = [
        float(np.abs(_without_line(first_token_us - steps * pace_us, prompt_tokens)).mean())
        for steps in (_STEPS_WAITED, _STEPS_WAITED + 1.0)
    ]
    ahead = misfits_us[1] < misfits_us[0]
    rest_us = first_token_us - (_STEPS_WAITED + ahead) * pace_us - costs.prefill_us_per_token * prompt_tokens
    api_us = median_of(rest_us)
    spread_us = _MAD_TO_SD * median_of(np.abs(rest_us - api_us))
    stderr_us = 1.2533 * spread_us / math.sqrt(len(known))
    step_ahead_us = median_of(pace_us) if ahead else 0.0
    per_request = _per_request(known, _without_slot_waits(_sane(arrivals)), _STEPS_WAITED + ahead, costs)
    return FirstTokens(max(api_us, 0.0), stderr_us, ahead, step_ahead_us, per_request)


def told(
    waits_us: Collection[float],
    costs: StepCosts,
    recent: Collection[BusyArrival] = (),
    arrivals: Collection[BusyArrival] = (),
) -> FirstTokens | None:
    """The lower end of w of the recent requests, and c of all; None where they are too few."""
    if len(waits_us) < _FIRST_TOKENS_MIN:
        return None
    low_us, middle_us = np.quantile(np.array(waits_us), (0.1, 0.5)).tolist()
    step_us = (middle_us - low_us) / 0.4
    stderr_us = 0.354 * step_us / math.sqrt(len(waits_us))
    per_request = _per_request(_sane(recent), _sane(arrivals), _STEP_MET, StepCosts(0.0, costs.us_per_request))
    return FirstTokens(max(low_us - 0.1 * step_us, 0.0), stderr_us, in_flight=per_request)


def _sane(arrivals: Collection[BusyArrival]) -> Floats:
    """Those whose numbers can be, (n, 4)."""
    told = np.array([msgspec.structs.astuple(arrival) for arrival in arrivals], float).reshape(-1, len(_SANE_MIN))
    return told[((told >= _SANE_MIN) & (told < _SANE_MAX)).all(axis=1)]  # false for NaN too


def _without_slot_waits(arrivals: Floats) -> Floats:
    if not len(arrivals):
        return arrivals
    steps_waited = arrivals[:, 0] / arrivals[:, 1]
    usual: Floats = arrivals[steps_waited <= _WAITED_MORE * median_of(steps_waited)]
    return usual


def _without_line(values: Floats, prompt_tokens: Floats) -> Floats:
    """What a line through the prompt tokens leaves of them."""
    columns = np.stack((np.ones(len(values)), prompt_tokens / max(float(prompt_tokens.max()), 1.0)), axis=1)
    solution, *_ = np.linalg.lstsq(columns, values, rcond=None)
    left: Floats = values - columns @ solution
    return left


def _per_request(recent: Floats, arrivals: Floats, steps: float, costs: StepCosts) -> InFlightSnapshot | None:
    """What is published of c, and the x that api of the recent ones is of."""
    rest_us, prompt_tokens, in_flight = _grown(arrivals, steps, costs)
    recent_us, _, recent_in_flight = _grown(recent, steps, costs)
    if len(rest_us) < _FIRST_TOKENS_MIN or not len(recent_us):
        return None
    apart, left_us = _without_line(in_flight, prompt_tokens), _without_line(rest_us, prompt_tokens)
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
    requests = (median_of(recent_us) - median_of(recent_us - slope_us * recent_in_flight)) / slope_us
    requests = min(max(requests, float(recent_in_flight.min())), float(recent_in_flight.max()))  # rounding
    return InFlightSnapshot(requests=requests, us_per_request=slope_us, stderr_us=stderr_us)


def _grown(arrivals: Floats, steps: float, costs: StepCosts) -> tuple[Floats, Floats, Floats]:
    """r, P and n of those that were counted and are no outliers."""
    wait_us, _, prompt_tokens, in_flight = arrivals[arrivals[:, 3] > 0.0].T
    rest_us = wait_us - steps * costs.us_per_request * in_flight - costs.prefill_us_per_token * prompt_tokens
    if not len(rest_us):
        return rest_us, prompt_tokens, in_flight
    away_us = np.abs(rest_us - median_of(rest_us))
    near = away_us <= _OUTLIER * _MAD_TO_SD * median_of(away_us)
    return rest_us[near], prompt_tokens[near], in_flight[near]
