"""River's regression learns what the level leaves, is part of the published prediction while it wins, and says so."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from collector.config import Config
from online import STEP_FEATURES, RowBlock, river
from online.level import LEVEL_MAX
from online.river import ResidualModel
from online.state import StateError
from tests.support.banks import STEP, learned, merged, told
from tests.support.linear_steps import steps

DEFAULT, RLS = Config(feature_sets=("portable",)), Config(feature_sets=("portable",), learners=("rls",))
SECOND_NS = 10**9


def _queued(n, seed, *, slower=0.08, per_s=20.0, noise=0.01):
    """Steps of which every other pair takes longer, as no column of a feature set knows and no level can follow."""
    rows = steps(n, seed, noise=noise).rows
    waiting = (np.arange(n) // 2 % 2) * 7.0
    raw = rows.raw.copy()
    raw[:, STEP_FEATURES.index("waiting")] = waiting
    raw[:, STEP_FEATURES.index("kv_usage_ratio")] = 0.4
    end_ns = 1_700_000_000_000_000_000 + (np.arange(n) * (1e9 / per_s)).astype(np.int64)
    return RowBlock.of_lines(raw, rows.elapsed_us * np.exp(slower * (waiting > 0)), end_ns=end_ns)


@pytest.fixture(scope="module")
def queued():
    return learned(_queued(3000, 1), settings=DEFAULT)


def _told(rows, settings=DEFAULT):
    """What is published after these rows, and the model that it stands on."""
    target = told(learned(rows, settings=settings))
    return target, target.models["portable"]


def test_what_the_queue_costs_is_learned_and_is_part_of_what_is_published(queued):
    target = told(queued)
    model = target.models["portable"]
    assert target.correction.active
    assert set(target.correction.rows) == {"learned", "thinned"}
    assert sum(target.correction.rows.values()) == 3000 - 20, "all but the first block, of a second"
    assert model.prediction_error.mape < 0.6 * model.shaped_error.mape
    without, plain = _told(_queued(3000, 1), RLS)
    assert without.correction is None
    assert plain.shaped_error == model.shaped_error
    assert plain.features == model.features, "coefficients are of the statistics alone"
    assert without.interval == target.interval, "of what a reader of a file computes"


def test_steps_that_leave_nothing_over_are_not_corrected():
    for seed in (2, 3):
        target, model = _told(_queued(3000, seed, slower=0.0, noise=0.02))
        assert model.prediction_error.mape <= model.shaped_error.mape * 1.02
        assert target.correction.factor == pytest.approx(1.0, abs=0.02)


def test_a_correction_that_stops_helping_goes_off():
    bank = learned(_queued(2000, 4), settings=DEFAULT)
    assert told(bank).correction.active
    after = _queued(1500, 5, slower=0.0)
    flips = 0.08 * (-1.0) ** (np.arange(1500) // 25) * (np.arange(1500) // 2 % 2)  # what was learned is soon wrong
    later = after.end_ns + 2000 * 50_000_000
    bank.learn("c", STEP, RowBlock.of_lines(after.raw, after.elapsed_us * np.exp(flips), end_ns=later))
    found = told(bank).correction
    assert (found.active, found.factor) == (False, 1.0)


def test_a_model_of_other_columns_is_refused():
    state = ResidualModel().to_state()
    state["model"]["weights"] = np.zeros(1)
    with pytest.raises(StateError):
        ResidualModel().from_state(state)


def test_a_merged_state_starts_over_and_counts_the_rows_of_both(queued):
    other = learned(_queued(2000, 8), settings=DEFAULT)
    mine, theirs = (told(bank).correction.rows for bank in (queued, other))
    both = told(merged(queued, other)).correction
    assert both == told(merged(other, queued)).correction
    assert not both.active
    assert both.rows == {name: mine[name] + theirs[name] for name in mine}


# ------------------------------------------------------------------- the model alone


@pytest.mark.parametrize("size", [0.0, 1e-9, 1.0, 1e9])
@pytest.mark.parametrize("ratio", [-40.0, -0.249, 0.249, 27.0])
def test_it_stays_finite_and_within_its_bounds_whatever_it_learns(size, ratio, monkeypatch):
    monkeypatch.setattr(river, "ROWS_PER_S", 1e6)
    model = ResidualModel()
    for k in range(40):
        raw = np.full((16, len(STEP_FEATURES)), size * (k % 3))
        rows = RowBlock.of_lines(raw, np.ones(16), end_ns=np.full(16, SECOND_NS * (k + 1)))
        found = model.learn(rows, np.full(16, ratio) * (-1) ** k)
        assert np.isfinite(found).all()
        assert np.abs(found).max() <= LEVEL_MAX


# ------------------------------------------------------------------- cost


def test_an_idle_sidecar_does_not_import_models_of_river():
    code = """
import sys
from collector.config.schema import Config
from online import Bank
assert "river:residual" in Config().learners
Bank(Config())
assert "river.linear_model" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_of_rivers_sees_a_bounded_number_of_rows(monkeypatch):
    monkeypatch.setattr(river, "ROWS_PER_S", 8.0)
    learners = ("rls", "river:linear_model.PARegressor")
    settings = Config(learners=learners, feature_sets=("portable",))
    target, model = _told(_queued(3000, 11, per_s=500.0), settings)
    assert model.rows == 3000
    assert 30 <= target.models["river:linear_model.PARegressor/portable"].rows <= 8 * 6 + 8
    assert msgspec.json.encode(target)
