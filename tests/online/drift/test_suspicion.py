"""What confirms a suspected change of speed and what refutes it: rows beside the usual time of their batch shapes."""

import numpy as np
import pytest

from online.drift.detectors import DriftSettings
from online.drift.suspicion import Suspicion

SPREAD = 0.06


def suspicion_of(gain, rows_before=()):
    """Suspected are steps that take so many times as long; ``rows_before`` were learned up to the alarm."""
    suspicion = Suspicion(DriftSettings())
    suspicion.gain, suspicion.usual, suspicion.usual_range = float(np.log(gain)), 0.4, 2.0
    suspicion.began(list(rows_before) or [suspicion.gain])
    return suspicion


def told(suspicion, ratio, rows):
    """After so many more rows of so many times the usual time: +1 confirmed, -1 refuted, else 0."""
    rng = np.random.default_rng(rows)
    for _ in range(rows // 8):
        e = np.log(ratio) + rng.normal(0.0, SPREAD, 8)
        suspicion.learn(e, np.clip(e / SPREAD, -8.0, 8.0), np.full(8, SPREAD))
        if suspicion.confirmed or suspicion.refuted:
            return 1 if suspicion.confirmed else -1
    return 0


def test_a_change_counts_from_where_it_began():
    usual, changed = [0.03, -0.02, 0.01, -0.03] * 8, [0.2, 0.4, 0.1, 0.35] * 6
    suspicion = suspicion_of(1.3, [*usual, *changed])
    assert suspicion.e == changed
    assert told(suspicion, 1.3, 104) == 0
    assert told(suspicion, 1.3, 8) == 1


@pytest.mark.parametrize("gain", [1.4, 0.7])
def test_what_ends_before_it_lasted_is_refuted(gain):
    suspicion = suspicion_of(gain, [np.log(gain)] * 40)
    assert told(suspicion, gain, 88) == 0
    assert told(suspicion, 1.0, 96) == -1


def test_a_burst_does_not_refute_that_steps_became_faster():
    """Bursts only slow down: this one hides the change for its time."""
    suspicion = suspicion_of(0.8, [np.log(0.8)] * 40)
    assert told(suspicion, 0.8, 32) == told(suspicion, 0.8 * 1.35, 40) == 0
    assert told(suspicion, 0.8, 160) == 1


@pytest.mark.parametrize("alarm", [1.25, 1.5])
def test_a_burst_beside_the_alarm_does_not_hide_the_change_that_it_began_with(alarm):
    """The alarm took the change for larger than it is."""
    assert told(suspicion_of(alarm, [np.log(1.15)] * 20 + [np.log(alarm)] * 20), 1.15, 320) == 1


@pytest.mark.parametrize(("first", "then"), [(0.5, 0.3), (0.3, 0.3), (0.3, 0.5)])
def test_a_burst_beside_a_change_is_none_of_its_gain(first, then):
    suspicion = Suspicion(DriftSettings())
    suspicion.e = [first] * 60 + [then] * 56
    assert suspicion.measured_gain() == pytest.approx(0.3)
