"""What a request sees, by mean values over the engine's steps: TTFT, ITL and E2E of N equal requests; how many fit.

The engine works in steps; every running request takes part in each. With P prompt tokens of which a share h is in the
prefix cache, O output tokens, N requests in flight, at most S running and at most T tokens in a step:

    p  = max(1, (1 - h) P)                     tokens to prefill; the last one is always computed
    n  = min(N, S, what the KV cache holds)    running; the other N - n wait for a slot
    c  = P + O / 2                             mean context of a request that decodes

**Who prefills.** A step computes at most T > n tokens, of which every decode takes one, so that a prompt takes
q = max(1, ceil(p / (T - n + 1))) chunks. Each that decodes ends after a step with probability 1 / (O - 1), and a new
one takes its place and prefills. Of j that prefill, as many end in a step as their chunks and the tokens left by
decodes allow. Both flows balance, between i - 1 and i of the n - 1 others, whom one request meets (arrival theorem):

    mu_j = min(j / q, (T - n + j) / p)
    pi_i = pi_(i-1) (n - i) / ((O - 1) mu_i)            i = 1 ... n - 1; sum pi_i = 1

Where all prompts fit, this is the binomial of n - 1 and q / (q + O - 1); where they do not, prefills pile up until as
many requests are left to decode as the tokens can feed. Steps stand for time.

**Mean steps.** step() is the rising surface of shapes.py, times ``mean_factor`` (mean ÷ robust fit) unless rows cover
many steps each, whose stalls are in them:

    s_j  = step(p mu_j, n - j + ceil(q mu_j), (n - j) c)
    ITL  = sum pi_i s_i                        a step that a request that decodes waits for
    k    = sum pi_i k_(i+1),  k_j = j / mu_j   steps of a prefill: its chunks, and more where prefills fill every step
    k V  = sum pi_i k_(i+1) s_(i+1)
    any  = E s² / 2 E s                        what is left of a step at any moment of it, s_i with pi_i
    rest = u² any + (1 - u²) (ITL - t)         what is left of the step that an arrival meets; u = t / ITL < 1; n > 1

A client that has its answer sends again at once and so meets the beginning of the next step: t later, the time that
passes before a request is queued, at least TURNAROUND_US. Where t is longer than a step, or arrivals do not follow
ends (a given rate), they meet any moment: rest = any.

All but the last of q > 1 chunks are full: k V and the rest are at least those of a prompt of q - 1 full chunks. Where
prefills fill every step, k V has the wait for its turn in it: of the rest and of a step scheduled ahead only as much is
added as keeps TTFT from falling below that of the prompt which just fills them.

**Times.**

    R    = k V + (O - 1) ITL                   time in the batch
    wait = the longer of
           (N - n) R / n                       for a slot: n slots, each free every R, at the end of a step
           rest + E s                          for the end of the running step, which nobody interrupts; E s for the
                                               step handed over before, where the engine schedules one ahead
    TTFT = api_queueing(n) + wait + k V + first_response     at n in the batch: the API hands out everybody's tokens
    E2E  = TTFT + (O - 1) ITL + post_decode
    rate = N / E2E                             requests per second (Little's law)

TTFT is at least the longest step, as step_time says it, of one request with as many tokens or fewer (at most T). It
never falls with P, and ITL never with N, but for a small share where one prefill takes the place of many decodes.

N need not be whole: between two whole numbers the answer is interpolated. It is the number a request *meets*, itself
included; under random arrivals that is one more than the mean number in flight. Microseconds.

The band of each is the same sum over the lower and the upper ends: of one step in ten below and above. Means over many
steps scatter less than steps do; what remains is the misfit of the form, which does not average out.

**How many fit.** The largest concurrency that keeps the targets:

    N* = max { N : for every N' <= N  ITL(N') <= target and TTFT(N') <= target }        N whole, 1 to the slots

The first N that breaks a target ends the search, so that an engine which fills up slowly never passes through a load
that breaks it. With ``safe`` the upper end of the band is held against the target instead of the mean. The search
doubles N until a target breaks and bisects the last octave; between the probes ITL and TTFT are taken as rising.

What it leaves out: requests of different size share one mean, so a mix of a few very long prompts with short ones is
seen too smooth; preemption; the correlation of phases when all clients start at once.

Guards: O - 1 >= 1e-9; weights are relative to where the flows balance, which is the peak, and end at 1e-6 of it.

References: mean value analysis of closed queueing networks (Reiser and Lavenberg, JACM 1980), with one batch server;
finite-source queue with state-dependent service (Kleinrock, Queueing Systems I, 1975).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .document import Target
from .faults import REQUESTS_MAX, TOKENS_MAX, BadInputError, checked
from .step_model import Band, Limits, StepModel

CONCURRENCY_MAX = 4096
"""Where the search for the largest concurrency ends."""
_MS_MAX = 1e9
_OUTLIER = 2.0
_TAIL = 1e-6
_DECODES_MIN = 1e-9
TURNAROUND_US = 2_000.0
"""From a client's last token to its next request in the queue, where the API server's part is not known: assumed, a
millisecond each way."""

made = tuple.__new__
"""A named tuple from its fields in order, at a third of what its constructor costs."""


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
        return made(Workload, (prompt, output, uncached if uncached > 1.0 else 1.0, prompt + output / 2.0))

    def kv_requests_max(self, kv_tokens: float) -> float:
        """How many fit the KV cache: mean tokens held, and two standard deviations for the phases of all.

        n (P + O/2) + 2 O sqrt(n / 12) <= K, solved for sqrt(n). Shared prefixes are counted each time: whether they
        are held once is not known.
        """
        mean, spread = self.context, self.output / math.sqrt(12.0)
        root = (math.sqrt(spread * spread + mean * kv_tokens) - spread) / mean
        return root * root


class Prefills:
    """mu and pi of n requests; ``bound``: more prefills wait than there are tokens for. ``shares`` wants a whole n."""

    __slots__ = ("_budget", "_decodes", "_tokens", "bound", "chunks", "requests", "room", "tokens_bound")

    def __init__(self, requests: float, output: float, tokens: float, budget: float) -> None:
        self.requests = requests
        self.room = budget - (requests - 1.0)
        self.chunks = math.ceil(tokens / self.room) if tokens > self.room else 1
        decodes = output - 1.0
        self._decodes = decodes if decodes > _DECODES_MIN else _DECODES_MIN
        self._tokens = tokens
        self._budget = budget
        self.tokens_bound = (budget - requests) * (self.chunks + output - 1.0) / requests
        self.bound = tokens > self.tokens_bound

    def ended(self, j: float) -> float:
        """mu_j."""
        free, full = j / self.chunks, (self._budget - self.requests + j) / self._tokens
        return full if full < free else free

    def mean(self) -> float:
        """Mean of i, where both flows balance."""
        others, decodes = self.requests - 1.0, self._decodes
        free = others * self.chunks / (self.chunks + decodes)
        full = (others * self._tokens - (self._budget - self.requests) * decodes) / (self._tokens + decodes)
        most = full if full > free else free
        return others if others < most else most

    def shares(self) -> list[tuple[float, float]]:
        """Values of i with pi_i."""
        last, start = int(self.requests) - 1, round(self.mean())
        below, above = [], [(float(start), 1.0)]
        weight = 1.0
        for i in range(start + 1, last + 1):
            weight *= self._ratio(i)
            if weight < _TAIL:
                break
            above.append((float(i), weight))
        weight = 1.0
        for i in range(start, 0, -1):
            weight /= self._ratio(i)
            if weight < _TAIL:
                break
            below.append((i - 1.0, weight))
        terms = below[::-1] + above
        total = sum(weight for _, weight in terms)
        return [(i, weight / total) for i, weight in terms]

    def _ratio(self, i: int) -> float:
        """Of pi_i to the one before it; it falls with i, so that pi has one peak, where both flows balance."""
        return (self.requests - i) / (self._decodes * self.ended(i))


class Batch(NamedTuple):
    """Mean steps of one batch.

    ``itl`` is a step that decodes wait for, ``prefill`` all of the ``k`` steps that a prefill takes. ``rest_us`` is
    what is left of the step that an arrival meets, ``ahead_us`` the step that was scheduled behind it. ``pieces`` are
    prefill tokens of the steps that were asked for.
    """

    itl: Band
    prefill: Band
    k: float
    rest_us: float
    ahead_us: float
    prefill_bound: bool
    pieces: tuple[float, ...]

    def blended(self, other: Batch, part: float) -> Batch:
        """``part`` of the way to the other."""

        def between(a: float, b: float) -> float:
            return a + part * (b - a)

        def band_between(a: Band, b: Band) -> Band:
            return between(a[0], b[0]), between(a[1], b[1]), between(a[2], b[2])

        return Batch(
            band_between(self.itl, other.itl),
            band_between(self.prefill, other.prefill),
            between(self.k, other.k),
            between(self.rest_us, other.rest_us),
            between(self.ahead_us, other.ahead_us),
            self.prefill_bound or other.prefill_bound,
            self.pieces,
        )


def batch_of(steps: StepModel, work: Workload, n: float, turnaround_us: float, *, ahead: bool) -> Batch:
    """The mean steps of n requests, each of which comes so long after a step's end that another one ended with.

    ``turnaround_us`` is inf where arrivals follow nothing; ``ahead``: the engine hands over a step before the last one
    ended.
    """
    whole = int(n)
    batch = _whole_batch(steps, work, whole, turnaround_us, ahead=ahead)
    if n > whole:
        return batch.blended(_whole_batch(steps, work, whole + 1, turnaround_us, ahead=ahead), n - whole)
    return batch


def _whole_batch(steps: StepModel, work: Workload, n: int, turnaround_us: float, *, ahead: bool) -> Batch:
    prefills = Prefills(n, work.output, work.uncached, steps.budget)
    itl, prefill, k, rest_us = _cut(steps, work, n, work.uncached, turnaround_us)
    ahead_us = itl[0] if ahead and n > 1 else 0.0
    if prefills.bound:
        filled_itl, filled, _, filled_rest_us = _cut(steps, work, n, prefills.tokens_bound, turnaround_us)
        spare_us = max(filled[0] + filled_rest_us + (filled_itl[0] if ahead and n > 1 else 0.0) - prefill[0], 0.0)
        rest_us = min(filled_rest_us, spare_us)
        ahead_us = spare_us - rest_us
    if steps.of_means:
        pieces: tuple[float, ...] = (work.uncached * prefills.ended(prefills.mean()),)
    else:
        pieces = (work.uncached / k, 0.0) if work.output > 1.0 else (work.uncached / k,)
    return made(Batch, (itl, prefill, k, rest_us, ahead_us, prefills.bound, pieces))


def _cut(
    steps: StepModel, work: Workload, n: int, tokens: float, turnaround_us: float
) -> tuple[Band, Band, float, float]:
    """ITL, k V, k, and what is left of the step that an arrival meets, with so many tokens to prefill in chunks."""
    prefills = Prefills(n, work.output, tokens, steps.budget)
    itl, prefill, k, rest_us = _sums(steps, prefills, tokens, work.context)
    if prefills.chunks > 1:
        full = (prefills.chunks - 1) * prefills.room
        _, least, _, least_rest_us = _sums(steps, Prefills(n, work.output, full, steps.budget), full, work.context)
        prefill, rest_us = max(prefill, least), max(rest_us, least_rest_us)
    if n > 1 and turnaround_us < itl[0] and rest_us < math.inf:
        late = (turnaround_us / itl[0]) ** 2
        rest_us = late * rest_us + (1.0 - late) * (itl[0] - turnaround_us)
    return itl, prefill, k, rest_us if n > 1 else 0.0


def _sums(steps: StepModel, prefills: Prefills, tokens: float, context: float) -> tuple[Band, Band, float, float]:
    """ITL, k V, k, and the mean rest of a step."""
    n, table, factor = prefills.requests, steps.surface.rising, steps.mean_factor

    def step(j: float) -> Band:
        ended = prefills.ended(j)
        started = min(j, math.ceil(prefills.chunks * ended))
        return steps.band(table, tokens * ended, n - j + started, (n - j) * context)

    low = high = middle = prefill_us = prefill_low = prefill_high = k = square = 0.0
    following, following_times = -1.0, (0.0, 0.0, 0.0)
    for j, share in prefills.shares():
        times = following_times if j == following else step(j)
        following, following_times = j + 1.0, step(j + 1.0)
        k += (turns := share * following / prefills.ended(following))
        middle += share * times[0]
        low += share * times[1]
        high += share * times[2]
        prefill_us += turns * following_times[0]
        prefill_low += turns * following_times[1]
        prefill_high += turns * following_times[2]
        square += share * times[0] * times[0]
    rest_us = factor * square / (2.0 * middle) if middle > 0.0 else 0.0
    itl = (middle * factor, low * factor, high * factor)
    return itl, (prefill_us * factor, prefill_low * factor, prefill_high * factor), k, rest_us


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
        queueing = targets.get("api_queueing")
        self._ahead = ahead or (queueing is not None and queueing.step_ahead_us is not None)
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

    def estimate(self, work: Workload, concurrency: object, *, follows: bool = True) -> RequestEstimate:
        """What ``concurrency`` requests in flight see; ``follows``: each takes the place of one that ended."""
        in_flight = checked("concurrency", concurrency, 1.0, REQUESTS_MAX)
        slots, name = self.slots(work)
        if slots < 1.0:
            raise BadInputError("prompt_tokens", f"not even one such request fits the engine ({name})")
        running = slots if slots < in_flight else in_flight
        known_us = sum([time(work, None)[0] for time in self._before])
        turnaround_us = max(TURNAROUND_US, known_us) if follows else math.inf
        at = batch_of(self._steps, work, running, turnaround_us, ahead=self._ahead)
        tokens = work.output - 1.0
        itl = at.itl if tokens else (0.0, 0.0, 0.0)
        queued = (in_flight - running) / running
        ttft, e2e = self._sums(work, at, running, queued)
        per_s = in_flight / e2e[0] * 1e6 if e2e[0] > 0.0 else 0.0
        steps, held = self._steps, running * work.context * tokens / (at.k + tokens)
        outside = steps.outside(at.pieces[0], running, held)
        for piece in at.pieces[1:]:
            outside = tuple(dict.fromkeys((*outside, *steps.outside(piece, running, held))))
        first, between, whole = made(Estimate, ttft), made(Estimate, itl), made(Estimate, e2e)
        usable = not steps.reasons
        if outside:
            share = steps.spread(at.pieces[0], running, held)
            first, between, whole = first.widened(share), between.widened(share), whole.widened(share)
            usable = steps.usable(outside, at.pieces[0], running, held)
        rates = (per_s, per_s * work.output)
        return made(
            RequestEstimate, (in_flight, running, first, between, whole, *rates, at.prefill_bound, outside, usable)
        )

    def _sums(self, work: Workload, at: Batch, running: float, queued: float) -> tuple[Band, Band]:
        """TTFT and E2E; ``queued``: requests that wait for a slot, in parts of those that run.

        Low of the wait is where the arrival meets the end of a step; high, where it meets the beginning. Who waits
        for a slot waits for the end of a step, too, so a queue that begins makes nothing faster.
        """
        tokens = work.output - 1.0
        (itl, itl_low, itl_high), (prefill, prefill_low, prefill_high) = at.itl, at.prefill
        decode, decode_low, decode_high = tokens * itl, tokens * itl_low, tokens * itl_high
        wait = max(queued * (prefill + decode), at.rest_us + at.ahead_us)
        wait_low = max(queued * (prefill_low + decode_low), at.ahead_us)
        wait_high = max(queued * (prefill_high + decode_high), 2.0 * at.rest_us + at.ahead_us)
        ttft, ttft_low, ttft_high = wait + prefill, wait_low + prefill_low, wait_high + prefill_high
        for time in self._before:
            us, low, high = time(work, running)
            ttft, ttft_low, ttft_high = ttft + us, ttft_low + low, ttft_high + high
        least_us = self._steps.surface.least_us(min(work.uncached, self._steps.budget))
        ttft, ttft_high = max(ttft, least_us), max(ttft_high, least_us)
        e2e, e2e_low, e2e_high = ttft + decode, ttft_low + decode_low, ttft_high + decode_high
        if self._after is not None:
            us, low, high = self._after(work, running)
            e2e, e2e_low, e2e_high = e2e + us, e2e_low + low, e2e_high + high
        return (ttft, ttft_low, ttft_high), (e2e, e2e_low, e2e_high)


def _request_time(target: Target | None, feature: str) -> Callable[[Workload, float | None], Band] | None:
    """A time outside of the steps by the request and those in the batch (None: as usual); None: none was learned."""
    model = target.models.get("portable") if target is not None else None
    if target is None or model is None or not model.coefficients:
        return None
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
        middle_us, low_us, high_us = fit_us * mean_factor + more_us, fit_us * low + more_us, fit_us * high + more_us
        return (middle_us, low_us, high_us) if low_us >= 0.0 else (max(middle_us, 0.0), 0.0, max(high_us, 0.0))

    return time


# ------------------------------------------------------------------- how many fit


class Plan(NamedTuple):
    """The answer of :meth:`tracefit.Config.plan`.

    Attributes:
        concurrency: the largest one that keeps the targets; 0 if not even one request does.
        limit: what ends it: ``itl`` or ``ttft`` (compute: one more request breaks it), ``token_budget`` (prefills
            fill every step), ``max_num_seqs``, ``kv_capacity``; ``none`` where the search ended because nobody said.
        at: what requests see there (at 1 where the concurrency is 0).
        curve: the same at 1, 2, 4, … and at ``concurrency``, up to twice as many.
        sustains_rate: whether ``concurrency`` serves the rate that was asked for; None without a rate.
        replicas: engines that the rate needs within the targets; None without a rate or without an answer.
        at_rate: what requests see at that rate on one engine; None if one engine cannot serve it.
    """

    concurrency: int
    limit: str
    at: RequestEstimate
    curve: tuple[RequestEstimate, ...]
    sustains_rate: bool | None
    replicas: int | None
    at_rate: RequestEstimate | None


class Slo(NamedTuple):
    """Targets in microseconds, inf where there is none; ``safe`` holds the upper end against them."""

    itl_us: float
    ttft_us: float
    safe: bool

    def broken_by(self, at: RequestEstimate) -> str:
        """Which target this load breaks, or nothing."""
        itl_us = at.itl.high if self.safe else at.itl.us
        ttft_us = at.ttft.high if self.safe else at.ttft.us
        return "itl" if itl_us > self.itl_us else "ttft" if ttft_us > self.ttft_us else ""


def planned(loop: ClosedLoop, work: Workload, itl_ms: object, ttft_ms: object, rate: object, *, safe: bool) -> Plan:
    """The largest concurrency within the targets; ``rate`` is in requests per second."""
    slo = Slo(_target_us("itl_ms", itl_ms), _target_us("ttft_ms", ttft_ms), safe)
    wanted = None if rate is None else checked("rate", rate, 1e-9, 1e9)
    slots, slot_limit = loop.slots(work)
    if slots < 1.0:
        raise BadInputError("prompt_tokens", f"not even one such request fits the engine ({slot_limit})")
    end = int(min(slots, CONCURRENCY_MAX))
    points: dict[int, RequestEstimate] = {}

    def at(n: int) -> RequestEstimate:
        if n not in points:
            points[n] = loop.estimate(work, n)
        return points[n]

    best = _largest(at, slo, end)
    limit = slot_limit if best == end and slots < CONCURRENCY_MAX + 1 else "none"
    if best < end:
        limit = "token_budget" if at(best + 1).prefill_bound else slo.broken_by(at(best + 1))
    here = at(max(best, 1))
    sizes = sorted({*_doubling(min(end, max(2 * best, 8))), max(best, 1)})
    served = replicas = crowd = None
    if wanted is not None:
        served = best > 0 and here.requests_per_s >= wanted
        replicas = math.ceil(wanted / here.requests_per_s) if best > 0 and here.requests_per_s > 0.0 else None
        crowd = _at_rate(loop, work, wanted, end)
    return Plan(best, limit, here, tuple(at(n) for n in sizes), served, replicas, crowd)


def _target_us(name: str, value: object) -> float:
    return math.inf if value is None else 1e3 * checked(name, value, 1e-6, _MS_MAX)


def _largest(at: Callable[[int], RequestEstimate], slo: Slo, end: int) -> int:
    """The last whole N before the first that breaks a target."""
    good, n = 0, 1
    while not slo.broken_by(at(n)):
        good = n
        if n == end:
            return end
        n = min(2 * n, end)
    bad = n
    while bad - good > 1:
        middle = (good + bad) // 2
        if slo.broken_by(at(middle)):
            bad = middle
        else:
            good = middle
    return good


def _doubling(end: int) -> list[int]:
    return [1 << power for power in range(end.bit_length()) if 1 << power <= end] + [end]


def _at_rate(loop: ClosedLoop, work: Workload, rate: float, end: int) -> RequestEstimate | None:
    """The load at which one engine finishes ``rate`` requests per second; None if it never does."""
    if loop.estimate(work, end, follows=False).requests_per_s < rate:
        return None
    low, high = 1.0, float(end)
    if loop.estimate(work, low, follows=False).requests_per_s >= rate:
        return loop.estimate(work, low, follows=False)
    for _ in range(24):
        middle = 0.5 * (low + high)
        if loop.estimate(work, middle, follows=False).requests_per_s < rate:
            low = middle
        else:
            high = middle
    return loop.estimate(work, high, follows=False)
