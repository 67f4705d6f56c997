"""How many of the others prefill while one request is in the batch: all share the tokens of a step.

n requests run, of p tokens to prefill and O output tokens. A step computes at most T > n tokens, of which every decode
takes one, so that a prompt takes q = max(1, ceil(p / (T - n + 1))) chunks. Each that decodes ends after a step with
probability 1 / (O - 1), and a new one takes its place and prefills. Of j that prefill, as many end in a step as their
chunks and the tokens left by decodes allow:

    mu_j = min(j / q, (T - n + j) / p)

Both flows balance, between i - 1 and i of the n - 1 others (those that one request meets: arrival theorem):

    pi_i = pi_(i-1) (n - i) / ((O - 1) mu_i)            i = 1 ... n - 1; sum pi_i = 1

Where all prompts fit, this is the binomial of n - 1 and q / (q + O - 1); where they do not, prefills pile up until as
many requests are left to decode as the tokens can feed. Steps stand for time. Guards: O - 1 >= 1e-9; weights are
relative to where the flows balance, which is the peak, and end at 1e-6 of it; beyond 4,096 requests mean and variance
come from the flows' balance and slope (exact where they are linear).

Reference: finite-source queue with state-dependent service (Kleinrock, Queueing Systems I, 1975).
"""

from __future__ import annotations

import math

_TAIL = 1e-6
_SUMMED_MAX = 4096
_DECODES_MIN = 1e-9


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
        """Values of i with pi_i; of very many, three of equal mean and variance."""
        if self.requests > _SUMMED_MAX:
            return self._three(*self._diffusion())
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

    def _three(self, mean: float, variance: float) -> list[tuple[float, float]]:
        half = math.sqrt(3.0 * variance)
        low, high = max(0.0, mean - half), min(self.requests - 1.0, mean + half)
        return [(low, 1.0 / 6.0), (mean, 2.0 / 3.0), (high, 1.0 / 6.0)]

    def _diffusion(self) -> tuple[float, float]:
        """Mean, and variance as flow ÷ slope there: as good as exact where flows are as good as linear."""
        mean, decodes = self.mean(), self._decodes
        slope = 1.0 / self.chunks if self.chunks * self.ended(mean) >= mean else 1.0 / self._tokens
        return mean, (self.requests - 1.0 - mean) / decodes / (slope + 1.0 / decodes)
