"""One battery for every detector, and one for the intervals."""

import numpy as np
import pytest

from online.blocks import Design
from online.change import DETECTORS
from online.errors import WIDER, Intervals
from online.features import portable
from tests.support.banks import STEP
from tests.support.linear_steps import steps
from tests.support.watched import Watched

SEES = [name for name in DETECTORS if name != "none"]


def _run(detector, n=4000, **kind):
    return Watched(steps(n, 31, noise=0.02, **kind).rows, detector).model.drift


@pytest.mark.parametrize("detector", SEES)
@pytest.mark.parametrize("gain", [0.5, 1.5])
def test_a_change_of_speed_is_confirmed_with_its_gain(detector, gain):
    drift = _run(detector, drift_at=2500, gain=gain)
    assert drift.confirmed >= 1
    assert drift.gain == pytest.approx(gain, rel=0.05)


def test_without_a_detector_no_change_of_speed_is_told():
    drift = _run("none", drift_at=2500, gain=3.0)
    assert (drift.confirmed, drift.last_ns) == (0, 0)


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("stalls", [0.0, 0.03])
def test_calm_streams_raise_no_confirmed_alarm_nor_do_stalls(detector, stalls):
    assert _run(detector, n=6000, stalls=stalls).confirmed == 0


# -------------------------------------------------------------------- intervals


def _covered(noise, n=12_000):
    rng = np.random.default_rng(5)
    rows, ratio = steps(n, 3).rows, noise(rng, n)
    intervals, inside = Intervals(), np.zeros(n, bool)
    for start in range(0, n, 32):
        block = Design.of(portable(STEP), rows.slice(start, min(start + 32, n)))
        r = ratio[start : start + 32]
        if (known := intervals.snapshot(by_stratum=False)) is not None:
            inside[start : start + 32] = (r >= np.log(known.p10)) & (r <= np.log(known.p90))
        intervals.learn(block, r)
    return inside, intervals


NOISES = {
    "normal": lambda rng, n: 0.01 * rng.standard_normal(n),
    "wide": lambda rng, n: 0.2 * rng.standard_normal(n),
    "skewed": lambda rng, n: rng.exponential(0.05, n),
    "heavy": lambda rng, n: 0.02 * rng.standard_t(2, n),
}


@pytest.mark.parametrize("noise", NOISES)
def test_the_band_is_that_of_the_ratios_and_wider_by_what_levels_will_wander(noise):
    """Where none wanders, more than four of five fall between p10 and p90."""
    inside, intervals = _covered(NOISES[noise])
    assert 0.80 <= inside[2000:].mean() <= 0.92
    snapshot, ratios = intervals.snapshot(), NOISES[noise](np.random.default_rng(6), 100_000)
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
    wider = middle + WIDER * (np.array([low, middle, high]) - middle)
    found = np.log([snapshot.p10, snapshot.p50, snapshot.p90])
    assert np.abs(found - wider).max() < 0.15 * (high - low)


def test_the_first_bad_predictions_do_not_widen_the_band_for_long():
    rng, intervals = np.random.default_rng(7), Intervals()
    block = Design.of(portable(STEP), steps(32, 3, batch=(4, 4), prefill_share=0.0).rows)
    for number in range(104):  # three half-lives after them
        intervals.learn(block, (0.5 if number < 8 else 0.05) * rng.standard_normal(32))
    snapshot = intervals.snapshot()
    assert np.log(snapshot.p90 / snapshot.p10) < 0.16


def test_after_a_change_of_speed_the_band_is_learned_anew():
    _, intervals = _covered(NOISES["wide"], n=3000)
    intervals.forget(0.02)
    block, rng = Design.of(portable(STEP), steps(32, 3).rows), np.random.default_rng(0)
    for _ in range(10):
        intervals.learn(block, 0.01 * rng.standard_normal(32))
    snapshot = intervals.snapshot()
    assert np.log(snapshot.p90 / snapshot.p10) < 0.06
