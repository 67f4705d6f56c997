"""What a step of each batch shape usually takes, while rows of other shapes say that everything became slower."""

import copy

import numpy as np
import pytest

from online.blocks import Groups
from online.drift.cells import CellRows, Cells
from online.drift.detectors import DriftSettings

BETA = np.array([1000.0, 0.0, 0.0, 0.0])
NAMES = ("intercept", "prefill_tokens", "requests", "decode_context_tokens")
SHAPE = np.array([3])
COMMON_ROWS = 2048.0


def learn(cells, log_ratio, rows=200):
    """Rows of one shape that take exp(log_ratio) times what the coefficients say."""
    groups, x = Groups.of(np.repeat(SHAPE, rows)), np.tile([1.0, 0.0, 3.0, 900.0], (rows, 1))
    ratios = np.full(rows, log_ratio)
    fresh = cells.rows[groups.ids] == 0.0
    cells.open(groups, fresh, x, ratios, BETA)
    usual = cells.usual(groups.ids, BETA)
    cells.learn(groups, usual, CellRows(x, ratios - usual, BETA), DriftSettings())


@pytest.fixture
def cells():
    known = Cells(4)
    learn(known, 0.2)
    return known


def usual_us(cells):
    """Microseconds of a usual step of the shape."""
    return cells.usual_work(SHAPE, NAMES)[0][3]


def test_own_rows_at_the_other_speed_are_believed(cells):
    cells.follow(0.02 * COMMON_ROWS)
    for _ in range(20):
        learn(cells, 0.22)
    assert np.log(usual_us(cells) / BETA[0]) == pytest.approx(0.22, rel=0.01)


def test_a_shape_not_seen_yet_follows_nothing(cells):
    cells.follow(0.02 * COMMON_ROWS)
    assert cells.log_y[4] == 0.0


def test_shapes_of_two_sides_and_of_a_donor_keep_what_others_moved(cells):
    cells.follow(0.02 * COMMON_ROWS)
    other, adopted = Cells(4), Cells(4)
    adopted.adopt(cells)
    other.add(cells, 256.0)
    for taken in (adopted, other):
        assert taken.usual(SHAPE, BETA) == pytest.approx(cells.usual(SHAPE, BETA))


@pytest.mark.parametrize(
    "change",
    [
        lambda cells: learn(cells, -0.1),
        lambda cells: cells.follow(0.02 * COMMON_ROWS),
        lambda cells: cells.shift(np.arange(512) == SHAPE[0], 0.3),
        lambda cells: cells.add(_known(0.4), 256.0),
        lambda cells: cells.adopt(_known(0.4)),
        lambda cells: cells.widen(2),
    ],
    ids=["learn", "follow", "shift", "add", "adopt", "widen"],
)
def test_factors_that_were_told_are_told_anew_after_every_change(cells, change):
    before = cells.log_factors(BETA)
    change(cells)
    wide = cells.x.shape[1] - len(BETA)
    beta = np.append(BETA, np.zeros(wide)) if wide else BETA
    told = cells.log_factors(beta)
    assert np.array_equal(told, copy.deepcopy(cells).log_factors(beta.copy()))
    assert np.array_equal(told, before) == bool(wide)


def _known(log_ratio):
    other = Cells(4)
    learn(other, log_ratio)
    return other
