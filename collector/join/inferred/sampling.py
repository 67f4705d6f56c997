"""Which share of its request spans an API process sends, told by their trace ids.

Trace ids are random, and a sampler keeps a trace iff a number u in [0, 1) that it makes of the id is below its rate.
The SDK of an engine takes the low 64 bits / 2^64; a consistent sampler, as newer SDKs and the Collector's
``probabilistic_sampler`` are, the low 56 bits, of which it keeps the highest. Of n traces,

    rate = max(u) (n + 1) / n           P(max(u) <= m) = m^n where every span is sent

Spans are whole once a u >= 0.95 came, and sampled once m^n < 1e-12: after 32 traces at half of the spans or fewer,
after 539 at 0.95. In between, nothing is known. The latest 1,024, 128 and 32 traces are looked at, for a sampler may be
switched on.

Samplers that decide by chance, by how long a request took, or as its caller did do not show in the ids. The page of a
server counts its requests, so beside it they all show. Without a page nothing of request spans is usable, unless the
operator says that one sender sends those of every request: the attribute ``trace_sampling`` is 1.

References: TraceIdRatioBased of the OpenTelemetry SDKs; TraceState, Probability Sampling (OpenTelemetry specification).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np

from collector.decode import RequestSpan

WHOLE = 0.95
"""Coefficients are off by 3 % at this rate, and by 9 % at 0.9."""
NEARLY_WHOLE = 0.98
"""Below it they are weak; the ends of a hundred requests that a page counted may cost two of them."""
_CHANCE = 1e-12
"""Chance, with each span, that complete spans are called sampled."""
_TRACES_MIN, _TRACES_MAX = 32, 1024
_LATEST = (_TRACES_MAX, 128, _TRACES_MIN)
_TOO_FEW_TRACES = "too few requests have ended to tell whether spans are sampled"
UNCOUNTED = (
    "no page counts the requests, so nobody knows whether each of them sends a span; let tracefit scrape the page, or "
    "set trace_sampling to 1 in rules if they all do"
)


class TraceSampling:
    """Share of traces that one API process sends, by its latest ones; ``share_before``: from the checkpoint."""

    def __init__(self) -> None:
        self._numbers: deque[tuple[float, float]] = deque(maxlen=_TRACES_MAX)
        self.share_before: float | None = None

    @property
    def share(self) -> float | None:
        """Share of the requests that send a span; None while it is not known."""
        if len(self._numbers) < _TRACES_MIN:
            return self.share_before
        numbers = np.array(self._numbers)
        for traces in (min(latest, len(numbers)) for latest in _LATEST):
            largest = float(numbers[-traces:].max(axis=0).min())
            if largest**traces < _CHANCE:
                return largest * (traces + 1) / traces
        return 1.0 if numbers.max(axis=0).min() >= WHOLE else None

    def add(self, span: RequestSpan) -> None:
        """Take one more request."""
        low = int.from_bytes(span.trace_id[8:], "big")
        self._numbers.append((low / 2**64, 1.0 - low % 2**56 / 2**56))


def doubts_of(shares: Collection[float | None], missing_reasons: Collection[str]) -> list[str]:
    """Why nothing that was learned from emitters which send such shares of their spans should be used.

    ``missing_reasons``: why requests may be missing although no span shows it. Spans that seem complete may be one in a
    hundred. The first requests of a new process do not contradict the other processes.
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
    return doubts or sorted(missing_reasons)
