"""What the published prediction leaves over is learned, corrected while that helps, and said."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from collector.config.learning_config import BankConfig
from collector.config.schema import Config
from online.bank import Bank, merge_states
from online.river.context import CONTEXT, Context
from online.river.corrector import LIMIT, START_ROWS, Corrector
from online.river.seen_rows import SeenRows
from online.river.thinning import Thinning
from online.rows import STEP_FEATURES, CorrectionOutcome, RowBlock, Target
from online.state import StateError
from tests.support.linear_steps import steps

DEFAULT, RLS = Config(feature_sets=("portable",)), Config(feature_sets=("portable",), learners=("rls",))
TARGET = Target.STEP_TIME


def _queued(n, seed, *, slower=0.08, per_s=20.0, noise=0.01):
    """Steps that take longer while requests wait, as no column knows."""
    rows = steps(n, seed, noise=noise).rows
    waiting = (np.arange(n) // 150 % 2) * 7.0
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


def test_what_the_queue_costs_is_learned_and_corrects_what_is_published(queued):
    target = queued.targets("c")["step_time"]
    model = target.models["portable"]
    assert target.correction.active
    assert model.prediction_error.mape < 0.6 * model.shaped_error.mape
    assert target.prediction_error == model.prediction_error
    without = _learned(_queued(3000, 1), RLS).targets("c")["step_time"]
    assert without.correction is None
    assert without.models["portable"].shaped_error is None
    assert without.models["portable"].prediction_error == model.shaped_error
    assert without.models["portable"].features == model.features, "coefficients are of the statistics alone"


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
        assert model.prediction_error.mape <= model.shaped_error.mape * 1.01
        assert target.correction.factor == pytest.approx(1.0, abs=0.01)


def test_a_correction_that_stops_helping_goes_off_and_changes_nothing():
    bank = _learned(_queued(2000, 4))
    assert bank.targets("c")["step_time"].correction.active
    after = _queued(1500, 5, slower=0.0)
    flips = 0.08 * (-1.0) ** (np.arange(1500) // 40)  # whatever was learned of the last rows is wrong of the next
    later = after.end_ns + 2000 * 50_000_000
    bank.learn("c", TARGET, RowBlock.of_lines(after.raw, after.elapsed_us * np.exp(flips), end_ns=later))
    found = bank.targets("c")["step_time"].correction
    assert (found.active, found.factor) == (False, 1.0)


def test_the_interval_is_of_what_a_reader_computes_with_and_without_a_correction(queued):
    target = queued.targets("c")["step_time"]
    alone = _learned(_queued(3000, 1), RLS).targets("c")["step_time"]
    assert target.correction.active
    assert target.interval == alone.interval


def test_stop_and_restart_is_no_restart():
    rows = _queued(2600, 6)
    through, stopped, again = (Bank(DEFAULT) for _ in range(3))
    through.learn("c", TARGET, rows)
    stopped.learn("c", TARGET, rows.slice(0, 1301))
    again.restore(stopped.state())
    again.learn("c", TARGET, rows.slice(1301, 2600))
    assert through.targets("c")["step_time"].correction.active
    assert again.state() == through.state()


def test_reading_changes_nothing():
    rows = _queued(1500, 7)
    read, left = Bank(DEFAULT), Bank(DEFAULT)
    for at in range(0, 1500, 70):
        part = rows.slice(at, min(1500, at + 70))
        for bank in (read, left):
            bank.learn("c", TARGET, part)
        read.targets("c")
    assert read.state() == left.state()


def test_a_merged_state_starts_over_with_what_does_not_add_and_counts_the_rows_of_both(queued):
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


def test_a_change_of_speed_is_not_taken_for_what_is_left_over():
    slow = steps(2600, 10, noise=0.02, drift_at=2000, gain=1.4).rows
    bank = _learned(RowBlock.of_lines(slow.raw, slow.elapsed_us, end_ns=slow.end_ns))
    target = bank.targets("c")["step_time"]
    assert target.drift.count == 1
    assert all(target.correction.rows.values()), "each outcome: some rows are off by 40 %, some not looked at"
    assert abs(np.log(target.correction.factor)) < 0.03
    weight = bank._configs["c"][TARGET].published.corrector.regressor
    assert np.abs(weight.weight).max() < LIMIT


def test_at_any_load_as_many_rows_are_looked_at(monkeypatch):
    evaluate, looked_at = Context.evaluate, []

    def counting(self, rows, seen):
        looked_at.append(len(seen))
        return evaluate(self, rows, seen)

    monkeypatch.setattr(Context, "evaluate", counting)
    for per_s in (100.0, 1000.0):
        looked_at.clear()
        _learned(_queued(int(8 * per_s), 12, per_s=per_s))
        assert 0.9 * 32 * 8 <= sum(looked_at) <= 32 * 8 + 4


def test_rows_that_are_not_looked_at_go_by_the_last_that_was():
    target = _learned(_queued(2000, 12, per_s=100.0)).targets("c")["step_time"]
    model = target.models["portable"]
    assert target.correction.active
    assert target.correction.rows["thinned"] > 1000
    assert model.prediction_error.mape < 0.8 * model.shaped_error.mape, "of every row"


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
    assert whole.targets("c")["step_time"].correction.rows["learned"] > 200
    assert msgspec.json.encode(whole.targets("c")) == msgspec.json.encode(parts.targets("c"))


def test_rows_that_are_no_measurement_do_not_shift_the_context_of_others():
    rows = _queued(2600, 14)
    bad = np.arange(2600) % 5 == 2
    elapsed = np.where(bad, -1.0, rows.elapsed_us)
    mixed = _learned(RowBlock.of_lines(rows.raw, elapsed, end_ns=rows.end_ns)).targets("c")["step_time"]
    good = rows.take(~bad)
    alone = _learned(good).targets("c")["step_time"]
    assert mixed.correction == alone.correction
    assert mixed.models["portable"].prediction_error == alone.models["portable"].prediction_error


def test_the_context_of_a_row_of_several_steps_is_that_of_its_mean_step():
    rows = _queued(400, 15)
    pairs = RowBlock(
        raw=rows.raw,
        offsets=np.arange(0, 401, 2),
        elapsed_us=rows.elapsed_us.reshape(-1, 2).sum(axis=1),
        phase=rows.phase[::2],
        weight=rows.weight[::2],
        end_ns=rows.end_ns[1::2],
        engine=rows.engine[::2],
        quality=rows.quality[::2],
    )
    chosen = np.array([3, 40, 77])
    single = CONTEXT.evaluate(rows, np.concatenate([2 * chosen, 2 * chosen + 1])).reshape(2, 3, -1)
    assert np.allclose(CONTEXT.evaluate(pairs, chosen), single.mean(axis=0))


def test_seen_rows_that_a_set_does_not_know_are_left_out():
    seen = SeenRows(np.array([1, 2, 5, 9]), np.arange(36.0).reshape(4, 9))
    known = np.array([True, True, False, True, False, True])
    first = seen.take(6)
    assert first.among(known).place.tolist() == [1, 3]
    assert first.among(known).context[:, 0].tolist() == [0.0, 18.0]
    assert (seen.place.tolist(), len(seen)) == ([3], 1)


@pytest.mark.parametrize("place", [[3, 3], [4, 1], [-1, 2], [0, 1, 2]])
def test_seen_rows_that_cannot_be_are_refused(place):
    with pytest.raises(StateError):
        SeenRows(np.array(place), np.zeros((2, 9))).restored()


# ------------------------------------------------------------------- the corrector alone


@pytest.mark.parametrize("size", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("ratio", [-40.0, -0.149, 0.149, 27.0])
def test_it_stays_finite_and_within_its_bounds_whatever_it_learns(size, ratio):
    corrector = Corrector(1e6)
    for k in range(40):
        found = corrector.learn(
            np.full((16, 9), size), np.full(16, ratio) * (-1) ** k, np.full(16, 10**9 * k), suspected=False
        )
        assert np.isfinite(found).all()
        assert np.abs(found).max() <= LIMIT
    assert corrector.regressor.finite


def test_it_learns_before_it_corrects():
    corrector, first = Corrector(1e6), None
    for k in range(30):
        corrector.learn(np.ones((16, 9)), np.full(16, 0.1), np.full(16, 10**9 * k), suspected=False)
        if corrector.active and first is None:
            first = corrector.regressor.iterations
    assert START_ROWS <= first < START_ROWS + 32


def test_a_block_of_many_seconds_is_corrected_as_its_seconds_one_after_the_other():
    rng, whole, parts = np.random.default_rng(4), Corrector(1e6), Corrector(1e6)
    for block in range(4):
        context = rng.random((96, 9))
        ratio = 0.2 * context[:, 0] * (block < 3) + rng.normal(0.0, 0.05, 96)
        end_ns = 10**9 * (12 * block + np.arange(96) // 8)
        found = whole.learn(context, ratio, end_ns, suspected=block == 1)
        each = [slice(start, start + 8) for start in range(0, 96, 8)]
        one_by_one = [parts.learn(context[s], ratio[s], end_ns[s], suspected=block == 1) for s in each]
        assert found.tolist() == np.concatenate(one_by_one).tolist()
    assert whole.active == parts.active
    assert whole.standing == parts.standing
    assert whole.usual == pytest.approx(parts.usual, rel=1e-12)
    assert whole.rows.tolist() == parts.rows.tolist()
    assert whole.regressor.weight.tolist() == parts.regressor.weight.tolist()
    assert found.any()


# ------------------------------------------------------------------- thinning


@pytest.mark.parametrize("per_s", [3, 20, 100, 1000, 50_000])
@pytest.mark.parametrize("block", [1, 7, 32, 512])
def test_at_most_so_many_rows_per_second_are_seen_in_blocks_of_any_size(per_s, block):
    end_ns = 1_700_000_000_000_000_000 + (np.arange(20_000) * (1e9 / per_s)).astype(np.int64)
    thinning = Thinning(32.0)
    seen = sum(len(thinning.pick(end_ns[at : at + block])) for at in range(0, 20_000, block))
    span_s = 20_000 / per_s
    assert seen <= 32.0 * span_s + 4
    assert seen >= min(0.9 * 32.0 * span_s, 20_000 - 1)


def test_the_cut_of_the_blocks_does_not_decide_what_is_seen():
    rng = np.random.default_rng(1)
    end_ns = np.cumsum(rng.integers(1, 10**8, 5000))
    found = []
    for sizes in ([5000], rng.integers(1, 60, 5000)):
        thinning, at, seen = Thinning(32.0), 0, []
        for size in sizes:
            part = end_ns[at : at + int(size)]
            if len(part):
                seen += (thinning.pick(part) + at).tolist()
            at += int(size)
        found.append(seen)
    assert found[0] == found[1]


def test_long_steps_are_seen_no_more_often_than_short_ones():
    rng = np.random.default_rng(2)
    long = rng.random(60_000) < 0.1
    end_ns = np.cumsum(np.where(long, 20_000_000, 1_000_000))
    seen = Thinning(32.0).pick(end_ns)
    assert long[seen].mean() == pytest.approx(0.1, abs=0.015)


def test_a_clock_that_was_ahead_ends_nothing():
    thinning = Thinning(32.0)
    thinning.pick(np.arange(50) * 10**7 + 10**18)
    later = sum(len(thinning.pick(np.arange(32) * 10**7 + k * 32 * 10**7)) for k in range(20))
    assert later > 100


def test_clocks_that_take_turns_keep_the_bound():
    thinning, seen = Thinning(32.0), 0
    for k in range(200):  # 2 s of event time of each of two engines, a day apart
        part = np.arange(10) * 10**6 + k * 10**7 + (k % 2) * 86_400 * 10**9
        seen += len(thinning.pick(part))
    assert seen <= 2 * 32 * 2 + 4 * 200
    assert thinning.left <= 4


# ------------------------------------------------------------------- cost


def test_nothing_of_river_is_imported_before_a_row_is_learned():
    code = """
