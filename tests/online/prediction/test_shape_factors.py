"""The published prediction of a step is x beta F: by whom it is computed, and what its factors survive."""

import dataclasses

import numpy as np
import pytest

import tracefit
from collector.config import Config
from online import STEP_FEATURES, ConfigSnapshot, EngineSnapshot, RowBlock, Snapshot
from tests.support.banks import STEP, coefficients, learned, merged, restarted, told
from tests.support.linear_steps import BETA, steps
from tests.support.pipelines import client_of
from tests.support.recordings import otlp_file

CONTEXT = STEP_FEATURES.index("decode_context_tokens")


def bent(n, seed, gain=1.0):
    """Steps of a machine on which multiples of four are cheap."""
    rows = steps(n, seed, batch=(1, 8)).rows
    return dataclasses.replace(rows, elapsed_us=gain * rows.elapsed_us * np.where(rows.raw[:, 6] % 4 == 0, 0.8, 1.0))


def stalled(n, seed):
    """Steps of a machine on which a line holds for all shapes, and a fifth of the steps stalls."""
    rows, rng = steps(n, seed, batch=(1, 8)).rows, np.random.default_rng(seed)
    longer = np.where(rng.random(n) < 0.2, rng.uniform(1.2, 3.0, n), 1.0)
    return dataclasses.replace(rows, elapsed_us=rows.elapsed_us * longer)


def factors(bank):
    return {name: each.factor for name, each in told(bank).shape_factors.items()}


def test_the_client_says_of_a_shape_that_was_seen_what_coefficients_times_factor_give(tmp_path):
    config = client_of(otlp_file("c1_mixed"), tmp_path)
    often = [shape for shape in config.targets["step_time"].shapes.values() if shape.rows >= 64]
    assert len({round(shape.factor, 6) for shape in often}) > 3
    beta = [each.value for each in config.coefficients()]
    for shape in often:
        prefill, requests, context, _ = shape.usual
        product = np.dot(beta, (1.0, prefill, context, requests)) * shape.factor
        asked = config.step_time(prefill_tokens=prefill, requests=requests, decode_context_tokens=context)
        assert asked.us == pytest.approx(product, rel=0.02)


def test_factors_predict_what_no_line_can_and_leave_the_coefficients_alone():
    rows = bent(4000, 16)
    target = told(learned(rows))
    model = target.models["portable"]
    assert model.prediction_error.mape < 0.5 * model.error.mape
    assert 0.75 < target.shape_factors["decode:4"].factor / target.shape_factors["decode:5"].factor < 0.9
    assert set(target.shape_factors) == set(target.seen.cells)
    assert target.seen.features["requests"] == (1.0, rows.raw[:, 6].max())


def test_factors_survive_a_merge():
    parts = [learned(bent(2000, seed)) for seed in (1, 2)]
    one, both = factors(parts[0]), factors(merged(*parts))
    assert set(one) <= set(both)
    assert all(both[name] == pytest.approx(one[name], rel=0.03) for name in one if name.startswith("decode"))


def test_the_usual_work_of_a_merged_shape_is_the_mean_of_both():
    rows = bent(4000, 1)
    longer = dataclasses.replace(rows, raw=np.where(np.arange(rows.raw.shape[1]) == CONTEXT, 3.0, 1.0) * rows.raw)
    short, long = learned(rows), learned(longer)
    mine, theirs, both = (told(bank).shape_factors["decode:4"].usual for bank in (short, long, merged(short, long)))
    assert theirs[2] > 2.9 * mine[2]
    assert both[2] == pytest.approx(0.5 * (mine[2] + theirs[2]), rel=0.01)


def test_a_change_of_speed_moves_the_coefficients_of_all_models_and_not_the_factors():
    settings = Config(
        learners=("rls",), feature_sets=("portable", "custom"), custom={"step_time": ("requests", "intercept")}
    )
    before, after = (learned(bent(4000, 3), settings=settings) for _ in range(2))
    after.learn("c", STEP, bent(2000, 4, gain=1.4))
    assert told(after).drift.count == 1
    for name, index, within in (("portable", 0, 0.05), ("custom", 1, 0.1)):
        was, now = (coefficients(bank, name=name)[index] for bank in (before, after))
        assert now == pytest.approx(1.4 * was, rel=within)
    for name, factor in factors(before).items():
        if name.startswith("decode"):
            assert factors(after)[name] == pytest.approx(factor, rel=0.06)


def twelve_after(*times):
    """Steps of 12 requests that take so many times as long, among others: their factor, and how long they take."""
    usual, twelve = (steps(n, 5, batch=batch, prefill_share=0.0).rows for n, batch in ((2000, (1, 4)), (400, (12, 12))))
    twelve = twelve.slice(0, len(times))
    twelve.elapsed_us[:] *= times
    places = np.concatenate([np.arange(2000), np.linspace(300, 1999, len(times))])
    bank = learned(RowBlock.concatenate([usual, twelve]).take(np.argsort(places, kind="stable")))
    factor, work = factors(bank)["decode:12"], np.array([1.0, 12 * 700.0, 12.0])
    return factor, factor * (work @ coefficients(bank)) / (work @ BETA[[0, 2, 3]])


def test_a_shape_with_few_rows_is_hardly_moved_by_them_and_by_a_stall_hardly_any():
    assert 1.05 < twelve_after(1.5, 1.5)[0] < 1.15
    assert twelve_after(20.0)[0] < 1.25
    assert twelve_after(*[1.0] * 200, 150.0)[0] == pytest.approx(twelve_after(*[1.0] * 200)[0], abs=0.002)


def test_a_shape_that_always_takes_long_is_moved_by_all_of_it():
    assert twelve_after(*[3.0] * 400)[1] == pytest.approx(3.0, rel=0.1)


def test_factors_that_stalls_lift_are_not_applied_until_shapes_differ_also_after_a_restart_and_a_merge():
    banks = [learned(stalled(3000, seed)) for seed in (1, 2)]
    for bank in (*banks, restarted(banks[0]), merged(*banks)):
        assert not told(bank).shape_factors_applied
        assert set(factors(bank).values()) == {1.0}
    model = told(banks[0]).models["portable"]
    assert model.prediction_error.median_ape < 1.05 * model.error.median_ape
    bank = learned(stalled(1000, 1), bent(4000, 2))
    assert told(bank).shape_factors_applied
    assert factors(bank)["decode:4"] < 0.9


def test_stalls_count_once_where_factors_are_left_out():
    """They are in the mean factor then, and were in the usual times of all shapes as well."""
    bank = learned(stalled(9000, 1))
    assert not told(bank).shape_factors_applied
    engine = EngineSnapshot(instance="e", scheduling="sync", last_step=1)
    known = ConfigSnapshot(config_id="c", config={}, engines=[engine], telemetry="steps", targets=bank.targets("c"))
    snapshot = Snapshot(generation=1, created_unix_nano=1, tracefit_version="0", configs=[known])
    asked = tracefit.load(snapshot.to_json()).config().request(prompt_tokens=1, output_tokens=300, concurrency=4)
    plain_us = coefficients(bank) @ [1, 0, 4 * 151, 4]
    assert asked.itl.us / plain_us == pytest.approx(1.22, rel=0.03)  # a fifth takes 2.1 times as long


# ------------------------------------------------------------------- on their own
