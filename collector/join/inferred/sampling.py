"""Which share of its request spans an API process sends, told by their trace ids.

Trace ids are random, and a sampler keeps a trace iff a number in [0, 1) that it makes of the id is below its rate.
Most SDKs take the low 64 bits / 2^64; ``_numbers_of`` has the others. With u that number of n traces that came,

    rate = max(u) (n + 1) / n           P(max(u) <= m) = m^n where every span is sent

Every span is sent as soon as one u >= 0.95. Spans are sampled once m^n < 1e-12: after 32 traces at half of the spans or
fewer, after 539 at 0.95. In between, nothing is known. From then on every trace makes the rate better known.

Guards: a trace of several requests counts once. Ids may not be random (a counter, a time, a constant): a claim needs
u that lie evenly below their maximum (their mean within four standard deviations of max(u) / 2) and a rate that anybody
would choose. After 539 spans without an answer the ids cannot tell. A sampler may be switched on or off: the latest
1,024, 512, ... 32 traces are looked at, the most of them first, and of 64 or more it takes a second u >= 0.95 to call
them whole. A rate from 0.95 to 0.97 shows in 1,024 traces. That spans are whole, the first rule says, so that nobody
waits longer whose ids are random in part only; the others may say at any time that they are sampled. Consistent
samplers write their rate into the tracestate, whatever number they use (as a Collector with its own seed does). The
latest traces tell it, but for the three that stand for most requests: a header of one client says nothing of the
others. Samplers that decide otherwise (by chance, by how long a request took) do not show; beside the page of a server,
which counts its requests, they all do. So without a page no coefficient of request spans is more than weak.

References: TraceIdRatioBased of the OpenTelemetry SDKs for Python, Go and Rust, Java, .NET, JavaScript; TraceState,
Probability Sampling (OpenTelemetry specification); tail_sampling, probabilistic, of the Collector.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from collector.decode import RequestSpan
from online import Floats

WHOLE = 0.95
"""Coefficients are off by 3 % at this rate, and by 9 % at 0.9."""
NEARLY_WHOLE = 0.98
"""Below it they are weak; the ends of a hundred requests that a page counted may cost two of them."""
_CHANCE = 1e-12
"""Of calling whole spans sampled, with every span that comes."""
_TRACES_MIN, _TRACES_MAX = 32, 1024
_LATEST = (_TRACES_MAX, 512, 256, 128, 64, _TRACES_MIN)
_RATE_MIN = 1e-6
_STRAY = 3
"""Written rates that are left out, of the latest traces."""
_UNEVEN = 4.0
_TOO_FEW_TRACES = "too few requests have ended to tell whether spans are sampled"
SAMPLED_BY_CALLERS = (
    "those who send the requests decide which of them have spans, by a rule that need not show; "
    "let tracefit scrape the page, which counts them"
)
SEVERAL_CONNECTIONS = (
    "request spans come from one address by several connections, perhaps of API servers that share an engine; give "
    "each server a service.instance.id in OTEL_RESOURCE_ATTRIBUTES, or let tracefit scrape the page"
)
_SPANS_ENOUGH = math.ceil(math.log(_CHANCE) / math.log(WHOLE))


def _fnv_1a(data: bytes, digest: int = 0xCBF29CE484222325) -> int:
    for each in data:
        digest = ((digest ^ each) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return digest


_SALTED: Final = _fnv_1a(b"default-hash-seed")
"""The salt of ``tail_sampling`` where none is configured."""


def _numbers_of(trace_id: bytes) -> tuple[float, ...]:
    """What each kind of sampler makes of a trace id, in [0, 1]."""
    high, low = int.from_bytes(trace_id[:8], "big"), int.from_bytes(trace_id[8:16], "big")
    words = (high >> 32 ^ high ^ low >> 32 ^ low) % 2**32
    return (
        low / 2**64,  # SDKs for Python, Go and Rust
        min(low, 2**64 - low) / 2**63,  # for Java: the size of a signed number
        min(high, 2**64 - high) / 2**63,  # for .NET
        words / 2**32,  # for JavaScript
        1.0 - low % 2**56 / 2**56,  # newer SDKs, and the Collector's probabilistic_sampler: the highest are kept
        _fnv_1a(trace_id, _SALTED) / 2**64,  # tail_sampling
    )


_RULES = len(_numbers_of(b""))


class TraceSampling:
    """Of one API process, by its latest traces."""

    def __init__(self) -> None:
        self._traces: OrderedDict[bytes, tuple[float, ...]] = OrderedDict()
        """What each kind of sampler makes of an id, and for how many requests its span stands."""
        self._spans = 0
        self._rates_before: Sequence[float | None] = [None] * (_RULES + 1)
        """Before a restart of ours."""
        self._rates: list[float | None] | None = None
        """None where traces came since."""
        self.since_caller = _TRACES_MAX
        """Requests since the last one of which its caller decided, by a rule that does not show; so many at most."""

    @property
    def rates(self) -> list[float | None]:
        """By rule, and as samplers write it: what a restart keeps."""
        if self._rates is None:
            *rules, requests = np.array([*self._traces.values()]).reshape(-1, _RULES + 1).T
            found, is_young = [*map(_rate_of, rules), _written_rate(requests)], len(requests) < _TRACES_MIN
            self._rates = [
                before if now is None or (is_young and before is not None) else now
                for now, before in zip(found, self._rates_before, strict=True)
            ]
        return self._rates

    @rates.setter
    def rates(self, rates: Sequence[float | None]) -> None:
        if len(rates) == len(self._rates_before):
            self._rates_before, self._rates = rates, None

    @property
    def share(self) -> float | None:
        """The rate; where the ids cannot tell it, spans are believed to be whole. None while it is not known."""
        is_told = self.rates[0] is not None or self._spans >= _SPANS_ENOUGH
        lowest = min((rate for rate in self.rates if rate is not None), default=1.0)
        return lowest if lowest < WHOLE or is_told else None

    @property
    def is_sampled_by_callers(self) -> bool:
        """Whether a request may be missing because its caller said so."""
        return self.since_caller < _TRACES_MAX

    def add(self, span: RequestSpan) -> None:
        """Take one more request."""
        self._spans = min(self._spans + 1, _SPANS_ENOUGH)
        is_left = span.has_caller and span.sampling_rate is None
        self.since_caller = 0 if is_left else min(self.since_caller + 1, _TRACES_MAX)
        if span.trace_id in self._traces:
            return
        stands_for = 1.0 if span.sampling_rate is None else 1.0 / max(span.sampling_rate, _RATE_MIN)
        self._traces[span.trace_id] = (*_numbers_of(span.trace_id), stands_for)
        self._rates = None
        if len(self._traces) > _TRACES_MAX:
            self._traces.popitem(last=False)


def _written_rate(requests: Floats) -> float | None:
    """The latest spans over the requests that they stand for, but for the few that stand for most."""
    told = np.sort(requests)[: max(len(requests) - _STRAY, 1)]
    return float(len(told) / told.sum()) if len(told) else None


def _rate_of(shares: Floats) -> float | None:
    """By one number of the latest ids: 1 where all spans are sent; None while that is not known."""
    for traces in _LATEST:
        if traces <= len(shares):
            rate = _sampled_at(shares[-traces:], 1.0 if traces == _TRACES_MAX else WHOLE)
            if rate is not None:
                return rate
    whole = np.count_nonzero(shares >= WHOLE)
    return 1.0 if whole > 1 or (whole and len(shares) < 2 * _TRACES_MIN) else None


def _sampled_at(shares: Floats, below: float) -> float | None:
    """The rate at which these traces were kept; None where that is not sure."""
    traces, largest = len(shares), float(shares.max())
    rate = largest * (traces + 1) / traces
    if not _RATE_MIN <= rate < below or largest**traces >= _CHANCE:
        return None
    uneven = abs(float(shares.mean()) / largest - 0.5) * math.sqrt(12.0 * traces)
    return rate if uneven < _UNEVEN else None


def doubts_of(shares: Collection[float | None], unseen: Collection[str]) -> list[str]:
    """Why nothing that was learned from emitters which send such shares of their spans should be used.

    ``unseen``: why a part of the requests may be missing although it shows in no span: spans that seem whole may be one
    in a hundred. The first requests of one more process say nothing against what others tell.
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
    return doubts or sorted(unseen)
