"""What the learner promises beyond its equations."""

import dataclasses

import numpy as np
import pytest

from collector.config import Config
from collector.config.load import load
from online import STEP_FEATURES, RowBlock
from online.errors import PrequentialError
from online.features import portable
from tests.support.banks import STEP, coefficients, features_of, learned, told
from tests.support.linear_steps import BETA, NAMES, steps


def _joined(rows, length):
    """Every ``length`` steps as one row, from start to start."""
    last = slice(length - 1, None, length)
    per_row = {name: getattr(rows, name)[last] for name in ("phase", "weight", "end_ns", "engine", "quality")}
    elapsed_us = rows.elapsed_us.reshape(-1, length).sum(axis=1)
    return RowBlock(rows.raw, np.arange(0, len(rows) + 1, length), elapsed_us, **per_row)


@pytest.mark.parametrize("length", [2, 7, 30])
def test_intervals_of_many_steps_give_the_coefficients_of_one(length):
    assert coefficients(learned(_joined(steps(300 * length, 1).rows, length))) == pytest.approx(BETA, rel=0.1)


def test_phases_are_learned_and_not_published():
    rows = steps(3000, 2).rows
    phase = np.random.default_rng(3).integers(-1, 2, size=(3000, 2)).astype(float)
    phase[:500] = 0.0
    shifted = dataclasses.replace(rows, phase=phase, elapsed_us=rows.elapsed_us + phase @ [700.0, -400.0])
    bank = learned(shifted.slice(0, 500), shifted.slice(500, 3000))
    assert tuple(features_of(bank)) == NAMES
    assert coefficients(bank) == pytest.approx(BETA, rel=0.05)
    assert told(bank).models["portable"].error.median_ape < 0.02, "the stamps take nothing from what rows say"


@pytest.mark.parametrize("feature", ["prefill_tokens", "decode_context_tokens", "requests"])
def test_a_row_of_work_that_cannot_be_moves_no_coefficient(feature):
    rows = steps(3000, 6).rows
    raw = rows.raw.copy()
    raw[1500, STEP_FEATURES.index(feature)] = 2.0**30
    spoilt = learned(dataclasses.replace(rows, raw=raw))
    assert coefficients(spoilt) == pytest.approx(coefficients(learned(rows)), rel=0.01)


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


def test_a_change_of_speed_in_a_history_is_learned_as_such_in_the_bulk_profile():
    rows = steps(20_000, 12, noise=0.02, drift_at=10_000, gain=1.3).rows
    bank = learned(rows, settings=load(None, {}, "bulk"))
    assert told(bank).drift.count == 1
    assert coefficients(bank) == pytest.approx(1.3 * BETA, rel=0.05)


def test_a_long_dull_stretch_costs_nothing():
    bank = learned(steps(8192, 1).rows, settings=Config(learners=("rls",), profile="bulk"))
    dull, back = steps(1, 2, batch=(8, 8), prefill_share=0.0), steps(200, 3)
    raw, rng = np.repeat(dull.rows.raw, 4096, axis=0), np.random.default_rng(4)
    for _ in range(100):
        bank.learn("c", STEP, RowBlock.of_lines(raw, dull.truth_us[0] * np.exp(0.01 * rng.standard_normal(4096))))
    predicted = portable(STEP).evaluate(back.rows) @ coefficients(bank)
    assert np.abs(predicted / back.truth_us - 1).mean() < 0.01
    assert told(bank).models["portable"].condition_number < 1e8
