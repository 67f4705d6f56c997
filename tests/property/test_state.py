"""Stop and restart is no restart; a damaged state is never half believed; merging adds."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.config.schema import Config
from online.bank import Bank, merge_states
from online.rows import Target
from online.state import VERSION, StateError
from tests.support.linear_steps import steps
from tests.support.state_files import body_of_file, file_of, with_value

RLS = Config(learners=("rls",))
ALL = Config(learners=("rls", "river:residual"))


def _published(bank, config="c"):
    return msgspec.json.encode(bank.targets(config))


def _learn(bank, rows, config="c"):
    bank.learn(config, Target.STEP_TIME, rows)


@pytest.fixture(scope="module")
def saved():
    bank = Bank(RLS)
    _learn(bank, steps(700, 1).rows)
    return bank.state()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_state_cut_at_any_byte_is_refused(saved, data):
    cut = data.draw(st.integers(0, len(saved) - 1))
    with pytest.raises(StateError):
        Bank(RLS).restore(saved[:cut])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_state_with_one_bit_flipped_is_refused_and_the_old_one_kept(saved, data):
    where, bit = data.draw(st.integers(0, len(saved) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(saved)
    damaged[where] ^= 1 << bit
    bank = Bank(RLS)
    bank.restore(saved)
    before = _published(bank)
    with pytest.raises(StateError):
        bank.restore(bytes(damaged))
    assert _published(bank) == before


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1])
def test_a_state_of_another_version_is_refused_by_number(saved, version):
    with pytest.raises(StateError, match=f"state version {version} is not {VERSION}"):
        Bank(RLS).restore(file_of({**body_of_file(saved), "version": version}))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("weighing", "scale", np.nan),
        ("slow_member", "beta", ["<f8", [6], b"\xff" * 48]),
        ("rls", "rows", "many"),
        ("weighing", "median_us", np.inf),
        ("startup", "held", 0),
        ("residuals", "rows", ["<i8", [10], b"\xff" * 80]),
        ("residuals", "rows", ["<i8", [3], b""]),
        ("residuals", "ratio_sum", np.inf),
        ("bank", "learned_rows", -1),
    ],
)
def test_a_state_whose_values_do_not_fit_is_refused_by_name(saved, kind, name, value):
    damaged = with_value(saved, "learners", kind, name, value)
    with pytest.raises(StateError, match=f"{kind}: |{kind}.{name}: "):
        Bank(RLS).restore(damaged)


def test_models_no_longer_configured_are_named_and_left_out():
    bank = Bank(Config(feature_sets=("portable", "custom"), custom={"step_time": ("intercept", "requests")}))
    _learn(bank, steps(300, 1).rows)
    fewer = Bank(RLS)
    left_out = fewer.restore(bank.state())
    assert left_out == ["c/step_time/custom"]
    mine, theirs = (each.targets("c")["step_time"].models["portable"] for each in (fewer, bank))
    assert (mine.features, mine.error) == (theirs.features, theirs.error)


# -------------------------------------------------------------------- merging


def _coefficients(state):
    bank = Bank(RLS)
    bank.restore(state)
    return np.array([f.coefficient for f in bank.targets("c")["step_time"].models["portable"].features])


def _replica(seed, n=3000, **kind):
    bank = Bank(RLS)
    _learn(bank, steps(n, seed, **kind).rows)
    return bank.state()


@pytest.mark.parametrize("few", [2, 40, 200])
def test_a_replica_with_few_rows_joins_without_harm(few):
    merged = _coefficients(merge_states([_replica(1), _replica(2, n=few)], RLS))
    assert np.allclose(merged, _coefficients(_replica(1)), rtol=0.05)


def test_merge_says_which_state_is_corrupt(saved):
    with pytest.raises(StateError, match="state 2"):
        merge_states([saved, saved[:-1]], RLS)


# -------------------------------------------------------------------- priors


def test_a_change_of_configuration_starts_from_the_old_coefficients():
    bank = Bank(RLS)
    _learn(bank, steps(3000, 1).rows, "old")
    bank.inherit("new", "old")
    truth = steps(8, 9, batch=(4, 6), prefill_share=0.0)
    _learn(bank, truth.rows, "new")
    cold = Bank(RLS)
    _learn(cold, truth.rows, "new")

    def error(which):
        test = steps(500, 77)
        found = {f.name: f.coefficient for f in which.targets("new")["step_time"].models["portable"].features}
        from online.features.registry import portable

        x = portable(Target.STEP_TIME).evaluate(test.rows)
        beta = np.array([found.get(name, 0.0) for name in portable(Target.STEP_TIME).names])
        return np.mean(np.abs(x @ beta / test.truth_us - 1))

    assert error(bank) < 0.03
    assert error(cold) > 0.1


def test_a_donor_of_the_same_model_warms_a_new_configuration():
    donor = Bank(RLS)
    donor.describe("d", {"model": "m", "gpu": "H100"})
    _learn(donor, steps(3000, 1).rows, "d")
    bank = Bank(RLS)
    assert bank.add_donors(donor.state()) == 1
    bank.describe("same", {"model": "m", "gpu": "H100"})
    bank.describe("other", {"model": "x", "gpu": "H100"})
    for name in ("same", "other"):
        _learn(bank, steps(3, 5, batch=(4, 4), prefill_share=0.0).rows, name)
    warm = {f.name: f.status for f in bank.targets("same")["step_time"].models["portable"].features}
    assert warm["prefill_tokens"] == "prior_only"
    cold = {f.name for f in bank.targets("other")["step_time"].models["portable"].features}
    assert "prefill_tokens" not in cold


def test_a_prior_survives_the_restart():
    bank = Bank(RLS)
    _learn(bank, steps(2000, 1).rows, "old")
    bank.inherit("c", "old")
    _learn(bank, steps(100, 2).rows)
    again = Bank(RLS)
    again.restore(bank.state())
    rest = steps(400, 3).rows
    _learn(bank, rest)
    _learn(again, rest)
    assert _published(again) == _published(bank)
