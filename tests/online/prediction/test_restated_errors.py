"""Errors counted of one prediction, told of another one that is rho times as large."""

import numpy as np
import pytest

from online.features.registry import portable
from online.prediction import Intervals, PrequentialError, Shift
from online.rows import Target
from tests.support.designs import design_of
from tests.support.linear_steps import steps

RNG = np.random.default_rng(1)
LOG_RATIO = 0.04 * RNG.standard_normal(3000)
DESIGN = design_of(steps(3000, 1).rows, portable(Target.STEP_TIME))


def counted(log_ratio):
    error = PrequentialError(half_life_rows=1e12)
    error.learn(np.abs(np.exp(-log_ratio) - 1.0))
    return error


@pytest.mark.parametrize("shift", [Shift(), Shift(1.17), Shift(0.73), Shift(1.0, 0.2), Shift(1.3, 0.1), Shift(2.5)])
def test_a_restated_error_is_that_of_the_other_prediction(shift):
    error = counted(LOG_RATIO)
    error.restate(shift)
    factors = RNG.choice(shift.factors, len(LOG_RATIO))
    other = counted(LOG_RATIO - np.log(factors))
    assert error.total == other.total
    assert error.mean() == pytest.approx(other.mean(), rel=0.02)
    for share in (0.5, 0.9):
        assert error.quantiles(share) == pytest.approx(other.quantiles(share), rel=0.08)


def test_without_a_shift_nothing_moves():
    error, intervals = counted(LOG_RATIO), Intervals()
    intervals.learn(DESIGN, LOG_RATIO)
    histograms = error.histogram.copy(), intervals.histogram.copy()
    sum_ape = error.sum_ape
    error.restate(Shift())
    intervals.restate(Shift())
    assert np.allclose(error.histogram, histograms[0])
    assert np.allclose(intervals.histogram, histograms[1])
    assert error.sum_ape == pytest.approx(sum_ape)


def test_restated_intervals_hold_the_rows_of_the_other_prediction():
    intervals = Intervals()
    intervals.learn(DESIGN, LOG_RATIO)
    intervals.restate(Shift(1.25))
    intervals.add(Intervals())
    found = intervals.snapshot()
    low, mid, high = np.exp(np.quantile(LOG_RATIO, (0.1, 0.5, 0.9))) / 1.25
    assert (found.p10, found.p50, found.p90) == pytest.approx((low, mid, high), rel=0.02)


@pytest.mark.parametrize("shift", [Shift(0.1, 5.0), Shift(1e9), Shift(0.0), Shift(1e-12, 1e-12)])
def test_a_shift_beyond_all_measure_leaves_everything_finite(shift):
    error, intervals = counted(LOG_RATIO), Intervals()
    intervals.learn(DESIGN, LOG_RATIO)
    error.restate(shift)
    intervals.restate(shift)
    assert error.histogram.sum() == pytest.approx(3000)
    assert intervals.histogram.sum() == pytest.approx(3000, rel=0.5)
    assert np.isfinite(error.mean())
    assert Shift.of(np.ones(3), np.zeros(3)) == Shift()
