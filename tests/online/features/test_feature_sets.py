"""Feature sets are evaluated per step and then summed; blocks cut themselves."""

import dataclasses

import numpy as np
import pytest

from online.blocks import CELLS, STRATA, rows_of_first_block, strata_of
from online.features import build, custom, portable
from online.features.columns import Column, FeatureSet
from online.rows import STEP_FEATURES, RowBlock, Target


def _rows(lines, offsets):
    rows = RowBlock.of_lines(np.empty(0), np.ones(len(offsets) - 1))
    return dataclasses.replace(rows, raw=np.asarray(lines, float), offsets=np.asarray(offsets))


def _step(**values):
    line = np.full(len(STEP_FEATURES), np.nan)
    for name, value in values.items():
        line[STEP_FEATURES.index(name)] = value
    return line


def test_a_hinge_is_taken_per_step_and_not_of_the_sum():
    hinge = Column("hinge", "us", lambda raw: np.maximum(0.0, raw["requests"] - 10.0))
    features = FeatureSet("f", Target.STEP_TIME, (hinge,))
    rows = _rows([_step(requests=8), _step(requests=8), _step(requests=15)], [0, 2, 3])
    assert features.evaluate(rows).tolist() == [[0.0], [5.0]]


def test_what_is_not_known_of_one_step_is_not_known_of_its_row():
    rows = _rows([_step(requests=1), _step(), _step(requests=1)], [0, 2, 3])
    x = custom(Target.STEP_TIME, ("requests",)).evaluate(rows)
    assert np.isnan(x[0, 0])
    assert x[1, 0] == 1.0


@pytest.mark.parametrize("target", list(Target))
def test_each_target_has_the_portable_set_and_every_raw_name_as_a_column_without_rows_as_well(target):
    assert build("portable", target, {}) == portable(target)
    every = custom(target, target.vocabulary)
    assert all(column.unit.startswith("us") for column in every.columns)
    assert every.evaluate(RowBlock.empty(target.vocabulary)).shape == (0, len(target.vocabulary))


@pytest.mark.parametrize("columns", [(), (Column("a", "us", "intercept"),) * 2, (Column("a", "us", "tokens"),)])
def test_a_set_that_could_only_fail_later_is_refused(columns):
    with pytest.raises(ValueError, match="f"):
        FeatureSet("f", Target.STEP_TIME, columns)


# -------------------------------------------------------------------- blocks


@pytest.mark.parametrize(
    ("rows_max", "end_ns", "sizes"),
    [(4, [0] * 11, [4, 4, 0]), (100, [0, 3, 9, 10, 12, 25], [3, 2, 0])],
    ids=["at its row count", "before the row that is too late"],
)
def test_a_block_ends(rows_max, end_ns, sizes):
    at = np.cumsum([0, *sizes[:-1]])
    assert [rows_of_first_block(np.array(end_ns[start:]), rows_max, 10) for start in at] == sizes


def test_strata_and_cells_are_in_range_whatever_the_rows_hold():
    rng = np.random.default_rng(1)
    odd = np.array([np.nan, np.inf, -np.inf, -3.0, 0.0, 0.4, 1e18, 1e300])
    lines = rng.choice(odd, size=(400, len(STEP_FEATURES)))
    with np.errstate(all="ignore"):
        stratum, cell = strata_of(Target.STEP_TIME, _rows(lines, np.arange(401)))
    assert ((stratum >= 0) & (stratum < STRATA)).all()
    assert ((cell >= 0) & (cell < CELLS)).all()


def test_a_tile_of_64_is_an_edge_between_cells():
    lines = [_step(prefill_tokens=0, requests=n) for n in range(1, 513)]
    _, cell = strata_of(Target.STEP_TIME, _rows(lines, np.arange(513)))
    for edge in range(64, 512, 64):
        assert cell[edge - 1] != cell[edge]
    assert (np.diff(cell) >= 0).all()
