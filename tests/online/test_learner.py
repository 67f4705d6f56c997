"""What the learner promises beyond its equations."""

import msgspec
import numpy as np
import pytest

from collector.config import Config
from collector.config.load import load
from online.bank import Bank
from online.errors import PrequentialError
from online.features import portable
from online.rows import PHASES, RowBlock, Target
from online.target import TargetState
from tests.support.configurations import CONFIGS
from tests.support.designs import design_of
from tests.support.linear_steps import BETA, NAMES, steps
from tests.support.watched import Watched

RLS = Config(learners=("rls",))
TARGET = Target.STEP_TIME


def _model(bank, name="portable"):
    return bank.targets("c")["step_time"].models[name]


def _found(bank):
    return np.array([f.coefficient for f in _model(bank).features])


def _joined(rows, length):
    """Every ``length`` steps as one row, from start to start."""
    n = len(rows) // length
    ends = np.arange(1, n + 1) * length
    return RowBlock(
        raw=rows.raw[: n * length],
        offsets=np.concatenate(([0], ends)),
        elapsed_us=rows.elapsed_us[: n * length].reshape(n, length).sum(axis=1),
        phase=np.zeros((n, len(PHASES))),
        weight=np.ones(n),
        end_ns=rows.end_ns[ends - 1],
        engine=np.zeros(n, np.int64),
        quality=np.full(n, 2),
    )


@pytest.mark.parametrize("length", [2, 7, 30])
def test_intervals_of_many_steps_give_the_coefficients_of_one(length):
    bank = Bank(RLS)
    bank.learn("c", TARGET, _joined(steps(300 * length, 1).rows, length))
    assert np.allclose(_found(bank), BETA, rtol=0.1)


def test_phases_are_learned_and_not_published():
    rows = steps(3000, 2).rows
    rng = np.random.default_rng(3)
    phase = rng.integers(-1, 2, size=(3000, 2)).astype(float)
    offset_us = np.array([700.0, -400.0])
    shifted = RowBlock(
        rows.raw,
        rows.offsets,
        rows.elapsed_us + phase @ offset_us,
        phase,
        rows.weight,
        rows.end_ns,
        rows.engine,
        rows.quality,
    )
    bank = Bank(RLS)
    bank.learn("c", TARGET, rows.slice(0, 500))
    bank.learn("c", TARGET, shifted.slice(500, 3000))
    assert [f.name for f in _model(bank).features] == list(NAMES)
    assert np.allclose(_found(bank), BETA, rtol=0.05)
    learner = bank._configs["c"][TARGET].models["portable"]
    assert np.allclose(learner.fit.beta[4:], offset_us, atol=60)


def test_phases_go_through_the_state():
    rows = steps(900, 2).rows
    phased = RowBlock(
        rows.raw, rows.offsets, rows.elapsed_us, np.ones((900, 2)), rows.weight, rows.end_ns, rows.engine, rows.quality
    )
    bank, again = Bank(RLS), Bank(RLS)
    bank.learn("c", TARGET, phased.slice(0, 450))
    again.restore(bank.state())
    for each in (bank, again):
        each.learn("c", TARGET, phased.slice(450, 900))
    assert msgspec.json.encode(again.targets("c")) == msgspec.json.encode(bank.targets("c"))


def test_stalls_are_in_the_mean_factor_and_not_in_the_coefficients():
    bank = Bank(RLS)
    stream = steps(4000, 6, stalls=0.02)
    bank.learn("c", TARGET, stream.rows)
    target = bank.targets("c")["step_time"]
    assert np.allclose(_found(bank), BETA, rtol=0.03)
    assert target.mean_factor == pytest.approx(stream.rows.elapsed_us.sum() / stream.truth_us.sum(), rel=0.05)
    assert target.mean_us == pytest.approx(stream.rows.elapsed_us.mean(), rel=0.05)


def test_statuses_say_what_the_data_say():
    rows = steps(2000, 7, batch=(4, 4), prefill_share=0.3).rows
    bank = Bank(RLS)
    bank.learn("c", TARGET, rows)
    status = {f.name: f.status for f in _model(bank).features}
    assert status["prefill_tokens"] == "identified"
    assert status["requests"] == "constant"


def test_a_cost_that_is_none_is_at_the_bound():
    beta = BETA * np.array([1, 1, 0, 1])
    bank = Bank(RLS)
    bank.learn("c", TARGET, steps(800, 9, beta=beta, noise=0.03).rows)
    context = _model(bank).features[2]
    assert context.status == "at_bound" or context.coefficient < 3 * context.stderr
    assert context.coefficient >= 0.0


def test_a_slow_spell_that_ends_leaves_the_coefficients_where_they_were():
    rows = steps(3000, 10).rows
    y = rows.elapsed_us.copy()
    y[1500:1590] *= 1.6
    spell = RowBlock(rows.raw, rows.offsets, y, rows.phase, rows.weight, rows.end_ns, rows.engine, rows.quality)
    run = Watched(spell)
    assert not run.reports
    assert np.allclose(run.model.fit.beta[:4], Watched(rows).model.fit.beta[:4], rtol=0.05)
    assert run.error(1700, 1200, "slow") < 0.015


