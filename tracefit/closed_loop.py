"""What each of N requests meets in a closed loop, by mean values over the engine's steps.

The engine works in steps; every running request takes part in each. With P prompt tokens of which a share h is in the
prefix cache, O output tokens, N requests in flight, at most S running and at most T tokens in a step:

    p  = max(1, (1 - h) P)                     tokens to prefill; the last one is always computed
    S' = min(S, what the KV cache holds)       slots
    n                                          in the batch; the other N - n wait, for a slot or for the running step
    c  = P + O / 2                             mean context of a request that decodes

**Who prefills.** A step computes at most T > n tokens, of which every decode takes one, so that a prompt takes

    q = max(1, p / (T - n + 1) + 1/2)

chunks: on the mean over prompts whose sizes spread, the last chunk is half full. Each that decodes ends after a step
with probability 1 / (O - 1), and a new one takes its place and prefills. Of j that prefill, as many end in a step as
their chunks and the tokens left by decodes allow. Both flows balance, between i - 1 and i of the n - 1 others, whom one
request meets (arrival theorem):

    mu_j = min(j / q, (T - n + j) / p)
    pi_i = pi_(i-1) (n - i) / ((O - 1) mu_i)            i = 1 ... n - 1; sum pi_i = 1

Where all prompts fit, this is the binomial of n - 1 and q / (q + O - 1); where they do not, prefills pile up until as
many requests are left to decode as the tokens can feed. Steps stand for time.

**Who is in the batch.** A request takes part in L = k + O - 1 steps, and lets w pass before: of N that do so,

    n = min(S', N L / (L + w))                 at least 1; w = max(1, t / M + 1/2) + ahead, by Little's law

k, below, grows with n, so the n is taken that is its own answer. A client that has its answer sends again at once: t
later, the time that passes before a request is queued, at least TURNAROUND_US. So it meets the beginning of the next
step, whose end it waits for, or any moment of one, where t is longer than a step. ahead is the share 1 - L^-n of steps
after which somebody goes on, where the engine schedules one ahead, else 0. Of one token each, half of all are in a
step, and the others in the next. Who waits so is in no queue for tokens: where prefills fill the steps, that queue is
the shorter for it. Who decodes meets n / N of each of the others (arrival theorem): its ITL is that of n + 1 - n / N.

**Mean steps.** step() is the monotone surface of shapes.py, times ``mean_factor`` (mean ÷ robust fit) unless rows cover
many steps each, whose stalls are in them:

    s_j  = step(p mu_j, n - j + q mu_j, (n - j) c)   single steps tell that prompts that have no part cost nothing
    ITL  = sum pi_i s_i                        a step that a request that decodes waits for
    k_j  = max(q, (j - 1/2) p / (T - n + j))   steps of the last of j prefills: the first of them is half done
    k    = sum pi_i k_(i+1)                    steps of a prefill: its chunks, and more where others fill the steps
    k V  = sum pi_i k_(i+1) s_(i+1)
    M    = (k V + (O - 1) ITL) / (k + O - 1)   any step of a request
    rest = max(M - t, M / 2)                   what is left of the step that an arrival meets

**The first token** comes after k V + the longer of

    (N - n) R / n - t                          n = S': the wait for a slot, each of which is free every R
    rest + ahead M                             the end of the running step, which nobody interrupts, and of the one
                                               handed over before
    R = k V + (O - 1) ITL                      time in the batch

M is here that of n - max(1 - u, 0) (O - 1) / L requests: who decodes no more leaves its place empty, as far as prefills
do not fill the steps.

    u = n p / (T - n) (q + O - 1)              above 1 more prefills wait than there are tokens for

Where shapes say no more than the coefficients do, it never comes earlier with a longer prompt, nor does ITL fall with
N. ITL falls where a batch was measured to be faster than smaller ones.

N need not be whole, nor need n: between two whole n what is met is interpolated, and of N < 2 a request meets N - 1 of
rest. N is the number a request *meets*, itself included; under random arrivals that is one more than the mean number in
flight. Microseconds.

Ends of bands are the same sums over the lower and the upper ends of steps: of one in ten below and above. Which part of
a step is left, from half to all of it, does not depend on what steps take: of both ends the squares are added.

Guards: O - 1 >= 1e-9; weights are relative to where the flows balance, which is the peak, and end at 1e-6 of it.

References: mean value analysis of closed queueing networks (Reiser and Lavenberg, JACM 1980), with one batch server;
finite-source queue with state-dependent service; what is left of one in service, of sizes much alike (Kleinrock,
Queueing Systems I, 1975).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import mul
from typing import NamedTuple

from .exceptions import TOKENS_MAX, checked
from .shapes import Band, together
from .step_model import StepModel

_TAIL = 1e-6
_DECODES_MIN = 1e-9


class Workload(NamedTuple):
    """Requests of one kind, checked: P, O, p = (1 - h) P with at least one token, and the mean context of a decode."""

    prompt: float
    output: float
    uncached: float
    context: float

    @staticmethod
    def of(prompt_tokens: object, output_tokens: object, prefix_hit: object) -> Workload:
        """From numbers nobody has looked at yet."""
        prompt = checked("prompt_tokens", prompt_tokens, 1.0, TOKENS_MAX)
        output = checked("output_tokens", output_tokens, 1.0, TOKENS_MAX)
        hit = checked("prefix_hit", prefix_hit, 0.0, 1.0)
        uncached = prompt * (1.0 - hit)
        return Workload(prompt, output, max(uncached, 1.0), prompt + output / 2.0)

    def kv_requests_max(self, kv_tokens: float) -> float:
        """How many fit the KV cache: mean tokens held, and two standard deviations for the phases of all.

        n (P + O/2) + 2 O sqrt(n / 12) <= K, solved for sqrt(n). Shared prefixes are counted each time: whether they
        are held once is not known.
        """
        mean, spread = self.context, self.output / math.sqrt(12.0)
        root = (math.sqrt(spread * spread + mean * kv_tokens) - spread) / mean
        return root * root


class Prefills:
    """mu and pi of n requests, n a whole number."""

    def __init__(self, requests: float, output: float, tokens: float, budget: float) -> None:
        self.requests = requests
        self.tokens = tokens
        self._left = budget - requests
        self.chunks = max(1.0, tokens / (self._left + 1.0) + 0.5)
        self._decodes = max(output - 1.0, _DECODES_MIN)

    @property
    def load(self) -> float:
        """The u of the module."""
        return self.requests * self.tokens / (self._left * (self.chunks + self._decodes))

    def ended(self, j: float) -> float:
        """mu_j."""
        return min(j / self.chunks, (self._left + j) / self.tokens)

    def steps_of(self, j: float) -> float:
        """k_j."""
        return max(self.chunks, (j - 0.5) * self.tokens / (self._left + j))

    def mean(self) -> float:
        """Mean of i, where both flows balance."""
        others, decodes = self.requests - 1.0, self._decodes
        free = others * self.chunks / (self.chunks + decodes)
        full = (others * self.tokens - self._left * decodes) / (self.tokens + decodes)
        return min(max(full, free), others)

    def shares(self) -> tuple[int, list[float]]:
        """The first i, and pi of it and of all that follow."""
        peak = round(self.mean())
        below, above = list(self._weights(peak, -1)), list(self._weights(peak, 1))
        terms = [*reversed(below), 1.0, *above]
        total = sum(terms)
        return peak - len(below), [weight / total for weight in terms]

    def _weights(self, peak: int, way: int) -> Iterator[float]:
        """Shares of one i after the other, in parts of the peak's: pi_i / pi_(i-1) falls, so there is one peak."""
        i, weight = peak, 1.0
        while 0 <= i + way < self.requests:
            more = max(i, i + way)
            weight *= ((self.requests - more) / (self._decodes * self.ended(more))) ** way
            if weight < _TAIL:
                return
            yield weight
            i += way


