"""What a request sees, by mean values over the engine's steps: TTFT, ITL and E2E of N requests of one kind.

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

**Who is in the batch.** A request takes part in L = K + O - 1 steps, and lets w pass before: of N that do so,

    n = min(S', N L / (L + w))                 at least 1; w = max(1, t / M + 1/2) + ahead, by Little's law

K, below, grows with n, so the n is taken that is its own answer. A client that has its answer sends again at once: t
later, the time that passes before a request is queued, at least TURNAROUND_US. So it meets the beginning of the next
step, whose end it waits for, or any moment of one, where t is longer than a step or arrivals do not follow ends (a
given rate: w = 1/2 + ahead). ahead is the share 1 - L^-n of steps after which somebody goes on, where the engine
schedules one ahead, else 0. Of one token each, half of all are in a step, and the others in the next. Who waits so is
in no queue for tokens: where prefills fill the steps, that queue is the shorter for it. Who decodes meets n / N of each
of the others (arrival theorem): its ITL is that of n + 1 - n / N.

**Mean steps.** step() is the monotone surface of shapes.py, times ``mean_factor`` (mean ÷ robust fit) unless rows cover
many steps each, whose stalls are in them:

    s_j  = step(p mu_j, n - j + q mu_j, (n - j) c)   single steps tell that prompts that have no part cost nothing
    ITL  = sum pi_i s_i                        a step that a request that decodes waits for
    k    = sum pi_i k_(i+1),  k_j = j / mu_j   steps of a prefill: its chunks, and more where prefills fill every step
    k V  = sum pi_i k_(i+1) s_(i+1)
    M    = (k V + (O - 1) ITL) / (k + O - 1)   any step of a request
    any  = mean of squares of these / 2 M      what is left of one at any moment of it
    rest = u² any + (1 - u²) (M - t)           what is left of the step that an arrival meets; u = t / M < 1; N > 1

k counts prompts and answers of random size. Of equal ones each waits for the chunks of the others no longer than the
flows ask, e = max(q, n p / (T - n) - (O - 1)) <= k. Sizes of requests spread less than random ones do, and queues are
half as long where services do not vary (Pollaczek and Khinchine): a prefill takes K = k - (k - e) / 3 steps.

**Times.**

    R    = K V + (O - 1) ITL                   time in the batch
    TTFT = api_queueing(min(S', N)) + first_response + K V + the longer of
           (N - n) R / n - t                   n = S': the wait for a slot, each of which is free every R
           rest + ahead M                      the end of the running step, which nobody interrupts, and of the one
                                               handed over before
    E2E  = TTFT + (O - 1) ITL + post_decode
    rate = N / (E2E + t')                      requests per second (Little's law); t' is t without what E2E has of it

Where shapes say no more than the coefficients do, TTFT never falls with P, nor ITL with N. ITL falls where a batch was
measured to be faster than smaller ones.

N need not be whole: between two whole numbers the answer is interpolated. It is the number a request *meets*, itself
included; under random arrivals that is one more than the mean number in flight. Microseconds.

**Bands.** Each is the same sum over the lower and the upper ends: of one step in ten below and above. The rest lies
between that of any moment and a whole step, and what is ahead is no more than one. Independent reasons to be off are
added as squares. ITL is off by 1.28 standard deviations of s_i / (O - 1), as requests keep their places among others.
Rows that are means hardly tell steps with one prompt: TTFT is off by ONE_STEP, and ITL by as much of it as steps have
a prompt. Outside of what was seen, and where rows were means, so that the answer rests on the coefficients, so are
their errors (step_model.py): of a step of the prompt for TTFT, of a mean step for ITL; those of the form only where
rows were means.

Requests whose sizes are all the same gather until they arrive together. Nobody says whether they are, so bands hold
that, too. With g = min(n p, T) tokens of prompts in one step, which takes full = step(g, n, (n - g / p) P), then

    TTFT <= min(burst, (1 + ahead + q) full)           ITL >= s_0 + (full - s_0) (n p / T - 1) / 2 (O - 1)

and E2E is at least the sum of both. Where a request waits and prefills in as many steps as it decodes in, or more
(O - 1 <= k + w), and its ITL may be half as long, the answer names output_tokens and is not usable: it meets
some of the prompts, and nobody says which.

Nor does anybody say how sizes spread. Where not all fit the KV cache at their full length, some may wait for memory or
be preempted: the answer names kv_tokens, and TTFT's upper end has the wait of all but n' = K / (P + O), which is
(N / n' - 1) R. More than S' that are limited by memory do wait, and are preempted and computed again, which is in no
coefficient: such an answer is not usable. Where prefills fill every step hardly anybody decodes, and memory that is
taken does not grow.

A budget T that nobody told is taken to be 2,048, or enough for 2 n. Where it decides, for prompts are longer or several
share a step (k > _BUDGET_DECIDES), the answer names it, and is not usable. So it is for prompts of more than T +
ATTENTION_TOKENS: what their chunks pay for those before is in no coefficient.

**Bursts.** All N arrive at once at an engine without other work. The API hands them over one by one, so that the first
prompt, or as much of it as a step holds, a = min(p, T), has a step of its own. Then each step has T' tokens, T less one
for each prompt that is done, of which half are on the mean: T' = min(T - n / 2, n p - a). The others wait for half of
what is left, and half a step more; prompts of several steps, whose last is half full, for a quarter and for half of
their own rest. Requests that do not fit come in whole waves, w = floor(N / n):

    turns = (1/2 + (n p - a) / 2 T') (1 - a / n p)     p <= T;   else 1/4 + (n p + p - 2 a) / 2 T'
    burst = step(a) + turns step(T')
    TTFT  = api_queueing(n) + burst + w (N/n - (w + 1) / 2) (n/N)² E2E + first_response

What it leaves out: requests of different size share one mean, so a mix of a few very long prompts with short ones is
seen too smooth, and bursts that an API hands over by their length, the shortest first, wait for less; preemption.

Guards: O - 1 >= 1e-9; weights are relative to where the flows balance, which is the peak, and end at 1e-6 of it.

References: mean value analysis of closed queueing networks (Reiser and Lavenberg, JACM 1980), with one batch server;
finite-source queue with state-dependent service (Kleinrock, Queueing Systems I, 1975).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import mul
from typing import NamedTuple

from .document import Target
from .exceptions import REQUESTS_MAX, TOKENS_MAX, BadInputError, checked
from .shapes import NORMAL_P90
from .step_model import Band, Limits, StepModel

_OUTLIER = 2.0
_TAIL = 1e-6
_DECODES_MIN = 1e-9
_EVEN = 1.0 / 3.0
"""How far from queues of random prompts to those of equal ones the middle lies."""
ONE_STEP, _ONE_STEP_TOKENS = 0.15, 512.0
"""How far off the steps of a prompt of so many tokens are by coefficients that were learned from means of many; those
of half as many, or fewer, twice as far, and of twice as many, or more, half."""
ATTENTION_TOKENS = 4096.0
"""So much longer than a step may a prompt be: the attention of its chunks to those before is in no coefficient."""
_BUDGET_DECIDES = 1.05
"""More steps of a prefill than this, where one step would do: others take part of its tokens, or there are too few."""
_KNOWN_WITHIN = 2.0
"""ITL of short answers is usable where requests that gather have at least so large a part of it."""
TURNAROUND_US = 2_000.0
"""From a client's last token to its next request in the queue, where the API server's part is not known: assumed, a
millisecond each way."""


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
    """mu and pi of n requests, n a whole number; ``bound``: more prefills wait than there are tokens for."""

    __slots__ = ("_decodes", "_left", "chunks", "requests", "tokens")

    def __init__(self, requests: float, output: float, tokens: float, budget: float) -> None:
        self.requests = requests
        self.tokens = tokens
        self._left = budget - requests
        self.chunks = max(1.0, tokens / (self._left + 1.0) + 0.5)
        self._decodes = max(output - 1.0, _DECODES_MIN)

    @property
    def bound(self) -> bool:
        """See the class."""
        return self.requests * self.tokens > self._left * (self.chunks + self._decodes)

    def even(self, k: float) -> float:
        """K where one prompt comes after the other."""
        return min(max(self.chunks, self.requests * self.tokens / self._left - self._decodes), k)

    def ended(self, j: float) -> float:
        """mu_j."""
        return min(j / self.chunks, (self._left + j) / self.tokens)

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


class _Times(NamedTuple):
    """Of one batch: ITL, K V, rest + ahead M, k, L, w, and whether prefills fill every step."""

    itl: Band
    own: Band
    rest: Band
    k: float
    life: float
    away: float
    prefill_bound: bool

    def towards(self, other: _Times, part: float) -> _Times:
        """``part`` of the way to the other."""

        def between(here: float, there: float) -> float:
            return here + part * (there - here)

        itl, own, rest = (_ends(between, *pair) for pair in zip(self[:3], other[:3], strict=True))
        k, life, away = map(between, self[3:6], other[3:6])
        return _Times(itl, own, rest, k, life, away, self.prefill_bound or other.prefill_bound)


def _ends(of: Callable[..., float], *bands: Band) -> Band:
    """The same of the middles, of the lower and of the upper ends."""
    us, low, high = map(of, *bands)
    return us, low, high


def _weighted(weights: Sequence[float], bands: Sequence[Band]) -> Band:
    """The sum of the middles, of the lower and of the upper ends."""
    us, low, high = (sum(map(mul, weights, end)) for end in zip(*bands, strict=True))
    return us, low, high


def _square(weights: Sequence[float], bands: Sequence[Band]) -> float:
    """The sum of the squares of the middles of as many as there are weights."""
    return sum([weight * us * us for weight, (us, *_) in zip(weights, bands, strict=False)])


def _unsure(band: Band, us: float) -> Estimate:
    """With another reason, independent of the others, to be off by so much."""
    middle, low, high = band
    return Estimate(middle, max(middle - math.hypot(middle - low, us), 0.0), middle + math.hypot(high - middle, us))


def _rest(square_us2: float, mean_us: float, turnaround_us: float) -> Band:
    """What is left of a step for an arrival that follows the end of one by so much; from the mean of its square."""
    any_us = square_us2 / (2.0 * mean_us or 1.0)
    late = min(turnaround_us / (mean_us or turnaround_us), 1.0) ** 2
    rest_us = late * any_us + (1.0 - late) * max(mean_us - turnaround_us, 0.0)
    return rest_us, min(any_us, rest_us), max(mean_us, rest_us)


class Estimate(NamedTuple):
    """A time in microseconds with its band."""

    us: float
    low: float
    high: float

    @property
    def ms(self) -> float:
        """The middle, in milliseconds."""
        return self.us / 1e3


class RequestEstimate(NamedTuple):
    """What requests see at one load.

    Attributes:
        concurrency: requests in flight; ``running`` of them wait for no slot: in the batch, or in the next one.
        ttft, itl, e2e: mean times; ``itl`` is 0 for a single output token.
        requests_per_s, output_tokens_per_s: of the whole engine.
        prefill_bound: prefills fill every step, so that more requests only wait longer.
        extrapolated, usable: as for a step.
        ttft_burst: mean time to the first token where all of them arrive at once at an engine without other work.
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
    ttft_burst: Estimate


