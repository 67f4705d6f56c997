"""River's regression learns what the level leaves, is part of the published prediction while it wins, and says so."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from collector.config import Config
from online.bank import Bank, merge_states
from online.constants import MEMORY_ROWS as START_ROWS
from online.river import CONTEXT, RESIDUAL_MAX, ResidualModel, Thinning
from online.rows import STEP_FEATURES, CorrectionOutcome, RowBlock, Target
from online.state import StateError
from tests.support.linear_steps import steps

DEFAULT, RLS = Config(feature_sets=("portable",)), Config(feature_sets=("portable",), learners=("rls",))
TARGET = Target.STEP_TIME
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


def _learned(rows, settings=DEFAULT):
    bank = Bank(settings)
    bank.learn("c", TARGET, rows)
    return bank


@pytest.fixture(scope="module")
def queued():
    return _learned(_queued(3000, 1))


def test_what_the_queue_costs_is_learned_and_is_part_of_what_is_published(queued):
    target = queued.targets("c")["step_time"]
    model = target.models["portable"]
    assert target.correction.active
    assert model.prediction_error.mape < 0.6 * model.shaped_error.mape
    assert target.prediction_error == model.prediction_error
    without = _learned(_queued(3000, 1), RLS).targets("c")["step_time"]
    assert without.correction is None
    assert without.models["portable"].shaped_error == model.shaped_error
    assert without.models["portable"].features == model.features, "coefficients are of the statistics alone"
    assert without.interval == target.interval, "of what a reader of a file computes"


def test_every_row_is_accounted_for(queued):
    target = queued.targets("c")["step_time"]
    rows = target.correction.rows
    assert set(rows) == set(CorrectionOutcome)
    waiting = len(queued._configs["c"][Target.STEP_TIME].cutter)
    assert sum(rows.values()) == sum(target.residuals.rows) + waiting, "of those that were predicted"


def test_steps_that_leave_nothing_over_are_not_corrected():
    for seed in (2, 3):
        target = _learned(_queued(3000, seed, slower=0.0, noise=0.02)).targets("c")["step_time"]
        model = target.models["portable"]
        assert model.prediction_error.mape <= model.shaped_error.mape * 1.02
        assert target.correction.factor == pytest.approx(1.0, abs=0.02)


def test_a_correction_that_stops_helping_goes_off():
    bank = _learned(_queued(2000, 4))
    assert bank.targets("c")["step_time"].correction.active
    after = _queued(1500, 5, slower=0.0)
    flips = 0.08 * (-1.0) ** (np.arange(1500) // 25) * (np.arange(1500) // 2 % 2)  # what was learned is soon wrong
    later = after.end_ns + 2000 * 50_000_000
    bank.learn("c", TARGET, RowBlock.of_lines(after.raw, after.elapsed_us * np.exp(flips), end_ns=later))
    found = bank.targets("c")["step_time"].correction
    assert (found.active, found.factor) == (False, 1.0)


@pytest.mark.parametrize("cut", [40, 1301])
def test_stop_and_restart_is_no_restart(cut):
    rows = _queued(2600, 6)
    through, stopped, again = (Bank(DEFAULT) for _ in range(3))
    through.learn("c", TARGET, rows)
    stopped.learn("c", TARGET, rows.slice(0, cut))
    again.restore(stopped.state())
    assert again.targets("c") == stopped.targets("c")
    again.learn("c", TARGET, rows.slice(cut, 2600))
    assert through.targets("c")["step_time"].correction.active
    assert again.state() == through.state()


def test_a_model_of_other_columns_is_refused():
    state = ResidualModel(1.0).to_state()
    state["model"]["weights"] = np.zeros(1)
    with pytest.raises(StateError):
        ResidualModel(1.0).from_state(state)


def test_reading_changes_nothing():
    rows = _queued(1500, 7)
    read, left = Bank(DEFAULT), Bank(DEFAULT)
    for at in range(0, 1500, 70):
        part = rows.slice(at, min(1500, at + 70))
        for bank in (read, left):
            bank.learn("c", TARGET, part)
        read.targets("c")
    assert read.targets("c") == left.targets("c")
    assert read.state() == left.state()


def test_a_merged_state_starts_over_and_counts_the_rows_of_both(queued):
    other = _learned(_queued(2000, 8))
    counts = [bank.targets("c")["step_time"].correction.rows for bank in (queued, other)]
    merged = []
    for parts in ((queued, other), (other, queued)):
        bank = Bank(DEFAULT)
        bank.restore(merge_states([each.state() for each in parts], DEFAULT))
        merged.append(bank.targets("c")["step_time"].correction)
    assert merged[0] == merged[1]
    assert not merged[0].active
    assert merged[0].rows == {name: counts[0][name] + counts[1][name] for name in counts[0]}


def test_a_state_of_another_configuration_of_learners_goes_on(queued):
    without, with_it = Bank(RLS), Bank(DEFAULT)
    without.restore(queued.state())
    assert without.targets("c")["step_time"].correction is None
    with_it.restore(without.state())
    with_it.learn("c", TARGET, _queued(500, 9))
    assert with_it.targets("c")["step_time"].correction.rows["learned"] > 0


@pytest.mark.parametrize("per_s", [100.0, 1000.0])
def test_at_any_load_as_many_rows_are_seen_and_the_others_go_by_the_last_that_was(per_s):
    target = _learned(_queued(int(12 * per_s), 12, per_s=per_s)).targets("c")["step_time"]
    assert target.correction.rows["learned"] <= 32 * 13
    assert target.correction.rows["thinned"] > 600
    model = target.models["portable"]
    assert model.prediction_error.mape <= model.shaped_error.mape * 1.05


def test_how_rows_come_decides_nothing():
    rows = _queued(2400, 13, per_s=300.0)
    late = rows.end_ns.copy()
    late[::7] -= 200_000_000  # of another engine, whose exports come later
    rows = RowBlock.of_lines(rows.raw, rows.elapsed_us, end_ns=late)
    whole, parts, at = _learned(rows), Bank(DEFAULT), 0
    for size in np.random.default_rng(3).integers(1, 90, 400):
        if at < len(rows):
            parts.learn("c", TARGET, rows.slice(at, min(at + int(size), len(rows))))
        at += int(size)
    assert msgspec.json.encode(whole.targets("c")) == msgspec.json.encode(parts.targets("c"))


def test_rows_that_are_no_measurement_do_not_shift_the_context_of_others():
    rows = _queued(2600, 14)
    bad = np.arange(2600) % 5 == 2
    elapsed = np.where(bad, -1.0, rows.elapsed_us)
    mixed = _learned(RowBlock.of_lines(rows.raw, elapsed, end_ns=rows.end_ns)).targets("c")["step_time"]
    alone = _learned(rows.take(~bad)).targets("c")["step_time"]
    assert mixed.correction == alone.correction
    assert mixed.models["portable"].prediction_error == alone.models["portable"].prediction_error


def test_a_row_that_no_coefficient_knows_is_not_learned_because_its_context_is_known():
    rows = _queued(600, 15)
    raw = rows.raw.copy()
    raw[::3, STEP_FEATURES.index("decode_context_tokens")] = np.nan
    bank = Bank(DEFAULT)
    outcome = bank.learn("c", TARGET, RowBlock.of_lines(raw, rows.elapsed_us, end_ns=rows.end_ns))
    assert (outcome["learned"], outcome["unknown_feature"]) == (400, 200)


def test_what_is_not_known_of_a_step_is_zero_and_nothing_is_out_of_range():
    rows = _queued(4, 16)
    raw = np.full_like(rows.raw, np.nan)
    raw[1] = np.inf
    found = CONTEXT.evaluate(RowBlock.of_lines(raw, rows.elapsed_us))
    assert np.isfinite(found).all()
    assert not found[0].any()


# ------------------------------------------------------------------- the model alone


@pytest.mark.parametrize("size", [0.0, 1e-9, 1.0, 1e9])
@pytest.mark.parametrize("ratio", [-40.0, -0.149, 0.149, 27.0])
def test_it_stays_finite_and_within_its_bounds_whatever_it_learns(size, ratio):
    model = ResidualModel(1e6)
    for k in range(40):
        context = np.full((16, len(CONTEXT)), size * (k % 3))
        found = model.learn(context, np.full(16, ratio) * (-1) ** k, np.full(16, SECOND_NS * (k + 1)))
        assert np.isfinite(found).all()
        assert np.abs(found).max() <= RESIDUAL_MAX


def test_it_learns_before_it_adds_anything():
    model, first = ResidualModel(1e6), None
    for k in range(30):
        found = model.learn(np.ones((16, len(CONTEXT))), np.full(16, 0.1), np.full(16, SECOND_NS * (k + 1)))
        if found.any() and first is None:
            first = model.learned
    assert START_ROWS <= first < START_ROWS + 32


@pytest.mark.parametrize("per_s", [3, 20, 100, 1000, 50_000])
@pytest.mark.parametrize("block", [1, 7, 32, 512])
def test_at_most_so_many_rows_per_second_are_seen_in_blocks_of_any_size(per_s, block):
    end_ns = 1_700_000_000_000_000_000 + (np.arange(20_000) * (1e9 / per_s)).astype(np.int64)
    model = Thinning(32.0)
    seen = sum(len(model.pick(end_ns[at : at + block])) for at in range(0, 20_000, block))
    span_s = 20_000 / per_s
    assert seen <= 32.0 * span_s + 32
    in_view = max(block / per_s, 1.0)  # of a block that lasts longer than a second, those of one second
    assert seen >= min(0.9 * 32.0 * span_s / in_view, 20_000 - 2 * block) - 32


def test_long_steps_are_seen_no_more_often_than_short_ones():
    rng = np.random.default_rng(2)
    long = rng.random(60_000) < 0.1
    end_ns = np.cumsum(np.where(long, 20_000_000, 1_000_000))
    model = Thinning(32.0)
    seen = [model.pick(end_ns[at : at + 200]) + at for at in range(0, 60_000, 200)]
    assert long[np.concatenate(seen)].mean() == pytest.approx(0.1, abs=0.015)


def test_a_clock_that_was_ahead_ends_nothing():
    model = Thinning(32.0)
    model.pick(np.arange(50) * 10**7 + 10**18)
    later = sum(len(model.pick(np.arange(32) * 10**7 + k * 32 * 10**7)) for k in range(20))
    assert later > 100


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
    monkeypatch.setattr(Config, "river_rows_per_s", 8)
    learners = ("rls", "river:linear_model.PARegressor")
    settings = Config(learners=learners, feature_sets=("portable",))
    bank = _learned(_queued(3000, 11, per_s=500.0), settings)
    target = bank.targets("c")["step_time"]
    assert target.models["portable"].rows == 3000
    assert 30 <= target.models["river:linear_model.PARegressor/portable"].rows <= 8 * 6 + 8
    assert msgspec.json.encode(target)
