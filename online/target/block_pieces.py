"""How much of a block is learned at once: all of it while nothing happens, else short pieces.

What a block costs hardly depends on its size. How soon a change of speed is found does, and so does how much is learned
from rows of the wrong speed. Blocks are short as long as the coefficients are young (YOUNG_ROWS), because every row
moves them; then a block is learned

    whole, when for every run r of PIECE_ROWS rows   |median_r log(y / (x beta F))| <= EXPECTED_OFF

with the coefficients and shape factors as they were before the block, and while no change is suspected.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from online.blocks import Design
from online.rls import RlsLearner

PIECE_ROWS = 32
YOUNG_ROWS = 1024
EXPECTED_OFF = 0.05
"""Below any change that is reported."""


def pieces_of(block: Design) -> Iterator[Design]:
    """Pieces of equal length that are PIECE_ROWS rows or little more; the block has at least two of them."""
    pieces = len(block) // PIECE_ROWS
    ends = [len(block) * (i + 1) // pieces for i in range(pieces)]
    for start, end in zip([0, *ends], ends, strict=False):
        yield block.slice(start, end)


def block_rows_of(watcher: RlsLearner | None, block_rows: int) -> int:
    """Rows of the next block at most: PIECE_ROWS while the coefficients are young, then ``block_rows``."""
    young = watcher is not None and watcher.rows < YOUNG_ROWS
    return min(PIECE_ROWS, block_rows) if young else block_rows


def is_as_expected(watcher: RlsLearner, view: Design, *, watches: bool) -> bool:
    """Whether rows are what the model that watches for changes predicts, by the module's equation.

    Args:
        watcher: the model.
        view: its columns of the block.
        watches: False where no detector is configured: nothing is looked for then.
    """
    if watcher.members.slow.trial is not None:
        return False
    runs = len(view) // PIECE_ROWS
    if not watches or not runs:
        return True
    log_ratio = watcher.log_ratio(view)[: runs * PIECE_ROWS].reshape(runs, PIECE_ROWS)
    return bool(np.abs(np.median(log_ratio, axis=1)).max() <= EXPECTED_OFF)
