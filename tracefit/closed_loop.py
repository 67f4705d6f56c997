"""What a request sees: TTFT, ITL and E2E of N equal requests in flight, by mean values over the engine's steps.

The engine works in steps; every running request takes part in each. With P prompt tokens of which a share h is in the
prefix cache, O output tokens, N requests in flight, at most S running and at most T tokens in a step:

    p  = max(1, (1 - h) P)                     tokens to prefill; the last one is always computed
    n  = min(N, S, what the KV cache holds)    running; the other N - n wait for a slot
    k  = max(ceil(p / (T - n + 1)),            steps a prefill takes: chunks, or
             n p / (T - n) - (O - 1))          more, when prefills fill every step (prefill-bound)
    L  = k + O - 1                             steps a request stays
    J ~ Binomial(n - 1, k / L)                 of the others, those that prefill in a given step (phases independent)
    c  = P + O / 2                             mean context of a request that decodes
    s(j, m) = step(min(j p/k, T - m + j), m, (m - j) c)       j prefill, m - j decode, in one step of m requests

Mean values follow; step() is the coefficients with the factor of the shape, times ``mean_factor`` (mean ÷ robust fit):

    ITL  = E s(J, n)                           what a request that decodes waits for its next token
    V    = E s(J + 1, n)                       a step in which it prefills itself
    R    = k V + (O - 1) ITL                   time in the batch
    wait = (N - n) R / n                       for a slot: n slots, each free every R
         + E s² / 2 E s                        for the end of the running step, which nobody interrupts, if there
                                               is one (n > 1, N <= n) and k does not count it (not prefill-bound)
         + E s                                 for the step that was handed over before, where the engine schedules
                                               one ahead (asynchronous), under the same conditions
    TTFT = api_queueing + wait + k V + first_response
    E2E  = TTFT + (O - 1) ITL + post_decode
    X    = N / E2E                             requests per second (Little's law)

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

from .document import Target
from .faults import REQUESTS_MAX, TOKENS_MAX, BadInputError, checked
from .step_model import Limits, StepModel

_TAIL = 1e-4
_TERMS_MAX = 24
_OUTLIER = 2.0


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
        return Estimate(self.us, max(0.0, self.low - share * self.us), self.high + share * self.us)


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


class Workload(NamedTuple):
    """Requests of one kind, checked: ``uncached`` is p, ``output`` is O."""

    prompt: float
    output: float
    uncached: float

    @staticmethod
    def of(prompt_tokens: object, output_tokens: object, prefix_hit: object) -> Workload:
        """From numbers nobody has looked at yet."""
        prompt = checked("prompt_tokens", prompt_tokens, 1.0, TOKENS_MAX)
        output = checked("output_tokens", output_tokens, 1.0, TOKENS_MAX)
        hit = checked("prefix_hit", prefix_hit, 0.0, 1.0)
        return Workload(prompt, output, max(1.0, prompt * (1.0 - hit)))

    def kv_requests_max(self, kv_tokens: float) -> float:
        """How many fit the KV cache: mean tokens held, and two standard deviations for the phases of all.

        n (P + O/2) + 2 O sqrt(n / 12) <= K, solved for sqrt(n). Shared prefixes are counted each time: whether they
        are held once is not known.
        """
        mean, spread = self.prompt + self.output / 2.0, self.output / math.sqrt(12.0)
        root = (math.sqrt(spread * spread + mean * kv_tokens) - spread) / mean
        return root * root


class ClosedLoop:
    """The formulas of the module's docstring on one configuration."""

    __slots__ = ("_after", "_ahead", "_before", "_steps", "limits")

    def __init__(self, steps: StepModel, targets: Mapping[str, Target], *, ahead: bool = False) -> None:
        self._steps = steps
        self._ahead = ahead
        self.limits: Limits = steps.limits
        self._before = (
            _request_time(targets.get("api_queueing"), "prompt_tokens"),
            _request_time(targets.get("first_response"), ""),
        )
        self._after = _request_time(targets.get("post_decode"), "output_tokens")

    def slots(self, work: Workload) -> tuple[float, str]:
        """Requests that run at the same time at most, and which limit says so; inf where nobody said."""
        limits = self.limits
        slots, name = math.inf, "none"
        if limits.max_num_seqs is not None:
            slots, name = float(limits.max_num_seqs), "max_num_seqs"
        if limits.kv_tokens is not None and (held := work.kv_requests_max(limits.kv_tokens)) < slots:
            slots, name = held, "kv_capacity"
        if limits.max_num_batched_tokens is not None and limits.max_num_batched_tokens - 1 < slots:
            slots, name = float(limits.max_num_batched_tokens - 1), "token_budget"
        return slots, name

    def estimate(self, work: Workload, concurrency: object) -> RequestEstimate:
        """What ``concurrency`` requests in flight see."""
        in_flight = checked("concurrency", concurrency, 1.0, REQUESTS_MAX)
        slots, name = self.slots(work)
        if slots < 1.0:
            raise BadInputError("prompt_tokens", f"not even one such request fits the engine ({name})")
        running = min(in_flight, slots)
        whole = int(running)
        part = running - whole
        at = self._at(work, whole)
        if part > 0.0:
            at = at.blended(self._at(work, whole + 1), part)
        return self._composed(work, in_flight, running, at)

    def _at(self, work: Workload, n: int) -> _Batch:
        """The mean steps of a batch of n requests, n whole."""
        budget = float(self.limits.max_num_batched_tokens or math.inf)
        p, output = work.uncached, work.output
        room = max(1.0, budget - (n - 1))
        chunks = math.ceil(p / room) if p > room else 1.0
        full = n * p / max(1.0, budget - n) - (output - 1.0)
        k = max(chunks, full)
        stay = k + output - 1.0
        context, piece = work.prompt + work.output / 2.0, p / k
        band, factor = self._steps.band, self._steps.mean_factor

        def step(prefilling: float) -> tuple[float, float, float]:
            tokens = min(prefilling * piece, max(1.0, budget - (n - prefilling)))
            return band(tokens, n, (n - prefilling) * context)

        decode, prefill = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        first = second = 0.0
        following, following_times = -1.0, (0.0, 0.0, 0.0)
        for j, share in _binomial(n - 1, k / stay):
            times = following_times if j == following else step(j)
            following, following_times = j + 1.0, step(j + 1.0)
            for side in (0, 1, 2):
                decode[side] += share * times[side]
                prefill[side] += share * following_times[side]
            first += share * times[0]
            second += share * times[0] * times[0]
        itl = _scaled(decode, factor)
        bound = full > chunks  # then k counts the steps that a request waits in
        meets_a_step = n > 1 and first > 0.0 and not bound
        rest_us = factor * second / (2.0 * first) if meets_a_step else 0.0
        ahead_us = factor * first if meets_a_step and self._ahead else 0.0
        return _Batch(itl, _scaled(prefill, factor), k, rest_us, ahead_us, bound)

    def _composed(self, work: Workload, in_flight: float, running: float, at: _Batch) -> RequestEstimate:
        tokens = work.output - 1.0
        # low of the waits is where the arrival meets the end of a step; high, where it meets the beginning
        queued = max(0.0, in_flight - running) / running
        sides = []
        before, after = [time(work) for time in self._before], self._after(work)
        for side, rest_us in enumerate((at.rest_us, 0.0, 2.0 * at.rest_us)):
            stay_us = at.k * at.prefill[side] + tokens * at.itl[side]
            wait_us = queued * stay_us if queued > 0.0 else rest_us + at.ahead_us
            ttft_us = wait_us + at.k * at.prefill[side] + before[0][side] + before[1][side]
            sides.append((ttft_us, ttft_us + tokens * at.itl[side] + after[side]))
        ttft, e2e = (Estimate(*(each[part] for each in sides)) for part in (0, 1))
        itl = at.itl if tokens else Estimate(0.0, 0.0, 0.0)
        per_s = in_flight / e2e.us * 1e6 if e2e.us > 0.0 else 0.0
        steps, piece = self._steps, work.uncached / at.k
        context = running * (work.prompt + work.output / 2.0) * tokens / (at.k + tokens)
        outside = dict.fromkeys(steps.outside(piece, running, context))
        if tokens:
            outside.update(dict.fromkeys(steps.outside(0.0, running, context)))
        if outside:
            share = steps.spread_us(piece, running, context) / max(steps.band(piece, running, context)[0], 1e-9)
            ttft, itl, e2e = (each.widened(share) for each in (ttft, itl, e2e))
        usable = steps.usable(outside, piece, running, context)
        return RequestEstimate(
            in_flight,
            running,
            ttft,
            itl,
            e2e,
            per_s,
            per_s * work.output,
            at.prefill_bound,
            tuple(outside),
            usable,
        )


