"""What a request sees: TTFT, ITL and E2E of N equal requests in flight, by mean values over the engine's steps.

The engine works in steps; every running request takes part in each. With P prompt tokens of which a share h is in the
prefix cache, O output tokens, N requests in flight, at most S running and at most T tokens in a step:

    p  = max(1, (1 - h) P)                     tokens to prefill; the last one is always computed
    n  = min(N, S, what the KV cache holds)    running; the other N - n wait for a slot
    c  = P + O / 2                             mean context of a request that decodes

Mean values follow; step() is the coefficients with the factor of the shape, times ``mean_factor`` (mean ÷ robust fit)
unless rows cover many steps each, whose stalls are in them. How many of the others prefill: prefills.py; the mean
steps: batch_steps.py.

    ITL  a step that a request that decodes waits for    V  one in which it prefills, or waits for its turn to
    k    such steps: as many as its prompt has chunks, and more where prefills fill every step
    R    = k V + (O - 1) ITL                   time in the batch
    wait = (N - n) R / n                       for a slot: n slots, each free every R
         + E s² / 2 E s                        for the end of the running step, which nobody interrupts, if there
                                               is one (n > 1, N <= n); less where k is nearly all of it
                                               (prefill-bound: batch_steps.py);
                                               where the caller saw its last token, what is left: step_phase.py
         + E s                                 for the step that was handed over before, where the engine schedules
                                               one ahead (asynchronous), under the same conditions
    TTFT = api_queueing(n) + wait + k V + first_response     at n in the batch: the API hands out everybody's tokens
    E2E  = TTFT + (O - 1) ITL + post_decode
    rate = N / E2E                             requests per second (Little's law)

TTFT never falls with P, ITL never falls with N (near_steps.py has why steps do not); where prefills fill every step
and factors are noisy, one prefill takes the place of many decodes, and the difference may be noise.

N need not be whole: between two whole numbers the answer is interpolated. It is the number a request *meets*, itself
included; under random arrivals that is one more than the mean number in flight. Microseconds.

The band of each is the same sum over the lower and the upper ends: of one step in ten below and above. Means over many
steps scatter less than steps do; what remains is the misfit of the form, which does not average out.

What it leaves out: requests of different size share one mean, so a mix of a few very long prompts with short ones is
seen too smooth; preemption; the correlation of phases when all clients start at once.

Reference: mean value analysis of closed queueing networks (Reiser and Lavenberg, JACM 1980), with one batch server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .batch_steps import Batch, batch_of
from .document import Target
from .faults import REQUESTS_MAX, BadInputError, checked
from .shape_table import Band
from .step_model import Limits, StepModel
from .step_phase import rest_of_step
from .workload import Workload, made

_OUTLIER = 2.0
_SINCE_MAX_US = 1e12


class Estimate(NamedTuple):
    """A time in microseconds with its band."""

    us: float
    low: float
    high: float

    @property
    def ms(self) -> float:
        """The middle, in milliseconds."""
        return self.us / 1e3

    def widened(self, share: float) -> Estimate:
        """Both ends further out by this share of the middle."""
        more_us = share * self.us
        return made(Estimate, (self.us, self.low - more_us if self.low > more_us else 0.0, self.high + more_us))


class RequestEstimate(NamedTuple):
    """What requests see at one load.

    Attributes:
        concurrency: requests in flight; ``running`` of them are in the batch.
        ttft, itl, e2e: mean times; ``itl`` is 0 for a single output token.
        requests_per_s, output_tokens_per_s: of the whole engine.
        prefill_bound: prefills fill every step, so that more requests only wait longer.
        extrapolated, usable: as for a step.
    """

    concurrency: float
    running: float
    ttft: Estimate
    itl: Estimate
    e2e: Estimate
    requests_per_s: float
    output_tokens_per_s: float
    prefill_bound: bool
    extrapolated: tuple[str, ...]
    usable: bool


class ClosedLoop:
    """The formulas of the module's docstring on one configuration."""

    __slots__ = ("_after", "_ahead", "_before", "_steps", "limits")

    def __init__(self, steps: StepModel, targets: Mapping[str, Target], *, ahead: bool = False) -> None:
        self._steps = steps
        self._ahead = ahead
        self.limits: Limits = steps.limits
        before = (("api_queueing", "prompt_tokens"), ("first_response", ""))
        self._before = [time for name, each in before if (time := _request_time(targets.get(name), each))]
        self._after = _request_time(targets.get("post_decode"), "output_tokens")

    def slots(self, work: Workload) -> tuple[float, str]:
        """Requests that run at the same time at most, and which limit says so; inf where nobody said."""
        _, token_budget, kv_tokens = self.limits
        slots = self._steps.requests_max
        name = "max_num_seqs" if slots < math.inf else "none"
        if kv_tokens is not None and slots * (work.prompt + work.output) > kv_tokens:  # else all fit at their longest
            held = work.kv_requests_max(kv_tokens)
            slots, name = (held, "kv_capacity") if held < slots else (slots, name)
        if token_budget is not None and token_budget - 1 < slots:
            slots, name = float(token_budget - 1), "token_budget"
        return slots, name

    def estimate(self, work: Workload, concurrency: object, since_token_us: object = None) -> RequestEstimate:
        """What ``concurrency`` requests in flight see; ``since_token_us``: TTFT and E2E of one that arrives then."""
        in_flight = checked("concurrency", concurrency, 1.0, REQUESTS_MAX)
        slots, name = self.slots(work)
        if slots < 1.0:
            raise BadInputError("prompt_tokens", f"not even one such request fits the engine ({name})")
        running = slots if slots < in_flight else in_flight
        at = batch_of(self._steps, work, running, ahead=self._ahead)
        tokens = work.output - 1.0
        itl = at.itl if tokens else (0.0, 0.0, 0.0)
        queued = (in_flight - running) / running
        ttft, e2e = self._sums(work, at, running, queued)
        per_s = in_flight / e2e[0] * 1e6 if e2e[0] > 0.0 else 0.0
        if since_token_us is not None:
            since_us = checked("since_token_us", since_token_us, 0.0, _SINCE_MAX_US)
            if at.rest_us and not queued:
                rest = self._rest(work, at, running, since_us)
                ttft, e2e = _with_rest(ttft, at, rest), _with_rest(e2e, at, rest)
        steps, held = self._steps, running * work.context * tokens / (at.k + tokens)
        outside = steps.outside(at.pieces[0], running, held)
        for piece in at.pieces[1:]:
            outside = tuple(dict.fromkeys((*outside, *steps.outside(piece, running, held))))
        first, between, whole = made(Estimate, ttft), made(Estimate, itl), made(Estimate, e2e)
        usable = not steps.reasons
        if outside:
            alone_us = steps.band(at.pieces[0], running, held)[0]
            share = steps.spread_us(at.pieces[0], running, held) / max(alone_us, 1e-9)
            first, between, whole = first.widened(share), between.widened(share), whole.widened(share)
            usable = steps.usable(outside, at.pieces[0], running, held)
        rates = (per_s, per_s * work.output)
        return made(
            RequestEstimate, (in_flight, running, first, between, whole, *rates, at.prefill_bound, outside, usable)
        )

    def _rest(self, work: Workload, at: Batch, running: float, since_token_us: float) -> Band:
        """What is left of the running step, so long after a token came back."""
        outside_us = sum([time(work, running)[0] for time in self._before])
        return rest_of_step(2.0 * at.rest_us, at.itl[0], since_token_us, outside_us)

    def _sums(self, work: Workload, at: Batch, running: float, queued: float) -> tuple[Band, Band]:
        """TTFT and E2E; ``queued``: requests that wait for a slot, in parts of those that run.

        Low of the wait is where the arrival meets the end of a step; high, where it meets the beginning.
        """
        tokens = work.output - 1.0
        (itl, itl_low, itl_high), (prefill, prefill_low, prefill_high) = at.itl, at.prefill
        decode, decode_low, decode_high = tokens * itl, tokens * itl_low, tokens * itl_high
        if queued:
            wait, wait_low = queued * (prefill + decode), queued * (prefill_low + decode_low)
            wait_high = queued * (prefill_high + decode_high)
        else:
            wait, wait_low, wait_high = at.rest_us + at.ahead_us, at.ahead_us, 2.0 * at.rest_us + at.ahead_us
        ttft, ttft_low, ttft_high = wait + prefill, wait_low + prefill_low, wait_high + prefill_high
        for time in self._before:
            us, low, high = time(work, running)
            ttft, ttft_low, ttft_high = ttft + us, ttft_low + low, ttft_high + high
        e2e, e2e_low, e2e_high = ttft + decode, ttft_low + decode_low, ttft_high + decode_high
        if self._after is not None:
            us, low, high = self._after(work, running)
            e2e, e2e_low, e2e_high = e2e + us, e2e_low + low, e2e_high + high
        return (ttft, ttft_low, ttft_high), (e2e, e2e_low, e2e_high)


