"""Which share of its request spans an API process sends, told by their trace ids.

Trace ids are random, and a sampler keeps a trace iff a number in [0, 1) that it makes of the id is below its rate.
Most SDKs take the low 64 bits / 2^64; ``_numbers_of`` has the others. With u that number of n traces that came,

    rate = max(u) (n + 1) / n           P(max(u) <= m) = m^n where every span is sent

Every span is sent as soon as one u >= 0.95. Spans are sampled once m^n < 1e-12: after 32 traces at half of the spans or
fewer, after 539 at 0.95. In between, nothing is known. From then on every trace makes the rate better known.

Guards: a trace of several requests counts once. Ids may not be random (a counter, a time, a constant): a claim needs
u that lie evenly below their maximum (their mean within four standard deviations of max(u) / 2) and a rate that anybody
would choose. After 539 spans without an answer the ids cannot tell. A sampler may be switched on or off: the latest 32,
64, ... traces are looked at by themselves, and sampled spans are called whole at the second u >= 0.95. From then on, a
rate from 0.95 to 0.97 shows in 1,024 traces. That spans are whole, the first rule says, so that nobody waits longer
whose ids are random in part only; the others may say at any time that they are sampled. Consistent samplers write their
rate into the tracestate, whatever number they use (as a Collector with its own seed does). The latest 1,024 spans tell
it, but for the three that stand for most requests: a header of one client says nothing of the others. Samplers that
decide otherwise (by chance, by how long a request took) do not show; beside the page of a server, which counts its
requests, they all do. So without a page no coefficient of request spans is more than weak.

Senders without a name are named by their connections. Where two of one address and server send by turns, they may be
API servers of one engine, of whose batch each knows a part: nothing is learned from them. One turn is no more than an
export of an old connection that came late, so it takes several of the latest exports, and until then nothing is said.

References: TraceIdRatioBased of the OpenTelemetry SDKs for Python, Go and Rust, Java, .NET, JavaScript; TraceState,
Probability Sampling (OpenTelemetry specification); tail_sampling, probabilistic, of the Collector.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from collector.decode import RequestSpan

WHOLE = 0.95
"""Coefficients are off by 3 % at this rate, and by 9 % at 0.9."""
NEARLY_WHOLE = 0.98
"""Below it they are weak; the ends of a hundred requests that a page counted may cost two of them."""
_CHANCE = 1e-12
"""Of calling whole spans sampled, with every span that comes."""
_TRACES_MIN, _TRACES_MAX = 32, 1024
_LATEST = (32, 64, 128, 256, 512)
_RATE_MIN = 1e-6
_STRAY = 3
"""Written rates that are left out, of the latest spans."""
_UNEVEN = 4.0
_EXPORTS_LATEST, _EXPORTS_NEWEST, _TURNS_MIN = 32, 8, 4
"""Two senders that share the load evenly turn half of the time; one that reconnects turns once."""
_TOO_FEW_TRACES = "too few requests have ended to tell whether spans are sampled"
SAMPLED_BY_CALLERS = (
    "those who send the requests decide which of them have spans, by a rule that need not show; "
    "let tracefit scrape the page, which counts them"
)
BY_TURNS = (
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
    """Of one API process."""

    def __init__(self) -> None:
        self._rules = [_SamplingByRule() for _ in range(_RULES)]
        self._written = _WrittenRate()
        self._all: tuple[_SamplingByRule | _WrittenRate, ...] = (*self._rules, self._written)
        self.since_caller = _TRACES_MAX
        """Requests since the last one of which its caller decided, by a rule that does not show; so many at most."""

    @property
    def rates(self) -> list[float | None]:
        """By rule, and as samplers write it: what a restart keeps."""
        return [each.rate for each in self._all]

    @rates.setter
    def rates(self, rates: Sequence[float | None]) -> None:
        for each, rate in zip(self._all, rates, strict=False):
            each.rate = rate

    @property
    def share(self) -> float | None:
        """The rate; where the ids cannot tell it, spans are believed to be whole. None while it is not known."""
        whole = self._rules[0].share
        lowest = min((rate for rate in self.rates if rate is not None), default=1.0)
        return lowest if lowest < WHOLE or whole is not None else None

    @property
    def is_sampled_by_callers(self) -> bool:
        """Whether a request may be missing because its caller said so."""
        return self.since_caller < _TRACES_MAX

    def add(self, span: RequestSpan) -> None:
        """Take one more request."""
        for rule, number in zip(self._rules, _numbers_of(span.trace_id), strict=True):
            rule.add(number)
        self._written.add(1.0 if span.sampling_rate is None else span.sampling_rate)
        is_left = span.has_caller and span.sampling_rate is None
        self.since_caller = 0 if is_left else min(self.since_caller + 1, _TRACES_MAX)


class _WrittenRate:
    """The latest spans over the requests that they stand for, but for the few that stand for most."""

    def __init__(self) -> None:
        self._requests: deque[float] = deque(maxlen=_TRACES_MAX)
        self._rate: float | None = None
        """None where spans came since."""

    @property
    def rate(self) -> float | None:
        """None before the first span."""
        if self._rate is None and self._requests:
            stray = heapq.nlargest(min(_STRAY, len(self._requests) - 1), self._requests)
            self._rate = (len(self._requests) - len(stray)) / (sum(self._requests) - sum(stray))
        return self._rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self._requests.extend([1.0 / rate] * _TRACES_MIN if rate is not None else [])

    def add(self, sampling_rate: float) -> None:
        """Take what one more span says."""
        self._requests.append(1.0 / max(sampling_rate, _RATE_MIN))
        self._rate = None


class Alternation:
    """Of senders without a name at one address: whether they send by turns, by the latest exports of all."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=_EXPORTS_LATEST)

    def add(self, *, is_other_sender: bool) -> None:
        """Take one more export; ``is_other_sender``: of a sender heard before, after one of another sender."""
        self._latest.append(is_other_sender)

    @property
    def is_alternating(self) -> bool:
        """Whether there are several turns."""
        return sum(self._latest) >= _TURNS_MIN

    @property
    def may_begin(self) -> bool:
        """Whether there was one just now, so that the next exports will tell."""
        return not self.is_alternating and any([*self._latest][-_EXPORTS_NEWEST:])


