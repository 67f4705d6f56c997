"""One battery for every detector, and one for the intervals."""

import numpy as np
import pytest

from online.change import DETECTORS
from online.errors import WIDER
from tests.support.banks import learned, told
from tests.support.linear_steps import BETA, steps
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


# -------------------------------------------------------------------- bands

NOISES = {
    "wide": lambda rng, n: 0.2 * rng.standard_normal(n),
    "skewed": lambda rng, n: rng.exponential(0.05, n),
    "heavy": lambda rng, n: 0.02 * rng.standard_t(2, n),
}


def band_after(*blocks):
    """Log of P50 by P10, and of P90 by P50, of observed by predicted."""
    interval = told(learned(*blocks)).interval
    return np.diff(np.log([interval.p10, interval.p50, interval.p90]))


@pytest.mark.parametrize("noise", NOISES)
def test_the_band_is_that_of_the_ratios_and_wider_by_what_levels_will_wander(noise):
    rows, rng = steps(8000, 3, noise=0.0).rows, np.random.default_rng(5)
    rows.elapsed_us[:] *= np.exp(NOISES[noise](rng, 8000))
    ratios = np.quantile(NOISES[noise](rng, 100_000), [0.1, 0.5, 0.9])
    assert band_after(rows) == pytest.approx(WIDER * np.diff(ratios), rel=0.1)


def test_after_a_change_of_speed_the_band_is_learned_anew():
    loud = steps(3000, 1, noise=0.1).rows
    calm = steps(1000, 2, noise=0.01, beta=2.0 * BETA, start_ns=int(loud.end_ns[-1])).rows
    assert band_after(loud).sum() > 0.22
    assert band_after(loud, calm).sum() < 0.14
