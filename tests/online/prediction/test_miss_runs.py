"""A band that is published says what holds of the next minutes, as far as the rows behind it can tell."""

import numpy as np
import pytest

from online.features.registry import portable
from online.prediction.miss_runs import WINDOW_ROWS, MissRuns
from online.prediction.prediction_intervals import Intervals
from online.rows import Target
from tests.support.designs import design_of
from tests.support.linear_steps import steps

DESIGN = design_of(steps(3000, 3).rows, portable(Target.STEP_TIME))


def _runs(below, above=None, sizes=(32,), half_life_rows=1e9):
    runs, at, k = MissRuns(), 0, 0
    above = np.zeros_like(below) if above is None else above
    while at < len(below):
        end = at + sizes[k % len(sizes)]
        runs.learn(below[at:end], above[at:end], half_life_rows)
        at, k = end, k + 1
    return runs


def _published(log_ratio, n):
    intervals = Intervals()
    for start in range(0, n, 32):
        end = min(start + 32, n)
        intervals.learn(DESIGN.slice(start, end), log_ratio[start:end])
    return intervals.snapshot(by_stratum=False)


def _levels(seed, share, rows=2400):
    """Noise of 5 %, of which so much is the level of 100 rows."""
    rng = np.random.default_rng([seed, 5])
    level = np.repeat(rng.standard_normal(rows // 100), 100)
    return 0.05 * (np.sqrt(share) * level + np.sqrt(1 - share) * rng.standard_normal(rows))


def test_rows_that_miss_alone_are_each_a_row():
    rng = np.random.default_rng(1)
    below, above = rng.random((2, 20_000)) < 0.1
    assert _runs(below, above).effect == pytest.approx(1.0, abs=0.2)
    assert _runs(below, above).between == pytest.approx(0.0, abs=0.005)


def test_rows_that_miss_together_are_one():
    together = np.repeat(np.random.default_rng(2).random((2, 400)) < 0.1, WINDOW_ROWS, axis=1)
    assert _runs(*together).between == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("sizes", [(1,), (63, 1, 64), (640, 7), (5000,)])
def test_windows_are_of_the_rows_however_these_are_cut(sizes):
    below, above = np.random.default_rng(3).random((2, 3000)) < 0.15
    found, expected = _runs(below, above, sizes), _runs(below, above)
    assert (found.excess, found.windows) == pytest.approx((expected.excess, expected.windows))
    assert found.filling.tolist() == expected.filling.tolist()


def test_the_windows_of_long_ago_are_forgotten():
    calm = np.zeros(64 * 200, np.bool_)
    calm[::10] = True
    rough = np.repeat(np.random.default_rng(4).random(50) < 0.2, 64)
    runs = _runs(np.concatenate([rough, calm]), np.roll(np.concatenate([rough, calm]), 5), half_life_rows=500.0)
    assert runs.effect < 2.0


def test_what_is_published_after_few_rows_that_share_their_noise_holds_of_those_to_come():
    held = []
    for seed in range(40):
        ratio = _levels(seed, 0.4)
        band = np.log(_published(ratio, 600).p10), np.log(_published(ratio, 600).p90)
        held.append(np.mean((ratio[600:] >= band[0]) & (ratio[600:] <= band[1])))
    assert 0.78 < np.mean(held) < 0.90
    assert np.quantile(held, 0.1) > 0.66


def test_what_is_published_of_rows_that_stand_alone_are_their_quantiles():
    ratio = _levels(1, 0.0, rows=3000)
    band = _published(ratio, 3000)
    assert np.log((band.p10, band.p90)) == pytest.approx([-0.064, 0.064], abs=0.008)


def test_a_merged_band_knows_the_runs_of_both():
    one, other = _runs(np.random.default_rng(5).random(2000) < 0.1), _runs(np.repeat([True, False] * 10, 100))
    windows, excess = one.windows + other.windows, one.excess + other.excess
    one.add(other)
    assert (one.windows, one.excess) == (windows, excess)