class _Doubts(NamedTuple):
    """What an answer lies outside of, whether it may be bet on, and by which parts TTFT and ITL may be off."""

    outside: tuple[str, ...]
    usable: bool
    first: float
    between: float


class ClosedLoop:
    """The formulas of the module's docstring on one configuration."""

    __slots__ = ("_after", "_ahead", "_before", "_steps", "limits", "turns")

    def __init__(self, steps: StepModel, targets: Mapping[str, Target], *, ahead: bool = False) -> None:
        self._steps = steps.with_stalls()
        queueing = targets.get("api_queueing")
        self._ahead = ahead or (queueing is not None and queueing.step_ahead_us is not None)
        self.limits: Limits = steps.limits
        self.turns = steps.surface.turns
        self._before = (_request_time(queueing, "prompt_tokens"), _request_time(targets.get("first_response"), ""))
        self._after = _request_time(targets.get("post_decode"), "output_tokens")

    def slots(self, work: Workload) -> tuple[float, str]:
        """Requests that run at the same time at most, and which limit says so; inf where nobody said.

        Raises:
            BadInputError: not even one does.
        """
        _, token_budget, kv_tokens = self.limits
        slots = self._steps.requests_max
        name = "max_num_seqs" if slots < math.inf else "none"
        if kv_tokens is not None and slots * (work.prompt + work.output) > kv_tokens:  # else all fit at their longest
            held = work.kv_requests_max(kv_tokens)
            slots, name = (held, "kv_capacity") if held < slots else (slots, name)
        if token_budget is not None and token_budget - 1 < slots:
            slots, name = float(token_budget - 1), "token_budget"
        if slots < 1.0:
            raise BadInputError("prompt_tokens", f"not even one such request fits the engine ({name})")
        return slots, name

    def estimate(self, work: Workload, concurrency: object, *, follows: bool = True) -> RequestEstimate:
        """What ``concurrency`` requests in flight see; ``follows``: each takes the place of one that ended."""
        in_flight = checked("concurrency", concurrency, 1.0, REQUESTS_MAX)
        (slots, limit), tokens = self.slots(work), work.output - 1.0
        running = min(slots, in_flight)
        known_us = sum([time(work, None)[0] for time in self._before])
        turnaround_us = max(TURNAROUND_US, known_us) if follows else math.inf
        whole = int(in_flight)
        at, ttft = self._met(work, whole, slots, turnaround_us)
        if in_flight > whole:
            more, later = self._met(work, whole + 1, slots, turnaround_us)
            part = in_flight - whole
            at, ttft = at.towards(more, part), _ends(lambda one, two: one + part * (two - one), ttft, later)
        api = _ends(lambda *parts: sum(parts), *[time(work, running) for time in self._before])
        ttft = _ends(operator.add, ttft, api)
        e2e = _ends(lambda first, step, last: first + tokens * step + last, ttft, at.itl, self._after(work, running))
        away_us = turnaround_us - known_us if follows else 0.0
        per_s = in_flight / (e2e[0] + away_us) * 1e6 if e2e[0] > 0.0 else 0.0
        burst = self._burst(work, round(running))
        last_us, least_us = self._gathered(work, running, burst[2], at.itl[2])
        e2e = e2e[0], min(e2e[1], api[0] + last_us + tokens * least_us), e2e[2]
        fit = math.inf if self.limits.kv_tokens is None else self.limits.kv_tokens / (work.prompt + work.output)
        names: list[str] = []
        refused: list[str] = []
        if min(in_flight, self._steps.requests_max) > fit and not at.prefill_bound:
            last_us = max(last_us, at.own[0] + (in_flight / fit - 1.0) * (at.own[0] + tokens * at.itl[0]))
            (refused if limit == "kv_capacity" and in_flight > slots else names).append("kv_tokens")
        if 0.0 < tokens <= at.k + at.away and _KNOWN_WITHIN * least_us < at.itl[0]:
            refused.append("output_tokens")
        doubts = self._doubts(work, running, at.k, names, refused)
        first_us, between_us = doubts.first * ttft[0], doubts.between * at.itl[0]
        first, between = _unsure(ttft, first_us), _unsure(at.itl, between_us)
        waves = in_flight / running
        before = math.floor(waves) * (waves - 0.5 * (math.floor(waves) + 1)) / waves**2
        burst = _ends(lambda own, api_us, wave: own + api_us + before * wave, burst, api, e2e)
        return RequestEstimate(
            in_flight,
            running,
            first._replace(high=max(first.high, api[0] + (1.0 + doubts.first) * last_us)),
            between._replace(low=min(between.low, least_us)) if tokens else Estimate(0.0, 0.0, 0.0),
            _unsure(e2e, first_us + tokens * between_us),
            per_s,
            per_s * work.output,
            at.prefill_bound,
            doubts.outside,
            doubts.usable,
            _unsure(burst, doubts.first * burst[0]),
        )

    def _doubts(
        self, work: Workload, running: float, k: float, names: Sequence[str], refused: Sequence[str]
    ) -> _Doubts:
        """Of one answer, beside ``names`` of doubts already known and ``refused``, with which nothing is usable."""
        steps, tokens = self._steps, work.output - 1.0
        held, own, others = running * work.context * tokens / (k + tokens), work.uncached / k, 0.0
        pieces, refused = (own, others) if tokens else (own,), list(refused)
        if steps.of_means:
            prefills = Prefills(running, work.output, work.uncached, steps.budget_of(running))
            others = work.uncached * prefills.ended(prefills.mean())
            pieces, refused = (others,), [*steps.unknown_columns(own, running, held), *refused]
        if work.prompt > steps.budget_of(running) + ATTENTION_TOKENS:
            refused.append("prompt_tokens")
        if k > _BUDGET_DECIDES and self.limits.max_num_batched_tokens is None:
            refused.append("max_num_batched_tokens")
        seen = [name for piece in pieces for name in steps.outside(piece, running, held)]
        outside = tuple(dict.fromkeys((*refused, *seen, *names)))
        usable = steps.usable(outside, pieces[0], running, held) and not refused
        if not (outside or steps.of_means):
            return _Doubts(outside, usable, 0.0, 0.0)
        first, between = (steps.spread(piece, running, held, form=steps.of_means) for piece in (own, others))
        if steps.of_means:
            one_step = ONE_STEP * min(max(_ONE_STEP_TOKENS / work.uncached, 0.5), 2.0)
            with_prompt = min(running * k / (k + tokens), 1.0)
            first, between = math.hypot(first, one_step), math.hypot(between, one_step * with_prompt)
        return _Doubts(outside, usable, first, between)

    def _step(self, work: Workload, tokens: float, decodes: float) -> Band:
        """Of so many tokens of prompts, and of requests whose answers begin."""
        requests = decodes + max(tokens / work.uncached, 1.0)
        return self._steps.band(self._steps.surface.monotone, tokens, requests, decodes * work.prompt)

    def _burst(self, work: Workload, n: int) -> Band:
        """TTFT of so many that arrive at once and fit, without the API's part."""
        prompt, budget = work.uncached, self._steps.budget_of(n)
        alone = min(prompt, budget)
        left = n * prompt - alone
        tokens = max(min(budget - n / 2.0, left), 1.0)
        turns = 0.25 + (left + prompt - alone) / 2.0 / tokens
        if prompt <= budget:
            turns = (0.5 + left / 2.0 / tokens) * left / (n * prompt)
        return _weighted((1.0, turns), (self._step(work, alone, 0.0), self._step(work, tokens, (n - 1) / 2.0)))

    def _gathered(self, work: Workload, running: float, burst_us: float, step_us: float) -> tuple[float, float]:
        """Of loops whose requests gather, TTFT at most, without the API's part, and ITL at least."""
        steps, budget = self._steps, self._steps.budget_of(running)
        _, low, _ = steps.band(steps.surface.monotone, 0.0, running, running * work.context)
        if running <= 1.0:
            return 0.0, low
        chunks = 1.0 if work.uncached <= budget else work.uncached / budget + 0.5
        tokens = min(running * work.uncached, budget)
        _, full_low, full_high = self._step(work, tokens, max(running - tokens / work.uncached, 0.0))
        first_us = min(burst_us + self._ahead * step_us, (1.0 + self._ahead + chunks) * full_high)
        full = min(0.5 * (running * work.uncached / budget - 1.0) / max(work.output - 1.0, 1.0), 1.0)
        return first_us, low + max(full, 0.0) * max(full_low - low, 0.0)

    def _met(self, work: Workload, in_flight: int, slots: float, turnaround_us: float) -> tuple[_Times, Band]:
        """What a request meets of so many in flight, and its TTFT without the API's part."""
        most = min(in_flight, slots)
        tokens, away_us = work.output - 1.0, turnaround_us if turnaround_us < math.inf else 0.0
        whole = cache(lambda size: self._times(work, size, turnaround_us))

        def of(size: float) -> _Times:
            below = int(size)
            return whole(below).towards(whole(below + 1), size - below) if size > below else whole(below)

        def more(size: int) -> float:
            """So many more take part in a step, where so many do."""
            at = whole(size)
            return in_flight * at.life / (at.life + at.away) - size

        n, first = most, bisect_left(range(int(most) + 1), True, 1, key=lambda size: more(size) <= 0.0)
        if first <= most:
            n = 1.0 if first == 1 else first - more(first) / (more(first) - more(first - 1))
        at, queued = of(n), (in_flight - n) / n if n == most else 0.0

        def first_token(own: float, step: float, rest_us: float) -> float:
            return own + max(queued * (own + tokens * step) - away_us, rest_us if in_flight > 1 else 0.0)

        ttft = _ends(first_token, at.own, at.itl, at.rest)
        return at._replace(itl=of(min(n + 1.0 - n / in_flight, most)).itl), ttft

    def _times(self, work: Workload, n: int, turnaround_us: float) -> _Times:
        """Of n requests in the batch."""
        steps, tokens = self._steps, work.output - 1.0
        prefills = Prefills(n, work.output, work.uncached, steps.budget_of(n))

        def step(j: int) -> Band:
            ended = prefills.ended(j)
            requests = n if steps.of_means else n - j + prefills.chunks * ended
            return steps.band(steps.surface.monotone, work.uncached * ended, requests, (n - j) * work.context)

        first, shares = prefills.shares()
        some = range(first, first + len(shares) + 1)
        bands = list(map(step, some))
        turns = [share * j / prefills.ended(j) for share, j in zip(shares, some[1:], strict=True)]
        itl, prefill, k = _weighted(shares, bands[:-1]), _weighted(turns, bands[1:]), sum(turns)
        shorter = 1.0 - _EVEN + _EVEN * prefills.even(k) / k
        own = _ends(lambda us: us * shorter, prefill)
        square = _square(shares, bands)
        mean_us = (prefill[0] + tokens * itl[0]) / (k + tokens)
        life = k * shorter + tokens
        ahead = 1.0 - life**-n if self._ahead else 0.0
        rest = _rest((_square(turns, bands[1:]) + tokens * square) / (k + tokens), mean_us, turnaround_us)
        rest = _ends(lambda us, next_us: us + next_us, rest, (mean_us * ahead, mean_us * ahead, mean_us * self._ahead))
        wait = max(turnaround_us / mean_us + 0.5, 1.0) if mean_us > 0.0 and turnaround_us < math.inf else 0.5
        same_us = NORMAL_P90 * math.sqrt(max(square - itl[0] ** 2, 0.0)) / max(tokens, 1.0)
        return _Times(_unsure(itl, same_us), own, rest, k, life, wait + ahead, prefills.bound)


