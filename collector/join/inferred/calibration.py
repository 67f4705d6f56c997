"""Calibration of an engine by its steps: tokens per KV block, the share of requests that send journeys, missing steps.

Steps are learned in order, but the calibration changes only at block boundaries (step ids divisible by ``block_rows``),
so that a row does not depend on how much telemetry came in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from collector.identity import EngineFacts
from collector.join.window import Cells, StepView
from online import Floats

Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]

_DECAY = 0.8
"""Decay of the sums per block: some 5000 steps are remembered."""
_COMPLETE_SHARE = 0.97
"""Below this share of rebuilt requests in summaries, journeys are sampled: rebuilt counts are scaled up.

Below this share of steps with a summary, steps are; of prompt tokens that were computed, the others were cached.
"""
_REQUESTS_MIN = 32.0


class Sums(msgspec.Struct):
    """Sums over steps.

    ``context_tokens`` and ``blocks`` are of the same steps, and so are ``prompt_tokens``, as journeys tell them, and
    ``computed_tokens``, which summaries tell.
    """

    context_tokens: Amount = 0.0
    blocks: Amount = 0.0
    rebuilt_requests: Amount = 0.0
    summary_requests: Amount = 0.0
    steps: Amount = 0.0
    holes: Amount = 0.0
    prompt_tokens: Amount = 0.0
    computed_tokens: Amount = 0.0


@dataclass(slots=True)
class EngineCalibration:
    """Calibration of an engine: decayed sums over complete blocks of steps, and the open block.

    Attributes:
        facts: what its configuration says.
        learned: whether a whole block has passed.
        kv_block_tokens: ``BlockStored.block_size``; 0 while there is none.
    """

    facts: EngineFacts
    learned: bool = False
    sums: Sums = field(default_factory=Sums)
    kv_block_tokens: float = 0.0
    _block: Sums = field(default_factory=Sums)

    def learn(self, view: StepView, *, idle: bool) -> None:
        """Add final steps of one block.

        While the engine is ``idle``, running requests may still send their journeys, so missing ones are not counted.
        """
        block, steps, seen = self._block, view.steps, view.seen
        block.steps += len(steps)
        block.holes += int(np.count_nonzero(~seen))
        busy, matched, snapped = seen & (steps["scheduled_tokens"] > 0), view.matched, view.snapped
        told = busy & matched if idle else busy
        block.rebuilt_requests += float(view.requests @ told)
        block.summary_requests += float((steps["prefill_requests"] + steps["decode_requests"]) @ told)
        same = busy & (view.prefill_requests == steps["prefill_requests"])
        block.prompt_tokens += float(view.prefill_tokens @ same)
        block.computed_tokens += float(steps["prefill_tokens"] @ same)
        exact = busy & (steps["prefill_requests"] == 0) & (matched | snapped)
        context = np.where(snapped, view.cells["snapshot_context_tokens"], view.context_tokens)
        block.context_tokens += float(context @ exact)
        block.blocks += float((steps["kv_blocks_total"] - steps["kv_blocks_free"]) @ exact)

    def end_block(self) -> None:
        """Close the block: its sums count from here on, and those of earlier blocks decay."""
        for name in Sums.__struct_fields__:
            setattr(self.sums, name, _DECAY * getattr(self.sums, name) + getattr(self._block, name))
        self._block, self.learned = Sums(), True

    def context_by_blocks(self, steps: Cells) -> Floats:
        """Decode context from blocks in use, shape (m,); NaN while nothing is known.

        By the running ratio where the context was exact, else by the block's size: the last block of a request is half
        full on average. Prompts being prefilled hold blocks too.
        """
        used = (steps["kv_blocks_total"] - steps["kv_blocks_free"]).astype(float)
        if self.sums.blocks > 0:
            tokens = used * (self.sums.context_tokens / self.sums.blocks)
        else:
            size = self.facts.number("block_size") or self.kv_block_tokens or np.nan
            tokens = (used - (steps["decode_requests"] + steps["prefill_requests"]) / 2) * size
        return np.asarray(np.maximum(tokens - steps["prefill_tokens"], steps["decode_requests"]), float)

    @property
    def missing_step_scale(self) -> float:
        """1 ÷ the share of requests whose journeys are sent; 1 while that looks like all of them."""
        if self.sums.summary_requests < _REQUESTS_MIN or self.sums.rebuilt_requests <= 0:
            return 1.0
        share = self.sums.rebuilt_requests / self.sums.summary_requests
        return 1.0 / share if share < _COMPLETE_SHARE else 1.0

    @property
    def hides_hits(self) -> bool:
        """Whether journeys tell of prompt tokens that no step computed."""
        return self.sums.computed_tokens < _COMPLETE_SHARE * self.sums.prompt_tokens

    @property
    def step_share(self) -> float:
        """Share of steps that have a summary; 1 while that looks like all of them."""
        steps, holes = self.sums.steps + self._block.steps, self.sums.holes + self._block.holes
        return 1.0 - holes / steps if holes > (1.0 - _COMPLETE_SHARE) * steps else 1.0