class Met(NamedTuple):
    """Of one batch: ITL, k V, rest + ahead M, k, w, and u."""

    itl: Band
    own: Band
    rest: Band
    k: float
    away: float
    load: float

    def towards(self, other: Met, part: float) -> Met:
        """``part`` of the way to the other."""

        def between(here: float, there: float) -> float:
            return here + part * (there - here)

        itl, own, rest = (ends(between, *pair) for pair in zip(self[:3], other[:3], strict=True))
        return Met(itl, own, rest, *map(between, self[3:], other[3:]))


def ends(of: Callable[..., float], *bands: Band) -> Band:
    """The same of the middles, of the lower and of the upper ends."""
    us, low, high = map(of, *bands)
    return us, low, high


def weighted(weights: Sequence[float], bands: Sequence[Band]) -> Band:
    """The sum of the middles, of the lower and of the upper ends."""
    us, low, high = (sum(map(mul, weights, end)) for end in zip(*bands, strict=True))
    return us, low, high


class ClosedLoop:
    """The formulas of the module's docstring on the steps of one engine.

    ``ahead``: whether it schedules a step ahead.
    """

    def __init__(self, steps: StepModel, *, ahead: bool) -> None:
        self._steps = steps
        self._ahead = ahead

    def met(self, work: Workload, in_flight: float, slots: float, turnaround_us: float) -> tuple[Met, Band]:
        """What a request meets of so many in flight, and when its first token comes.

        Args:
            work: the requests.
            in_flight: N.
            slots: S'.
            turnaround_us: t.
        """
        most, tokens = min(in_flight, slots), work.output - 1.0
        whole = cache(lambda size: self._times(work, size, turnaround_us))

        def of(size: float) -> Met:
            below = int(size)
            return whole(below).towards(whole(below + 1), size - below) if size > below else whole(below)

        def more(size: int) -> float:
            """So many more take part in a step, where so many do."""
            at = whole(size)
            life = at.k + tokens
            return in_flight * life / (life + at.away) - size

        n, last = most, math.ceil(most)
        first = bisect_left(range(last + 1), True, 1, key=lambda size: more(size) <= 0.0)
        if first <= last:
            n = 1.0 if first == 1 else min(first - more(first) / (more(first) - more(first - 1)), most)
        at = of(n)
        left = max(n - max(1.0 - at.load, 0.0) * tokens / (at.k + tokens), 1.0)
        at = at._replace(itl=of(min(n + 1.0 - n / in_flight, most)).itl, rest=of(left).rest)
        queued, others = (in_flight - n) / n if n == most else 0.0, min(in_flight - 1.0, 1.0)

        def first_us(own_us: float, itl_us: float, rest_us: float) -> float:
            return own_us + max(queued * (own_us + tokens * itl_us) - turnaround_us, others * rest_us)

        own, itl, rest = ((us, us, us) for us, *_ in (at.own, at.itl, at.rest))
        us, low, high = ends(first_us, own, itl, at.rest)
        return at, together(ends(first_us, at.own, at.itl, rest), (0.0, low - us, high - us))

    def _times(self, work: Workload, n: int, turnaround_us: float) -> Met:
        """Of n requests in the batch."""
        steps, tokens = self._steps, work.output - 1.0
        prefills = Prefills(n, work.output, work.uncached, steps.budget_of(n))

        def step(j: int) -> Band:
            ended = prefills.ended(j)
            requests = n if steps.of_means else n - j + prefills.chunks * ended
            return steps.band(work.uncached * ended, requests, (n - j) * work.context, mean=True)

        first, shares = prefills.shares()
        some = range(first, first + len(shares) + 1)
        bands = list(map(step, some))
        turns = list(map(mul, shares, map(prefills.steps_of, some[1:])))
        itl, prefill, k = weighted(shares, bands[:-1]), weighted(turns, bands[1:]), sum(turns)
        life = k + tokens
        mean_us = (prefill[0] + tokens * itl[0]) / life
        half_us, ahead = mean_us / 2.0, self._ahead * (1.0 - life**-n)
        rests = max(mean_us - turnaround_us, half_us), half_us, mean_us
        rest = ends(lambda of_running: of_running + ahead * mean_us, rests)
        wait = max(turnaround_us / mean_us + 0.5, 1.0) if mean_us > 0.0 else 0.5
        return Met(itl, prefill, rest, k, wait + ahead, prefills.load)