class _Batch(NamedTuple):
    """Mean steps of one batch.

    ``rest_us`` is what is left of the step that an arrival meets, ``ahead_us`` the step that was scheduled behind it.
    """

    itl: Estimate
    prefill: Estimate
    k: float
    rest_us: float
    ahead_us: float
    prefill_bound: bool

    def blended(self, other: _Batch, part: float) -> _Batch:
        """``part`` of the way to the other."""

        def between(a: float, b: float) -> float:
            return a + part * (b - a)

        return _Batch(
            Estimate(*map(between, self.itl, other.itl)),
            Estimate(*map(between, self.prefill, other.prefill)),
            between(self.k, other.k),
            between(self.rest_us, other.rest_us),
            between(self.ahead_us, other.ahead_us),
            self.prefill_bound or other.prefill_bound,
        )


def _scaled(sides: list[float], factor: float) -> Estimate:
    return Estimate(sides[0] * factor, sides[1] * factor, sides[2] * factor)


def _binomial(n: int, share: float) -> list[tuple[float, float]]:
    """Values with their probabilities; exact for few, three points of equal mean and variance for many."""
    mean = n * share
    if n == 0 or share >= 1.0 - 1e-9:
        return [(float(n), 1.0)]
    if mean > _TERMS_MAX / 3.0:
        half = math.sqrt(3.0 * mean * (1.0 - share))
        low, high = max(0.0, mean - half), min(float(n), mean + half)
        return [(low, 1.0 / 6.0), (mean, 2.0 / 3.0), (high, 1.0 / 6.0)]
    odds = share / (1.0 - share)
    probability, left, terms = (1.0 - share) ** n, 1.0, []
    for j in range(n + 1):
        terms.append((float(j), probability))
        left -= probability
        if left < _TAIL:
            break
        probability *= odds * (n - j) / (j + 1)
    return [(j, probability / (1.0 - left)) for j, probability in terms]


def _request_time(target: Target | None, feature: str) -> Callable[[Workload], Estimate]:
    """A time outside of the steps as a function of the request; 0 where nothing was learned."""
    model = target.models.get("portable") if target is not None else None
    if target is None or model is None or not model.coefficients:
        return _nothing
    by_name = {each.name: each.value for each in model.coefficients}
    base_us = max(by_name.get("intercept", 0.0) - target.step_ahead_us, 0.0)  # that step is simulated
    per_token_us = by_name.get(feature, 0.0)
    mean_factor = min(max(target.mean_factor, 1.0 / _OUTLIER), _OUTLIER)
    p10, p90 = target.interval.pooled if target.interval is not None else (1.0, 1.0)

    def time(work: Workload) -> Estimate:
        fit_us = base_us + per_token_us * (work.prompt if feature == "prompt_tokens" else work.output)
        mean_us = fit_us * mean_factor
        return Estimate(mean_us, min(fit_us * p10, mean_us), max(fit_us * p90, mean_us))

    return time


def _nothing(work: Workload) -> Estimate:
    del work
    return Estimate(0.0, 0.0, 0.0)
