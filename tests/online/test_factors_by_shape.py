"""Shape factors on their own: what is learned of a shape, and whether several that were merged are applied."""

import copy
import itertools

import numpy as np
import pytest

from online.shapes import ShapeFactors

BETA = np.array([1000.0, 0.0, 0.0, 0.0])
SHAPE = np.array([3])


def learn(factors, log_ratio, rows=200):
    """Rows of one shape that take exp(log_ratio) times what the coefficients say."""
    factors.learn(np.repeat(SHAPE, rows), np.tile([1.0, 0.0, 3.0, 900.0], (rows, 1)), np.full(rows, log_ratio), BETA)


def known(log_ratio=0.2):
    factors = ShapeFactors(4)
    learn(factors, log_ratio)
    return factors


def test_a_factor_is_believed_as_far_as_its_rows_go():
    few, many = ShapeFactors(4), known()
    learn(few, 0.2, rows=8)
    assert few.log_factors(SHAPE, BETA) == pytest.approx(0.1)
    assert many.log_factors(SHAPE, BETA) == pytest.approx(0.2, rel=0.05)
    assert many.log_factors(SHAPE + 1, BETA) == 0.0


def test_a_stall_is_no_first_row_of_a_shape():
    factors = ShapeFactors(4)
    learn(factors, 3.0, rows=1)
    assert not factors.rows.any()


def test_a_stall_moves_a_known_shape_by_a_bounded_amount():
    factors, before = known(), known().log_factors(SHAPE, BETA)
    learn(factors, 5.0, rows=1)
    assert factors.log_factors(SHAPE, BETA) == pytest.approx(before, abs=0.002)


def test_shapes_of_another_side_are_what_was_learned():
    other = ShapeFactors(4)
    other.add(known())
    assert other.usual(SHAPE, BETA) == pytest.approx(known().usual(SHAPE, BETA))


def decided(applied, won):
    """Factors that were scored, with so much to win."""
    factors = ShapeFactors(4)
    factors.applied, factors.won, factors.error = applied, won, 100.0
    return factors


def merged(*parts):
    first, *rest = map(copy.deepcopy, parts)
    for other in rest:
        first.add(other)
    return first


@pytest.mark.parametrize("won", [(-1.0, -7.0, -4.0), (-1.0, -9.0, -4.0), (-4.0, -2.0, 20.0), (-30.0, -2.0, 1.0)])
def test_what_a_merge_decides_does_not_depend_on_its_order(won):
    parts = [decided(applied, each) for applied, each in zip((False, False, True), won, strict=True)]
    orders = list(itertools.permutations(parts))
    found = [merged(*order) for order in orders] + [merged(a, merged(b, c)) for a, b, c in orders]
    assert {each.applied for each in found} == {sum(won) >= -0.05 * 300.0}
