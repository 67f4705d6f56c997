"""How many requests fit: the largest concurrency that keeps the targets, what limits it, and the curve.

    N* = max { N : for every N' <= N  ITL(N') <= target and TTFT(N') <= target }        N whole, 1 to the slots

A noisy factor may let TTFT fall where prefills fill every step; the first N that breaks a target ends the search, so
that an engine which fills up slowly never passes through a load that breaks it. With ``safe`` the upper end of the band
is held against the target instead of the mean. The search doubles N until a target breaks and bisects the last octave;
between the probes ITL and TTFT are taken as rising.

Limits, in words: ``itl`` or ``ttft`` (compute: one more request breaks the target), ``token_budget`` (prefills fill
every step), ``max_num_seqs``, ``kv_capacity``; ``none`` where the search ended at 4,096 because nobody said a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from .closed_loop import ClosedLoop, RequestEstimate
from .faults import BadInputError, checked
from .workload import Workload

CONCURRENCY_MAX = 4096
_MS_MAX = 1e9
_At = Callable[[int], RequestEstimate]


class Plan(NamedTuple):
    """The answer of :meth:`tracefit.Config.plan`.

    Attributes:
        concurrency: the largest one that keeps the targets; 0 if not even one request does.
        limit: what ends it; see the module's docstring.
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


def plan(loop: ClosedLoop, work: Workload, itl_ms: object, ttft_ms: object, rate: object, *, safe: bool) -> Plan:
    """See the module's docstring; ``rate`` is in requests per second."""
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


def _largest(at: _At, slo: Slo, end: int) -> int:
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
    if loop.estimate(work, end).requests_per_s < rate:
        return None
    low, high = 1.0, float(end)
    if loop.estimate(work, low).requests_per_s >= rate:
        return loop.estimate(work, low)
    for _ in range(24):
        middle = 0.5 * (low + high)
        if loop.estimate(work, middle).requests_per_s < rate:
            low = middle
        else:
            high = middle
    return loop.estimate(work, high)