def test_a_confirmed_change_is_published_with_its_time_and_gain():
    stream = steps(3000, 11, drift_at=1500, gain=1.3)
    bank = Bank(RLS)
    bank.learn("c", TARGET, stream.rows)
    drift = bank.targets("c")["step_time"].drift
    assert drift.count == 1
    assert drift.gain == pytest.approx(1.3, rel=0.03)
    late_ns = drift.last_unix_nano - int(stream.rows.end_ns[1500])
    assert abs(late_ns) <= drift.last_within_s * 1e9 < stream.rows.end_ns[1600] - stream.rows.end_ns[1500]
    assert np.allclose(_found(bank), 1.3 * BETA, rtol=0.05)


def test_a_change_of_mix_is_not_a_change_of_speed():
    parts = [steps(1500, 12, batch=(1, 4)), steps(1500, 13, batch=(40, 64)), steps(1500, 14, batch=(1, 64))]
    rows = RowBlock.concatenate([part.rows for part in parts])
    # A form that no line can follow: every third batch size costs 20 % more.
    requests = rows.raw[:, 6]
    y = rows.elapsed_us * np.where(requests % 3 == 0, 1.2, 1.0)
    bent = RowBlock(rows.raw, rows.offsets, y, rows.phase, rows.weight, rows.end_ns, rows.engine, rows.quality)
    assert not Watched(bent).reports


def test_errors_have_the_quantiles_of_the_rows():
    rng = np.random.default_rng(15)
    ape = np.abs(rng.normal(0, 0.05, 4000))
    error = PrequentialError()
    for start in range(0, 4000, 40):
        error.learn(ape[start : start + 40])
    found = error.snapshot()
    assert found.mape == pytest.approx(ape.mean(), rel=0.01)
    assert found.median_ape == pytest.approx(np.median(ape), rel=0.04)
    assert found.p90_ape == pytest.approx(np.quantile(ape, 0.9), rel=0.04)


def test_errors_forget():
    error = PrequentialError()
    error.learn(np.full(1000, 0.5))
    for _ in range(20):
        error.learn(np.full(1000, 0.01))
    assert error.snapshot().mape < 0.011


def test_shape_factors_predict_what_no_line_can_and_leave_the_coefficients_alone():
    rows = steps(4000, 16, batch=(1, 8)).rows
    y = rows.elapsed_us * np.where(rows.raw[:, 6] % 4 == 0, 0.8, 1.0)
    bent = RowBlock(rows.raw, rows.offsets, y, rows.phase, rows.weight, rows.end_ns, rows.engine, rows.quality)
    bank = Bank(RLS)
    bank.learn("c", TARGET, bent)
    target = bank.targets("c")["step_time"]
    model = target.models["portable"]
    assert model.prediction_error.mape < 0.5 * model.error.mape
    factors = {name: each.factor for name, each in target.shape_factors.items() if name.startswith("decode")}
    assert 0.75 < factors["decode:4"] / factors["decode:5"] < 0.9
    assert set(target.shape_factors) == set(target.seen.cells)
    assert target.seen.features["requests"] == (1.0, rows.raw[:, 6].max())


def test_a_change_of_speed_in_a_history_is_learned_as_such_in_the_bulk_profile():
    rows = steps(20_000, 12, noise=0.02, drift_at=10_000, gain=1.3).rows
    bank = Bank(load(None, {}, "bulk"))
    bank.learn("c", TARGET, rows)
    assert bank.targets("c")["step_time"].drift.count == 1
    assert np.allclose(_found(bank), 1.3 * BETA, rtol=0.05)


def test_a_set_that_becomes_available_later_starts_then():
    bank = Bank(Config(learners=("rls",), feature_sets=("portable", "physics")))
    bank.learn("c", TARGET, steps(110, 17).rows)
    assert "physics" not in bank.targets("c")["step_time"].models
    bank.describe("c", CONFIGS["7b"])
    bank.learn("c", TARGET, steps(500, 18).rows)
    assert 400 < _model(bank, "physics").rows <= 500


def test_standard_errors_hold_when_noise_has_a_memory():
    hits = []
    for seed in range(20):
        bank = Bank(Config(learners=("rls",)))
        bank.learn("c", TARGET, steps(4096, 900 + seed, noise=0.02, autocorrelation=0.97).rows)
        hits += [abs(f.coefficient - b) < 1.96 * f.stderr for f, b in zip(_model(bank).features, BETA, strict=True)]
    assert 0.87 < np.mean(hits) < 0.99


def test_a_long_dull_stretch_costs_nothing():
    state = TargetState(TARGET, Config(learners=("rls",), profile="bulk"))
    state.offer(portable(TARGET))
    rich, dull, back = steps(8192, 1), steps(1, 2, batch=(8, 8), prefill_share=0.0), steps(200, 3)
    model = state.models["portable"]
    state.learn(rich.rows)
    rng = np.random.default_rng(4)
    raw = np.repeat(dull.rows.raw, 4096, axis=0)
    for _ in range(100):
        y = dull.truth_us[0] * np.exp(0.01 * rng.standard_normal(4096))
        state.learn(RowBlock.of_lines(raw, y))
    block = design_of(back.rows, portable(TARGET))
    assert np.abs(block.x @ model.fit.beta[:4] / back.truth_us - 1).mean() < 0.01
    assert np.abs(model.predict(block) / back.truth_us - 1).mean() < 0.015
    assert model.diagnosis().condition < 1e8
