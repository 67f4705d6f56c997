"""What passed steps teach about an engine: tokens per KV block, the share of requests that send journeys, holes.

Learned step by step in order, but in force only from the next block boundary on (step ids divisible by
``block_steps``), so that a row does not depend on how much telemetry came in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from collector.join.block_ratio import BlockRatio
from collector.join.window import Cells
from online.state import saved

from .raw_features import Rebuilt, complete, snapshot_complete

FIRST_BLOCK_STEPS = 256
"""A new engine waits for its first block; the later ones only cost per block."""

_DECAY = 0.8
"""Per block: some 5000 steps are remembered."""
_COMPLETE_SHARE = 0.97
"""Below this share of rebuilt requests in summaries, journeys are sampled: rebuilt counts are scaled up."""
_REQUESTS_MIN = 32.0
_STEPS_SHARE = 0.7
"""Share of steps with a summary from which on the telemetry counts as ``steps`` rather than ``sampled``."""


@dataclass(slots=True)
class Sums:
    """What steps add up to."""

    STATE = saved("sums")

    context_tokens: float = 0.0
    blocks: float = 0.0
    rebuilt_requests: float = 0.0
    summary_requests: float = 0.0
    steps: float = 0.0
    holes: float = 0.0
    usage: float = 0.0

    def fold(self, other: Sums) -> None:
        """Decay, then add a block."""
        for name in self.__slots__:
            setattr(self, name, _DECAY * getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Habits:
    """Decayed sums over whole blocks of passed steps, and the block under way."""

    STATE = saved("habits")

    ratio: BlockRatio
    settled: bool = False
    _past: Sums = field(default_factory=Sums)
    _block: Sums = field(default_factory=Sums)

    def learn(self, steps: Cells, cells: Cells, counts: Rebuilt) -> None:
        """Take passed steps of one block."""
        block, seen = self._block, cells["seen"]
        block.steps += len(steps)
        block.holes += int(np.count_nonzero(~seen))
        busy = seen & (steps["scheduled_tokens"] > 0)
        snapped = snapshot_complete(steps, cells)
        block.rebuilt_requests += float(counts.requests @ busy)
        block.summary_requests += float((steps["prefill_requests"] + steps["decode_requests"]) @ busy)
        exact = (busy & (steps["prefill_requests"] == 0) & (complete(steps, cells, counts) | snapped)).nonzero()[0]
        context = counts.context_tokens
        if snapped.any():
            context = np.where(snapped, cells["snapshot_context_tokens"], context)
        block.context_tokens += float(context.take(exact).sum())
        block.blocks += float((steps["kv_blocks_total"] - steps["kv_blocks_free"]).take(exact).sum())
        usage = steps["kv_usage_ratio"].take(exact)
        block.usage += float(np.where(np.isfinite(usage), usage, 0.0).sum())

    def missing_steps(self, cells: Cells) -> int:
        """Steps about to be learned whose summary never came, from the first on that did: without one, none."""
        seen, block, past = cells["seen"], self._block, self._past
        if block.steps + past.steps <= block.holes + past.holes:
            seen = seen[np.argmax(seen) :] if seen.any() else seen[:0]
        return int(np.count_nonzero(~seen))

    def settle(self) -> None:
        """End of a block: what it taught is in force from here on."""
        self._past.fold(self._block)
        self._block = Sums()
        self.settled = True
        self.ratio.context_tokens, self.ratio.blocks = self._past.context_tokens, self._past.blocks
        self.ratio.usage = self._past.usage

    @property
    def hole_scale(self) -> float:
        """1 ÷ the share of requests whose journeys are sent; 1 while that looks like all of them."""
        past = self._past
        if past.summary_requests < _REQUESTS_MIN or past.rebuilt_requests <= 0:
            return 1.0
        share = past.rebuilt_requests / past.summary_requests
        return 1.0 / share if share < _COMPLETE_SHARE else 1.0

    @property
    def sampled(self) -> bool:
        """Whether too many steps have no summary to call the telemetry complete."""
        steps, holes = self._past.steps + self._block.steps, self._past.holes + self._block.holes
        return holes > (1 - _STEPS_SHARE) * steps