class _SamplingByRule:
    """By one number of the ids; bounded by ``_TRACES_MAX`` of them."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """1 where all spans are sent; None while that is not known."""
        self._spans = 0
        self._shares: list[float] = []
        self._latest: list[float] = []

    @property
    def is_sampled(self) -> bool:
        """Whether too many requests are missing to rebuild a batch."""
        return self.rate is not None and self.rate < WHOLE

    @property
    def share(self) -> float | None:
        """The rate; 1 where the ids do not tell it."""
        return 1.0 if self.rate is None and self._spans >= _SPANS_ENOUGH else self.rate

    def add(self, share: float) -> None:
        """Take the number of one more request."""
        self._latest.append(share)
        if share < WHOLE:
            self._spans = min(self._spans + 1, _SPANS_ENOUGH)
            if share not in self._shares:
                self._add_below(share)
        else:
            self.rate = None if self.is_sampled else self.rate or 1.0
            self._spans, self._shares = 0, []
        if len(self._latest) == _TRACES_MAX:
            if self.rate is not None and not self.is_sampled:
                self.rate = _sampled_at(self._latest, 1.0) or 1.0
            self._latest = []

    def _add_below(self, share: float) -> None:
        self._shares.append(share)
        known = len(self._shares)
        if known < _TRACES_MIN:
            return
        full = known == _TRACES_MAX
        for traces in (known, *(() if self.is_sampled and not full else _LATEST)):
            rate = _sampled_at(self._shares[-traces:]) if traces <= known else None
            if rate is not None:
                self.rate, self._shares = rate, self._shares[-traces:]  # the more of them, the better it is known
                break
        if full:
            self._shares = []


def _sampled_at(shares: list[float], below: float = WHOLE) -> float | None:
    """The rate at which these traces were kept; None where that is not sure."""
    traces, largest = len(shares), max(shares)
    rate = largest * (traces + 1) / traces
    if not _RATE_MIN <= rate < below or largest**traces >= _CHANCE:
        return None
    uneven = abs(sum(shares) / traces / largest - 0.5) * math.sqrt(12.0 * traces)
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