def _request_time(target: Target | None, feature: str) -> Callable[[Workload, float | None], Band]:
    """A time outside of the steps by the request and those in the batch (None: as usual); 0 where none was learned."""
    model = target.models.get("portable") if target is not None else None
    if target is None or model is None or not model.coefficients:
        return lambda _work, _running: (0.0, 0.0, 0.0)
    by_name = {each.name: each.value for each in model.coefficients}
    base_us = max(by_name.get("intercept", 0.0) - (target.step_ahead_us or 0.0), 0.0)  # that step is simulated
    per_token_us = by_name.get(feature, 0.0)
    mean_factor = min(max(target.mean_factor, 1.0 / _OUTLIER), _OUTLIER)
    p10, p90 = target.interval.pooled if target.interval is not None else (1.0, 1.0)
    low, high, of_prompt = min(p10, mean_factor), max(p90, mean_factor), feature == "prompt_tokens"
    usual, per_request_us = target.in_flight or (0.0, 0.0)

    def time(work: Workload, running: float | None) -> Band:
        fit_us = base_us + per_token_us * (work.prompt if of_prompt else work.output)
        more_us = 0.0 if running is None else per_request_us * (running - usual)
        return _ends(lambda part: max(fit_us * part + more_us, 0.0), (mean_factor, low, high))

    return time
