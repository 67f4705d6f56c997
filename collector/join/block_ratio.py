"""Tokens per KV block: the running ratio of exact context to blocks of one engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.decode import StepColumns
from online import Floats
from online.state import saved


@dataclass(slots=True)
class BlockRatio:
    """Context tokens per KV block in use: the running ratio where the context is exact, else a fact (block size).

    ``context_tokens`` and ``blocks`` are sums over the same steps.
    """

    STATE = saved("block_ratio")

    fact_tokens: float | None = None
    event_tokens: float = 0.0
    """``BlockStored.block_size``, for steps from ``event_from_unix_ns`` on; 0 while there is none."""
    event_from_unix_ns: int = 0
    context_tokens: float = 0.0
    blocks: float = 0.0

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
