"""How much of a block is learned at once: all of it while nothing happens, a short piece where something may.

What a block costs hardly depends on its size. How soon a change of speed is found does, and so does how much is learned
from rows of the wrong speed. Blocks are short as long as the coefficients are young (YOUNG_ROWS), because every row
moves them, and shorter than configured until they have grown (GROWN_ROWS); of requests there are few, and they have
grown at YOUNG_REQUESTS, after which their blocks last REQUESTS_LONGER times as long. Then a run r of PIECE_ROWS rows is
learned

    with its neighbours, when for all of them   |median_r log(y / (x beta F))| <= EXPECTED_OFF

with the coefficients and shape factors as they were before the block, and while no change is suspected; else alone.
Blocks that begin under suspicion have TRIAL_ROWS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from online.blocks import Design
from online.rls import RlsLearner
from online.rows import Mask

PIECE_ROWS = 32
TRIAL_ROWS = 8
"""What the rows say of a suspected change is not to wait for the end of a long block."""
YOUNG_ROWS, YOUNG_REQUESTS = 1024, 256
REQUESTS_LONGER = 2
"""A tenth of the rows of steps, or less, at the same price per block; and of blocks longer than that a generation has
to learn the part that is there, since it moves coefficients by then."""
GROWN_ROWS = 16_384
"""Four half-lives: of what moved young coefficients nothing is left."""
GROWING_BLOCK_ROWS, GROWING_NS = 512, 1_000_000_000
GROWING_SHARE = 8
"""Of what is configured a growing block lasts this part where that is longer: long blocks are for no live watch."""
EXPECTED_OFF = 0.05
"""Below any change that is reported."""
_HALF = PIECE_ROWS // 2


def pieces_of(block: Design, off: Mask, suspects: Callable[[], bool]) -> Iterator[Design]:
    """Runs that are as expected together, the others and all under suspicion each by itself; the last takes the rest.

    Args:
        block: the rows.
        off: which of its runs are not as expected, (r,).
        suspects: whether a change is suspected by now, asked before each piece.
    """
    runs, run = len(off), 0
    while run < runs:
        end = run + 1
        if not off[run] and not suspects():
            while end < runs and not off[end]:
                end += 1
        yield block.slice(run * PIECE_ROWS, end * PIECE_ROWS if end < runs else len(block))
        run = end
    if not runs:
        yield block


class BlockSize(NamedTuple):
    """Rows of a block, and event time between its first row and its last, at most."""

    rows: int
    ns: int

    def after(self, learned_rows: int, *, of_steps: bool, suspects: bool = False) -> BlockSize:
        """Of the next block, when so many rows are learned: short while they are few, shorter under suspicion."""
        size = self._grown(learned_rows, of_steps=of_steps)
        return BlockSize(min(TRIAL_ROWS, size.rows), size.ns) if suspects else size

    def _grown(self, learned_rows: int, *, of_steps: bool) -> BlockSize:
        growing_ns = max(min(GROWING_NS, self.ns), self.ns // GROWING_SHARE)
        if learned_rows < (YOUNG_ROWS if of_steps else YOUNG_REQUESTS):
            return BlockSize(min(PIECE_ROWS, self.rows), growing_ns)
        if not of_steps:
            return BlockSize(self.rows, REQUESTS_LONGER * self.ns)
        return self if learned_rows >= GROWN_ROWS else BlockSize(min(GROWING_BLOCK_ROWS, self.rows), growing_ns)


def runs_off(watcher: RlsLearner | None, view: Design | None, rows: int) -> Mask:
    """Which runs of a block are not what the model that watches for changes predicts, by the module's equation, (r,).

    Args:
        watcher: the model; None where none has started: all are.
        view: its columns of the block; None where nothing is looked for.
        rows: of the block, of which it may know a part only: all are, if one is.
    """
    runs = rows // PIECE_ROWS
    if watcher is None:
        return np.ones(runs, np.bool_)
    known = 0 if view is None else len(view) // PIECE_ROWS
    if view is None or not known:
        return np.zeros(runs, np.bool_)
    ordered = np.sort(watcher.log_ratio(view)[: known * PIECE_ROWS].reshape(known, PIECE_ROWS), axis=1)
    off: Mask = np.abs(ordered[:, _HALF - 1] + ordered[:, _HALF]) > 2.0 * EXPECTED_OFF
    return off if len(view) == rows else np.full(runs, off.any())
