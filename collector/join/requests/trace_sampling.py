"""Which share of its request spans an API process sends, told by their trace ids.

Trace ids are random, and the head samplers of most SDKs keep a trace iff the low 64 bits of its id are below
rate * 2^64. With u the low 64 bits / 2^64 of n traces that came,

    rate = max(u) (n + 1) / n           P(max(u) <= m) = m^n where every span is sent

Every span is sent as soon as one u >= 0.95. Spans are sampled once m^n < 1e-12: after 32 traces at half of the spans or
fewer, after 539 at 0.95. In between, nothing is known.

Guards: a trace of several requests counts once. Ids may not be random (a counter, a time, a constant): a claim needs
u that lie evenly below their maximum (their mean within four standard deviations of max(u) / 2) and a rate that anybody
would choose. After 539 spans without an answer the ids cannot tell. A sampler may be switched on or off: the latest 32,
64, ... traces are looked at by themselves, and sampled spans are called whole at the second u >= 0.95. Samplers that
decide otherwise (by a hash, by the upper half of the id) are not seen.

Reference: TraceIdRatioBased of the OpenTelemetry SDKs for Python, Go and Rust.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from online.state import Count, Finite, saved

WHOLE = 0.95
"""Coefficients are off by 3 % at this rate, and by 9 % at 0.9."""
_CHANCE = 1e-12
"""Of calling whole spans sampled, with every span that comes."""
_TRACES_MIN, _TRACES_MAX = 32, 1024
_LATEST = (32, 64, 128, 256, 512)
_RATE_MIN = 1e-6
_UNEVEN = 4.0
_TOO_FEW_TRACES = "too few requests have ended to tell whether spans are sampled"
_SPANS_ENOUGH = math.ceil(math.log(_CHANCE) / math.log(WHOLE))


class TraceSampling:
    """Of one API process; bounded by ``_TRACES_MAX`` numbers."""

    STATE = saved("trace_sampling", rate=Finite | None, _spans=Count, _shares=list[Finite])

    def __init__(self) -> None:
        self.rate: float | None = None
        """1 where all spans are sent; None while that is not known."""
        self._spans = 0
        self._shares: list[float] = []

    @property
    def is_sampled(self) -> bool:
        """Whether too many requests are missing to rebuild a batch."""
        return self.rate is not None and self.rate < WHOLE

    @property
    def share(self) -> float | None:
        """The rate; where the ids cannot tell it, spans are believed to be whole. None while it is not known."""
        return 1.0 if self.rate is None and self._spans >= _SPANS_ENOUGH else self.rate

    def add(self, trace_id: bytes) -> None:
        """Take the trace id of one more request."""
        share = int.from_bytes(trace_id[8:16], "big") / 2**64
        if share >= WHOLE:
            self.rate = None if self.is_sampled else 1.0
            self._spans, self._shares = 0, []
            return
        self._spans = min(self._spans + 1, _SPANS_ENOUGH)
        if share in self._shares:
            return
        self._shares.append(share)
        full = len(self._shares) == _TRACES_MAX
        if full or not self.is_sampled:
            known = len(self._shares)
            rates = (_sampled_at(self._shares[-traces:]) for traces in (known, *_LATEST) if traces <= known)
            self.rate = next((rate for rate in rates if rate is not None), self.rate)
        if full:
            self._shares = []


def _sampled_at(shares: list[float]) -> float | None:
    """The rate at which these traces were kept; None where that is not sure."""
    traces, largest = len(shares), max(shares)
    rate = largest * (traces + 1) / traces
    if traces < _TRACES_MIN or not _RATE_MIN <= rate < WHOLE or largest**traces >= _CHANCE:
        return None
    uneven = abs(sum(shares) / traces / largest - 0.5) * math.sqrt(12.0 * traces)
    return rate if uneven < _UNEVEN else None


def doubts_of(shares: Collection[float | None]) -> list[str]:
    """Why nothing that was learned from emitters which send such shares of their spans should be used.

    The first requests of one more process say nothing against what others tell.
    """
    known = [share for share in shares if share is not None]
    doubts = []
    if rates := sorted(100.0 * share for share in known if share < WHOLE):
        low, high = f"{rates[0]:.2g}", f"{rates[-1]:.2g}"
        at = f"{low} %" if low == high else f"{low} to {high} %"
        sampled = f"request spans are sampled at about {at}, so the batch cannot be rebuilt"
        doubts.append(f"{sampled}; send all spans or let tracefit scrape the page")
    if len(known) < len(shares) and len(known) == len(rates):
        doubts.append(_TOO_FEW_TRACES)
    return doubts
