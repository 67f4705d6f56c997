"""What is asked about: requests of one kind, from numbers nobody has looked at yet."""

from __future__ import annotations

import math
from typing import NamedTuple

from .faults import TOKENS_MAX, checked

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
