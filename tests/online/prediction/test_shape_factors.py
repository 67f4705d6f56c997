"""The published prediction of a step is x beta F: by whom it is computed, and what its factors survive."""

import json

import numpy as np
import pytest

import tracefit
from collector.commands.replay import replay
from collector.config.schema import Config
from collector.runtime import SystemClock
from online.bank import Bank, merge_states
from online.features import custom, portable
from online.rows import STEP_FEATURES, RowBlock, Target
from online.snapshot import ConfigSnapshot, EngineSnapshot, Snapshot
from online.target import TargetState
from tests.support.linear_steps import steps
from tests.support.paths import DATA

RLS = Config(learners=("rls",))
TARGET = Target.STEP_TIME


def bent(n, seed, gain=1.0):
    """Steps of a machine on which multiples of four are cheap."""
    rows = steps(n, seed, batch=(1, 8)).rows
    y = gain * rows.elapsed_us * np.where(rows.raw[:, 6] % 4 == 0, 0.8, 1.0)
    return RowBlock(rows.raw, rows.offsets, y, rows.phase, rows.weight, rows.end_ns, rows.engine, rows.quality)


def factors(bank):
    return {name: each.factor for name, each in bank.targets("c")["step_time"].shape_factors.items()}


def learned(*parts):
    bank = Bank(RLS)
    for rows in parts:
        bank.learn("c", TARGET, rows)
    return bank


def test_what_is_published_computes_what_the_sidecar_predicts_and_the_client_says_it_of_shapes_that_were_seen(tmp_path):
    snapshot, state = tmp_path / "snapshot.json", tmp_path / "state.bin"
    recording = DATA / "c1_mixed" / "otlp.pb.gz"
    assert replay([recording], snapshot, RLS, SystemClock(), state=state) == 0
    bank = Bank(RLS)
    bank.restore(state.read_bytes())
    (config_id,) = bank.configs()
    config = tracefit.load(snapshot).config(config_id)
    published = config.targets["step_time"]
    target = bank._configs[config_id][TARGET]
    target.flush()
    often = [shape for shape in published.shapes.values() if shape.rows >= 64]
    assert len({round(shape.factor, 6) for shape in often}) > 3
    work = [shape.usual[:3] for shape in often]
    names = ("prefill_tokens", "requests", "decode_context_tokens")
    raw = np.zeros((len(work), len(STEP_FEATURES)))
    for name, column in zip(names, zip(*work, strict=True), strict=True):
        raw[:, STEP_FEATURES.index(name)] = column
    design = target.matrix.evaluate(RowBlock.of_lines(raw, np.ones(len(work)))).design
    model = target.models["portable"]
    x = design.x[:, target.matrix.sets["portable"][1]]
    own = x @ model.fit.beta[:4] * np.exp(model.log_factors(design.cell))
    b0, b_prefill, b_context, b_requests = (each.value for each in config.coefficients())
    product = [
        (b0 + b_prefill * p + b_context * c + b_requests * n) * shape.factor
        for shape, (p, n, c) in zip(often, work, strict=True)
    ]
    assert product == pytest.approx(own.tolist(), rel=1e-9)
    asked = [config.step_time(prefill_tokens=p, requests=n, decode_context_tokens=c).us for p, n, c in work]
    assert asked == pytest.approx(own.tolist(), rel=0.02)
    assert json.loads(snapshot.read_bytes())["configs"][0]["targets"]["step_time"]["seen"]["cells"]


def test_factors_survive_a_restart():
    bank, again = learned(bent(2000, 1)), Bank(RLS)
    again.restore(bank.state())
    assert again.targets("c") == bank.targets("c")
    for each in (bank, again):
        each.learn("c", TARGET, bent(300, 2))
    assert again.targets("c") == bank.targets("c")


def test_factors_survive_a_merge():
    parts = [learned(bent(2000, seed)).state() for seed in (1, 2)]
    merged = Bank(RLS)
    merged.restore(merge_states(parts, RLS))
    one = factors(learned(bent(2000, 1)))
    both = factors(merged)
    assert set(one) <= set(both)
    assert all(both[name] == pytest.approx(one[name], rel=0.03) for name in one if name.startswith("decode"))


@pytest.mark.parametrize("gain", [0.5, 1.6])
def test_a_changed_configuration_at_another_speed_comes_to_the_same_factors_and_error_bars(gain):
    bank, told = learned(bent(3000, 5)), {}
    for name, speed in (("same", 1.0), ("other", gain)):
        bank.inherit(name, "c")
        bank.learn(name, TARGET, bent(1500, 6, gain=speed))
        told[name] = bank.targets(name)["step_time"]
    same, other = ({name: each.factor for name, each in t.shape_factors.items()} for t in told.values())
    assert other == pytest.approx(same, rel=0.02)
    bars = [[f.stderr / f.coefficient for f in each.models["portable"].features] for each in told.values()]
    assert bars[1] == pytest.approx(bars[0], rel=0.2)


def test_a_change_of_speed_moves_the_coefficients_and_not_the_factors():
    before, after = learned(bent(4000, 3)), learned(bent(4000, 3), bent(2000, 4, gain=1.4))
    target = after.targets("c")["step_time"]
    assert target.drift.count == 1
    was = before.targets("c")["step_time"].models["portable"].features[0].coefficient
    assert target.models["portable"].features[0].coefficient == pytest.approx(1.4 * was, rel=0.05)
    for name, factor in factors(before).items():
        if name.startswith("decode"):
            assert factors(after)[name] == pytest.approx(factor, rel=0.06)


