"""Tokens per KV block, and the share of the cache that tokens fill: running ratios of one engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.decode import StepColumns
from online import Floats
from online.state import saved


@dataclass(slots=True)
class BlockRatio:
    """Context tokens per KV block in use: the running ratio where the context is exact, else a fact (block size).

    ``context_tokens``, ``blocks`` and ``usage`` (of the whole cache) are sums over the same steps.
    """

    STATE = saved("block_ratio")

    fact_tokens: float | None = None
    event_tokens: float = 0.0
    """``BlockStored.block_size``, for steps from ``event_from_unix_ns`` on; 0 while there is none."""
    event_from_unix_ns: int = 0
    context_tokens: float = 0.0
    blocks: float = 0.0
    usage: float = 0.0
    fact_blocks: float | None = None
    """Blocks of the whole cache."""

    def usage_by(self, tokens: Floats) -> Floats:
        """Share of the cache that so many tokens fill, (m,); NaN while nothing is known of its size."""
        if self.usage > 0.0 and self.context_tokens > 0.0:
            per_token = self.usage / self.context_tokens
        elif self.fact_tokens and self.fact_blocks:
            per_token = 1.0 / (self.fact_tokens * self.fact_blocks)
        else:
            return np.full(len(tokens), np.nan)
        return np.asarray(np.clip(tokens * per_token, 0.0, 1.0))

    def estimate(self, steps: StepColumns) -> Floats:
        """Decode context from blocks in use, shape (m,); NaN while nothing is known.

        The last block of a request is half full on average; prompts being prefilled hold blocks too.
        """
        used = (steps["kv_blocks_total"] - steps["kv_blocks_free"]).astype(float)
        if self.blocks > 0:
            tokens = used * (self.context_tokens / self.blocks)
        elif self.fact_tokens is not None or self.event_tokens > 0:
            size = self.fact_tokens or np.where(steps["unix_ns"] >= self.event_from_unix_ns, self.event_tokens, np.nan)
            tokens = (used - (steps["decode_requests"] + steps["prefill_requests"]) / 2) * size
        else:
            return np.full(len(steps), np.nan)
        return np.asarray(np.maximum(tokens - steps["prefill_tokens"], steps["decode_requests"]), float)
