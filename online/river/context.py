"""What a step's row carries beside the work that coefficients are about: the columns of the corrector.

    share of steps in which requests wait, are preempted, finish                   kv usage, 0 to 1
    v / (v + 8): requests waiting, running but not scheduled, blocks offloaded, restored, evicted

Every column is made with fixed numbers, so that its weight means the same in every process and at any time, and lies
between 0 and 1, so that one step of gradient descent cannot overshoot. What a row does not know is 0. Per step, then
the mean over the steps of a row: (n, 9).
"""

from __future__ import annotations

import numpy as np

from online.features import sum_steps
from online.rows import STEP_FEATURES, Floats, Ints, RowBlock, Target

_HALF = 8.0
_MANY = 1e12
_SHARES = ("waiting", "preempted", "finished")
_COUNTS = ("waiting", "running", "offload_blocks", "restore_blocks", "evicted_blocks")
_RUNNING = _COUNTS.index("running")
_SHARE_PLACES, _COUNT_PLACES = ([STEP_FEATURES.index(name) for name in names] for names in (_SHARES, _COUNTS))
_REQUESTS, _USAGE = STEP_FEATURES.index("requests"), STEP_FEATURES.index("kv_usage_ratio")


class Context:
    """The columns; no feature set to choose, because nothing is fitted to it but the corrector."""

    name = "context"
    target = Target.STEP_TIME
    names = ("queued", "preempted", "finished", "kv_usage", "waiting", "idle", "offloaded", "restored", "evicted")

    def __len__(self) -> int:
        """Number of columns."""
        return len(self.names)

    def evaluate(self, block: RowBlock, rows: Ints) -> Floats:
        """Columns of the chosen rows (k,) of :attr:`target`, (k, 9), finite."""
        single = len(block.raw) == len(block)
        chosen = None if single else block.take(rows)
        raw = block.raw.take(rows, axis=0) if chosen is None else chosen.raw
        counts = raw.take(_COUNT_PLACES, axis=1)
        counts[:, _RUNNING] -= raw[:, _REQUESTS]
        counts = np.fmin(np.fmax(counts, 0.0), _MANY)  # what is not known is neither more nor less: fmax leaves 0
        lines = np.empty((len(raw), len(self)))
        lines[:, :3] = raw.take(_SHARE_PLACES, axis=1) > 0.0
        lines[:, 3] = np.fmin(np.fmax(raw[:, _USAGE], 0.0), 1.0)
        lines[:, 4:] = counts / (counts + _HALF)
        return lines if chosen is None else sum_steps(lines, chosen.offsets) / chosen.steps[:, None]


CONTEXT = Context()