def test_a_shape_with_few_rows_is_hardly_moved_by_them():
    state = TargetState(TARGET, RLS)
    state.offer(portable(TARGET))
    rows = steps(2000, 5, batch=(1, 4), prefill_share=0.0).rows
    state.learn(rows)
    strange = steps(2, 6, batch=(12, 12), prefill_share=0.0).rows
    strange = RowBlock.of_lines(strange.raw, 1.5 * strange.elapsed_us)
    state.learn(strange)
    state.flush()
    factor = state.snapshot().shape_factors["decode:12"].factor
    assert 1.05 < factor < 1.15


def test_targets_without_shapes_have_no_factors():
    bank = Bank(RLS)
    raw = np.abs(np.random.default_rng(0).normal(100.0, 30.0, (500, 6)))
    bank.learn("c", Target.API_QUEUEING, RowBlock.of_lines(raw, 800.0 + raw[:, 0]))
    target = bank.targets("c")["api_queueing"]
    assert target.shape_factors == {}
    assert target.seen is None
    assert target.interval is not None


def test_every_model_of_a_target_hears_of_a_change_from_the_one_that_watches():
    columns = ("requests", "intercept")
    state = TargetState(
        TARGET, Config(learners=("rls",), feature_sets=("portable", "custom"), custom={"step_time": columns})
    )
    for features in (portable(TARGET), custom(TARGET, columns)):
        state.offer(features)
    state.learn(steps(4000, 7, batch=(1, 8), prefill_share=0.0).rows)
    was = {name: model.fit.beta.copy() for name, model in state.models.items()}
    slow = steps(2000, 8, batch=(1, 8), prefill_share=0.0).rows
    state.learn(RowBlock.of_lines(slow.raw, 1.5 * slow.elapsed_us))
    assert state.models["custom"].drift.confirmed == 0
    assert state.snapshot().drift.count == 1
    x = np.array([4.0, 1.0])
    now = state.models["custom"].fit.beta
    assert float(now @ x) == pytest.approx(1.5 * float(was["custom"] @ x), rel=0.05)


def stalled(n, seed, part=0.2):
    """Steps of a machine on which a line holds for all shapes, and a part of the steps stalls."""
    rows, rng = steps(n, seed, batch=(1, 8)).rows, np.random.default_rng(seed)
    y = rows.elapsed_us * np.where(rng.random(n) < part, rng.uniform(1.2, 3.0, n), 1.0)
    return RowBlock(rows.raw, rows.offsets, y, rows.phase, rows.weight, rows.end_ns, rows.engine, rows.quality)


def test_factors_that_stalls_lift_are_not_applied():
    target = learned(stalled(3000, 1)).targets("c")["step_time"]
    assert not target.shape_factors_applied
    assert {each.factor for each in target.shape_factors.values()} == {1.0}
    model = target.models["portable"]
    assert model.prediction_error.median_ape < 1.05 * model.error.median_ape


def test_factors_are_applied_again_once_shapes_differ():
    bank = learned(stalled(1000, 1), bent(3000, 2))
    target = bank.targets("c")["step_time"]
    assert target.shape_factors_applied
    assert factors(bank)["decode:4"] < 0.9


def test_factors_left_out_stay_so_after_a_restart_and_a_merge():
    banks = [learned(stalled(3000, seed)) for seed in (1, 2)]
    again, merged = Bank(RLS), Bank(RLS)
    again.restore(banks[0].state())
    merged.restore(merge_states([bank.state() for bank in banks], RLS))
    assert not again.targets("c")["step_time"].shape_factors_applied
    assert not merged.targets("c")["step_time"].shape_factors_applied


def test_a_state_that_leaves_factors_out_is_outvoted_by_one_of_which_they_are_the_better_part():
    states = [learned(stalled(1000, 1)).state(), learned(bent(3000, 2)).state()]
    for parts in (states, states[::-1]):
        merged = Bank(RLS)
        merged.restore(merge_states(parts, RLS))
        assert merged.targets("c")["step_time"].shape_factors_applied


def test_stalls_count_once_where_factors_are_left_out():
    """They are in the mean factor then, and were in the usual times of all shapes as well."""
    bank = learned(stalled(9000, 1))
    target = bank.targets("c")["step_time"]
    engine = EngineSnapshot(instance="e", scheduling="sync", last_step=1)
    known = ConfigSnapshot(config_id="c", config={}, engines=[engine], telemetry="steps", targets=bank.targets("c"))
    snapshot = Snapshot(generation=1, created_unix_nano=1, tracefit_version="0", configs=[known])
    asked = tracefit.load(snapshot.to_json()).config().request(prompt_tokens=1, output_tokens=300, concurrency=4)
    coefficients = {each.name: each.coefficient for each in target.models["portable"].features}
    plain_us = coefficients["intercept"] + 4 * coefficients["requests"]
    plain_us += 4 * 151 * coefficients["decode_context_tokens"]
    assert not target.shape_factors_applied
    assert asked.itl.us / plain_us == pytest.approx(1.22, rel=0.03)  # a fifth takes 2.1 times as long
