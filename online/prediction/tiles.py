"""Whether steps with prefill are padded to whole tiles of tokens, and of which size: what their rows say of each size.

GPUs multiply matrices in tiles: T tokens in a step cost as much as the next multiple of the tile. A batch shape knows
the mean of that over its rows; what one step is off it shows in what x beta F leaves over:

    pad_i = (-T_i) mod t        t = 64, 128, 256; T_i = P_i + n_i - 1 tokens of a step with prefill, of one prompt
    A_c <- A_c + rho (mean pad - A_c)                       usual padding of cell c, rho as of its usual work (cells.py)
    q_i   = bP (pad_i - A_c) / (x_i beta F)                 bP: what a token of prefill costs
    d_i   = q_i (2 r_i - q_i) = r_i^2 - (r_i - q_i)^2       r_i = log(y_i / (x_i beta F))
    tile  = the t of the largest sum d, if sum d > 4 sqrt(sum d^2), of all rows and of those with T_i > 2 t; none else

by rows of one step in cells that have rows, before they are learned, of every second block. Sums are forgotten with a
half-life of 4096 such rows. Padding that costs less than half of what as many tokens of prefill do wins nothing. Up
to its knee a machine that takes as long for few tokens as for more (it waits for memory, or for its host) looks like
one tile; beyond the second it does not.

Guards: |r| <= 0.1 (stalls); bP / (x beta F) <= 0.05; T <= 2^40.

Reference: NVIDIA, Matrix Multiplication Background User's Guide (tile quantization).
"""

from __future__ import annotations

import numpy as np

from online.blocks import CELLS, PREFILL_CELL, Design
from online.rows import Floats
from online.state import Count, saved

from .shaped_prediction import cell_name

SIZES = (64, 128, 256)
_SIZES = np.array(SIZES, np.int64)
_ROWS_MAX = 256.0
_RATIO_MAX, _SHARE_MAX = 0.1, 0.05
_TOKENS_MAX = 2.0**40
_HALF_LIFE_ROWS = 4096.0
_SURE = 4.0
_EVERY = 2
"""Blocks of which one is looked at: rows are many, and a machine does not change its tiles."""
_COLUMNS = ("prefill_tokens", "requests")


class Tiles:
    """Of one target, by the coefficients of one model.

    Args:
        names: columns of the model.

    Attributes:
        blocks: how many were offered.
        rows: of each cell, (512,).
        padding: A by size and cell, (512, 3).
        won, squares: sums of d and d^2 by size, (3,).
        won_beyond, squares_beyond: the same of rows beyond the second tile; states saved without have to win them anew.
    """

    STATE = saved(
        "tiles",
        blocks=Count,
        rows=Floats,
        padding=Floats,
        won=Floats,
        squares=Floats,
        won_beyond=Floats,
        squares_beyond=Floats,
    )

    def __init__(self, names: tuple[str, ...]) -> None:
        self.blocks = 0
        self.rows, self.padding = np.zeros(CELLS), np.zeros((CELLS, len(SIZES)))
        self.won, self.squares, self.won_beyond, self.squares_beyond = np.zeros((4, len(SIZES)))
        self._columns = [names.index(each) for each in _COLUMNS] if set(names) >= set(_COLUMNS) else None

    def learn(self, block: Design, log_ratio: Floats, beta: Floats) -> None:
        """Rows not yet learned: r, (n,), by beta, (p,) or more."""
        self.blocks += 1
        if self._columns is None or self.blocks % _EVERY:
            return
        rows = ((block.cell >= PREFILL_CELL) & (block.steps == 1.0)).nonzero()[0]
        if not len(rows):
            return
        prefill, requests = self._columns
        cell, x, ratio = block.cell.take(rows), block.x.take(rows, axis=0), log_ratio.take(rows)
        tokens = np.minimum(x[:, prefill] + x[:, requests], _TOKENS_MAX).astype(np.int64) - 1
        off = (-tokens[:, None] & (_SIZES - 1)) - self.padding[cell]
        share = np.minimum(beta[prefill] * np.exp(ratio) / block.elapsed_us.take(rows), _SHARE_MAX)
        q = (share * (self.rows[cell] > 0.0))[:, None] * off
        won = q * (2.0 * np.minimum(np.maximum(ratio, -_RATIO_MAX), _RATIO_MAX)[:, None] - q)
        keep = 0.5 ** (len(rows) / _HALF_LIFE_ROWS)
        self.won = keep * self.won + won.sum(axis=0)
        self.squares = keep * self.squares + np.square(won).sum(axis=0)
        won *= tokens[:, None] > 2 * _SIZES
        self.won_beyond = keep * self.won_beyond + won.sum(axis=0)
        self.squares_beyond = keep * self.squares_beyond + np.square(won).sum(axis=0)
        count = np.bincount(cell, minlength=CELLS)
        places = len(SIZES) * cell[:, None] + np.arange(len(SIZES))
        sums = np.bincount(places.ravel(), off.ravel(), self.padding.size).reshape(self.padding.shape)
        self.padding += sums / np.maximum(np.minimum(self.rows, _ROWS_MAX) + count, 1.0)[:, None]
        self.rows += count

    def tile(self) -> int | None:
        """Tokens of a tile; None where rows do not say that there is one."""
        best = int(self.won.argmax())
        sure = (self.won > _SURE * np.sqrt(self.squares)) & (self.won_beyond > _SURE * np.sqrt(self.squares_beyond))
        return SIZES[best] if sure[best] else None

    def usual_padding(self) -> dict[str, float]:
        """Tokens that steps of each cell with prefill were padded by, by name; empty where there is no tile."""
        tile = self.tile()
        if tile is None:
            return {}
        padding = np.round(self.padding[:, SIZES.index(tile)], 1).tolist()
        return {cell_name(c): padding[c] for c in np.flatnonzero(self.rows).tolist()}

    def add(self, other: Tiles) -> None:
        """Rows of both, as far as they are remembered."""
        mine, theirs = np.minimum(self.rows, _ROWS_MAX), np.minimum(other.rows, _ROWS_MAX)
        self.padding += (theirs / np.maximum(mine + theirs, 1.0))[:, None] * (other.padding - self.padding)
        self.rows += other.rows
        for name in ("won", "squares", "won_beyond", "squares_beyond"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
