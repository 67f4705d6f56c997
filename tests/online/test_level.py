"""The level: what the last rows took beside x beta F, chosen by its own error, for steps with and without prefill."""

import numpy as np
import pytest

from online.level import HALF_LIVES_ROWS, LEVEL_MAX, PhaseLevel
from online.rows import STEP_FEATURES, RowBlock
from tests.support.banks import learned, merged, told
from tests.support.linear_steps import steps

PREFILL = STEP_FEATURES.index("prefill_tokens")


def _moving(n, seed, log_level, *, phase=None):
    """Steps whose times move by ``log_level`` (n,), all or those with (True) or without (False) prefill."""
    rows = steps(n, seed, noise=0.01).rows
    here = np.ones(n, bool) if phase is None else (rows.raw[:, PREFILL] > 0) == phase
    return RowBlock.of_lines(rows.raw, rows.elapsed_us * np.exp(log_level * here), end_ns=rows.end_ns)


def _waves(n):
    return 0.05 * np.sign(np.sin(np.arange(n) / 250.0))


def test_a_speed_that_wanders_is_followed_within_rows():
    target = told(learned(_moving(4300, 1, _waves(4300))))
    model = target.models["portable"]
    assert model.prediction_error.mape < 0.6 * model.shaped_error.mape
    decode = target.level["decode"]
    assert decode.half_life_rows in HALF_LIVES_ROWS
    assert decode.factor == pytest.approx(np.exp(_waves(4300)[-1]), rel=0.06)


def test_a_calm_machine_loses_nothing_by_its_level():
    target = told(learned(_moving(4000, 2, np.zeros(4000))))
    model = target.models["portable"]
    assert model.prediction_error.mape <= 1.02 * model.shaped_error.mape
    assert all(level.factor == pytest.approx(1.0, abs=0.02) for level in target.level.values())


@pytest.mark.parametrize(("phase", "moved", "calm"), [(True, "prefill", "decode"), (False, "decode", "prefill")])
def test_each_phase_has_a_level_of_its_own(phase, moved, calm):
    ramp = np.linspace(0.0, 0.15, 3000)
    level = told(learned(_moving(3000, 3, ramp, phase=phase))).level
    assert level[moved].factor > level[calm].factor + 0.01


@pytest.mark.parametrize("ratio", [-700.0, -1.0, 5.0, 600.0])
def test_it_stays_within_its_bounds_whatever_it_learns(ratio):
    level = PhaseLevel()
    for k in range(5):
        found = level.learn(np.full(2000, ratio) * (-1) ** k, np.full(2000, k + 1))
        assert np.abs(found).max() <= LEVEL_MAX
        assert np.isfinite(level.now.errors).all()


def test_a_confirmed_change_of_speed_ends_the_level_because_beta_has_it():
    drifted = steps(2600, 10, noise=0.02, drift_at=2000, gain=1.4).rows
    target = told(learned(drifted))
    assert target.drift.count == 1
    assert all(abs(np.log(level.factor)) < 0.05 for level in target.level.values())


def test_a_merged_level_starts_over_and_counts_the_rows_of_both():
    banks = [learned(_moving(1500, seed, _waves(1500))) for seed in (7, 8)]
    rows = sum(told(bank).level["decode"].rows for bank in banks)
    decode = told(merged(*banks)).level["decode"]
    assert (decode.factor, decode.half_life_rows, decode.rows) == (1.0, None, rows)
