"""Which rows of a block are learned together (online/target/block_pieces.py)."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from online.blocks import Design
from online.target.block_pieces import PIECE_ROWS, TRIAL_ROWS, BlockSize, pieces_of

RUNS = st.lists(st.booleans(), max_size=20)
REST = st.integers(min_value=0, max_value=PIECE_ROWS - 1)


def rows_of(n: int) -> Design:
    design = Design.empty(1)
    design.elapsed_us = design.steps = design.weight = np.arange(float(n))
    design.x, design.phase = np.zeros((n, 1)), np.zeros((n, 2))
    design.stratum = design.cell = design.end_ns = np.arange(n)
    return design


def lengths(off: list[bool], rest: int, suspects=lambda: False) -> list[int]:
    block = rows_of(len(off) * PIECE_ROWS + rest)
    pieces = list(pieces_of(block, np.array(off, np.bool_), suspects))
    assert np.array_equal(np.concatenate([piece.end_ns for piece in pieces]), block.end_ns)
    return [len(piece) for piece in pieces]


@given(off=RUNS.filter(len), rest=REST)
def test_a_run_that_is_off_is_learned_alone_and_what_lies_between_two_of_them_together(off, rest):
    found = lengths(off, rest)
    assert found[-1] >= rest
    found[-1] -= rest
    assert all(length % PIECE_ROWS == 0 for length in found)
    runs = [length // PIECE_ROWS for length in found]
    starts = np.cumsum([0, *runs[:-1]])
    together = [off[start : start + count] for start, count in zip(starts, runs, strict=True)]
    assert all(part == [True] or not any(part) for part in together)
    assert all(any(before) or any(after) for before, after in itertools.pairwise(together))


@given(off=RUNS.filter(len), rest=REST)
def test_under_suspicion_every_run_is_learned_alone(off, rest):
    assert lengths(off, rest, lambda: True) == [PIECE_ROWS] * (len(off) - 1) + [PIECE_ROWS + rest]


def test_a_suspicion_that_opens_in_a_block_divides_the_rest_of_it():
    answers = iter([False, True, True, True])
    assert lengths([False, False, True, False, False, False], 5, lambda: next(answers)) == [64, 32, 32, 32, 37]


@given(rest=REST.filter(bool))
def test_a_block_shorter_than_a_run_is_one_piece(rest):
    assert lengths([], rest) == [rest]


def test_who_asks_for_long_blocks_gets_longer_young_ones_too_and_those_of_requests_are_longest():
    for block_s, growing_s in ((0.5, 0.5), (8, 1), (60, 7.5)):
        size = BlockSize(2048, int(block_s * 1e9))
        assert size.after(20_000, of_steps=True) == size
        assert size.after(2_000, of_steps=True) == (512, growing_s * 1e9)
        assert size.after(2_000, of_steps=False) == (2048, 2 * block_s * 1e9)
        assert size.after(10, of_steps=True) == size.after(10, of_steps=False) == (PIECE_ROWS, growing_s * 1e9)


def test_blocks_are_short_under_suspicion_however_many_rows_are_learned():
    for rows in (10, 2_000, 20_000):
        assert BlockSize(2048, 10**9).after(rows, of_steps=True, suspects=True) == (TRIAL_ROWS, 10**9)
    assert BlockSize(4, 10**9).after(2_000, of_steps=True, suspects=True) == (4, 10**9)
