"""Windows of the error bars are of so many rows, however many are learned at once (online/rls/error_bars.py)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from online.blocks import Design
from online.rls.error_bars import WINDOW_ROWS, Meat

P, STRATA_SEEN = 3, 5
CUTS = st.lists(st.integers(min_value=1, max_value=700), min_size=1, max_size=6)


def block_of(rng: np.random.Generator, n: int, weight: float) -> Design:
    block = Design.empty(P)
    block.elapsed_us, block.weight = np.ones(n), np.full(n, weight)
    block.stratum = rng.integers(0, STRATA_SEEN, n)
    block.x, block.phase, block.steps, block.cell, block.end_ns = (np.zeros((n, 1)) for _ in range(5))
    return block


@given(cuts=CUTS, weight=st.sampled_from((1.0, 0.5, 0.25)), seed=st.integers(0, 2**32 - 1))
def test_one_large_block_fills_the_windows_that_small_ones_fill(cuts, weight, seed):
    rng = np.random.default_rng(seed)
    block, scores = block_of(rng, sum(cuts), weight), rng.normal(size=(sum(cuts), P))
    whole, pieces = Meat(P), Meat(P)
    whole.learn(block, np.ones(len(block.grouped().ids)), scores)
    end = 0
    for rows in cuts:
        start, end = end, end + rows
        piece = block.slice(start, end)
        pieces.learn(piece, np.ones(len(piece.grouped().ids)), scores[start:end])
    for name in ("m", "windows", "window", "last", "rows"):
        np.testing.assert_allclose(getattr(whole, name), getattr(pieces, name), rtol=1e-9, atol=1e-9, err_msg=name)
    assert whole.windows.sum() == pytest.approx(int(sum(cuts) * weight // WINDOW_ROWS))