def _with_rest(time: Band, at: Batch, rest: Band) -> Band:
    """A time that counts the mean rest of a step, with what is left of this one."""
    return time[0] - at.rest_us + rest[0], time[1] + rest[1], time[2] - 2.0 * at.rest_us + rest[2]


def _request_time(target: Target | None, feature: str) -> Callable[[Workload, float], Band] | None:
    """A time outside of the steps as a function of the request and of those in the batch; None: none was learned."""
    model = target.models.get("portable") if target is not None else None
    if target is None or model is None or not model.coefficients:
        return None
    by_name = {each.name: each.value for each in model.coefficients}
    base_us = max(by_name.get("intercept", 0.0) - target.step_ahead_us, 0.0)  # that step is simulated
    per_token_us = by_name.get(feature, 0.0)
    mean_factor = min(max(target.mean_factor, 1.0 / _OUTLIER), _OUTLIER)
    p10, p90 = target.interval.pooled if target.interval is not None else (1.0, 1.0)
    low, high, of_prompt = min(p10, mean_factor), max(p90, mean_factor), feature == "prompt_tokens"
    usual, per_request_us = target.in_flight or (0.0, 0.0)

    def time(work: Workload, running: float) -> Band:
        fit_us = base_us + per_token_us * (work.prompt if of_prompt else work.output)
        more_us = per_request_us * (running - usual)
        middle_us, low_us, high_us = fit_us * mean_factor + more_us, fit_us * low + more_us, fit_us * high + more_us
        return (middle_us, low_us, high_us) if low_us >= 0.0 else (max(middle_us, 0.0), 0.0, max(high_us, 0.0))

    return time