import sys
from collector.config.schema import Config
from online import Bank
bank = Bank(Config())
bank.restore(Bank(Config()).state())
assert not [name for name in sys.modules if name.partition('.')[0] == 'river']
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_of_rivers_sees_a_bounded_number_of_rows():
    settings = Config(learners=("rls", "river:linear"), feature_sets=("portable",), bank=BankConfig(river_rows_per_s=8))
    bank = _learned(_queued(3000, 11, per_s=500.0), settings)
    target = bank.targets("c")["step_time"]
    assert target.models["portable"].rows == 3000
    assert 40 <= target.models["river:linear/portable"].rows <= 8 * 6 + 4
    assert msgspec.json.encode(target)


def test_the_regressor_learns_as_rivers_linear_regression():
    code = """
import numpy as np
from online.river.regressor import NAMES, Regressor
thin, rng = Regressor(), np.random.default_rng(1)
columns, target = rng.random((400, len(NAMES))), rng.normal(0.0, 0.1, 400)
thin.learn(columns, target)
from river import linear_model, optim
whole = linear_model.LinearRegression(optimizer=optim.SGD(0.03), loss=optim.losses.Huber(0.05), intercept_lr=0.03)
for row, value in zip(columns.tolist(), target.tolist(), strict=True):
    whole.learn_one(dict(zip(NAMES, row)), value)
assert np.abs(np.array([whole.weights[name] for name in NAMES]) - thin.weight).max() < 1e-15
assert abs(whole.intercept - thin.intercept) < 1e-15 and whole.optimizer.n_iterations == thin.iterations
"""
    subprocess.run([sys.executable, "-c", code], check=True)
