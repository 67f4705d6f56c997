"""How many requests fit an engine: the largest concurrency that keeps the targets.

    N* = max { N : for every N' <= N  ITL(N') <= target and TTFT(N') <= target }        N whole, 1 to the slots

The first N that breaks a target ends the search, so that an engine which fills up slowly never passes through a load
that breaks it. With ``safe`` the upper end of the band is within the targets at N*, too; at smaller N the mean is, for
bands of batches that are seldom seen are wide. The search looks at the middles of all cells up to the last batch that
was measured to be faster than smaller ones; then it doubles N until a target breaks, and bisects what lies between;
between the probes ITL and TTFT are taken as rising.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from .closed_loop import Workload
from .exceptions import BadInputError, checked
from .request_times import RequestEstimate, RequestTimes

CONCURRENCY_MAX = 4096
"""Where the search for the largest concurrency ends."""
_MS_MAX = 1e9


class Plan(NamedTuple):
    """The answer of :meth:`tracefit.Config.plan`.

    Attributes:
        concurrency: the largest one that keeps the targets; 0 if not even one request does.
        limit: what ends it: ``itl`` or ``ttft`` (compute: one more request breaks it), ``token_budget`` (prefills
            fill every step), ``max_num_seqs``, ``kv_capacity``; ``seen``, the largest batch that was seen, where no
            limit is known; ``none`` where that is not known either.
        at: what requests see there (at 1 where the concurrency is 0).
        curve: the same at 1, 2, 4, … and at ``concurrency``, up to twice as many.
        replicas: engines that the rate needs within the targets; None without a rate or without an answer.
    """

    concurrency: int
    limit: str
    at: RequestEstimate
    curve: tuple[RequestEstimate, ...]
    replicas: int | None


def planned(loop: RequestTimes, work: Workload, itl_ms: object, ttft_ms: object, rate: object, *, safe: bool) -> Plan:
    """The largest concurrency within the targets; ``rate`` is in requests per second."""
    if itl_ms is not None and work.output <= 1.0:
        raise BadInputError("itl_ms", "an answer of one token has no time between tokens; give another target")
    itl_us, ttft_us = _target_us("itl_ms", itl_ms), _target_us("ttft_ms", ttft_ms)
    wanted = None if rate is None else checked("rate", rate, 1e-9, 1e9)
    slots, slot_limit = loop.slots(work)
    end = int(min(slots, CONCURRENCY_MAX))

    @cache
    def at(n: int) -> RequestEstimate:
        return loop.estimate(work, n)

    def broken(n: int, *, end_of_band: bool = False) -> str:
        """Which target this load breaks, or nothing."""
        itl, ttft = at(n).itl, at(n).ttft
        if (itl.high if end_of_band else itl.us) > itl_us:
            return "itl"
        return "ttft" if (ttft.high if end_of_band else ttft.us) > ttft_us else ""

    best = _largest(broken, end, loop.steps.surface.rises)
    if safe:
        best = _last_within(lambda n: broken(n, end_of_band=True), best)
    limit = slot_limit
    if best < end:
        limit = "token_budget" if at(best + 1).prefill_bound else broken(best + 1, end_of_band=safe)
    elif slots >= CONCURRENCY_MAX + 1:
        largest = int(loop.steps.seen.get("requests", (0.0, 0.0))[1])
        best, limit = (min(best, largest), "seen") if largest else (best, "none")
    here = at(max(best, 1))
    last = min(end, max(2 * best, 8))
    sizes = sorted({*(1 << power for power in range(last.bit_length())), last, max(best, 1)})
    curve = tuple(at(n) for n in sizes)
    replicas = math.ceil(wanted / here.requests_per_s) if wanted is not None and best else None
    return Plan(best, limit, here, curve, replicas)


def _target_us(name: str, value: object) -> float:
    return math.inf if value is None else 1e3 * checked(name, value, 1e-6, _MS_MAX)


def _largest(broken: Callable[[int], str], end: int, rises: Sequence[int]) -> int:
    """The last whole N before the first that breaks a target; from one of ``rises`` to the next times rise."""
    doubled = (max(rises, default=1) << power for power in range(end.bit_length()))
    before = 0
    for n in (*(each for each in (*rises, *doubled) if each < end), end):
        if broken(n):
            return _first(broken, before + 1, n) - 1
        before = n
    return end


def _last_within(broken: Callable[[int], str], best: int) -> int:
    """The last whole N up to ``best`` that breaks no target, if larger ones do; ever longer steps are taken down."""
    above, below = best + 1, best
    while below > 0 and broken(below):
        above, below = below, below - (best + 1 - below)
    return _first(broken, max(below, 0) + 1, above) - 1


def _first(broken: Callable[[int], str], start: int, end: int) -> int:
    """The first N from ``start`` on that breaks a target; ``end`` does, or is the end."""
    return bisect_left(range(end), True, start, key=lambda each: bool(broken(each)))
