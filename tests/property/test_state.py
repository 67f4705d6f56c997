"""Stop and restart is no restart; a damaged state is never half believed; merging adds."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.config import Config
from online import Bank, Quality
from online.features import portable
from online.state import MAGIC, VERSION, StateError, StateTooLargeError, decode
from tests.support.banks import RLS, STEP, features_of, learned, restarted, told
from tests.support.configurations import CONFIGS
from tests.support.linear_steps import repeated, steps
from tests.support.state_files import file_of, with_value


def _published(bank, config="c"):
    return msgspec.json.encode(bank.targets(config))


@pytest.fixture(scope="module")
def saved():
    return learned(steps(700, 1).rows).state()


EVERY_SET = Config(feature_sets=("portable", "physics", "bsr_ard"))
ROWS = {
    "a change of speed that is half seen": steps(2600, 3, stalls=0.01, drift_at=1250, gain=1.4).rows,
    "stamps of other kinds": dataclasses.replace(steps(2600, 2).rows, phase=np.ones((2600, 2))),
    "windows of several steps": dataclasses.replace(
        repeated(steps(2600, 4).rows, 7), quality=np.full(2600, int(Quality.METRICS))
    ),
}


@pytest.mark.parametrize("rows", ROWS)
def test_stop_and_restart_is_no_restart(rows):
    """Also while the first rows are held, with a data sheet, relevance and River's regression."""
    rows, through, again, begin = ROWS[rows], Bank(EVERY_SET), Bank(EVERY_SET), 0
    for bank in (through, again):
        bank.describe("c", CONFIGS["7b"])
    for cut in (40, 250, 1301):
        again.learn("c", STEP, rows.slice(begin, cut))
        again, stopped, begin = restarted(again), again, cut
        assert again.targets("c") == stopped.targets("c")
    again.learn("c", STEP, rows.slice(begin, 2600))
    through.learn("c", STEP, rows)
    assert again.state() == through.state()


@given(data=st.data())
def test_a_state_that_is_cut_or_has_one_bit_flipped_is_refused_and_the_old_one_kept(saved, data):
    where, bit = data.draw(st.integers(0, len(saved) - 1)), data.draw(st.none() | st.integers(0, 7))
    flipped = b"" if bit is None else bytes([saved[where] ^ 1 << bit]) + saved[where + 1 :]
    bank = Bank(RLS)
    bank.restore(saved)
    before = _published(bank)
    with pytest.raises(StateError):
        bank.restore(saved[:where] + flipped)
    assert _published(bank) == before


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1])
def test_a_state_of_another_version_is_refused_by_number(version):
    with pytest.raises(StateError, match=f"state version {version} is not {VERSION}"):
        Bank(RLS).restore(file_of({"version": version, "parts": {"learners": {}}}))


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("portable", "scale", np.nan, "RlsLearner.scale: nan does not fit"),
        ("portable", "median_us", "1", "RlsLearner.median_us: '1' does not fit"),
        ("portable", "beta", np.full(6, np.nan), "RlsLearner.beta: not finite"),
        ("portable", "beta", np.zeros(3), r"RlsLearner.beta: an array of float64, \(3,\), expected float64, \(6,\)"),
        ("portable", "beta", np.zeros(6, np.float32), "RlsLearner.beta: an array of float32"),
        ("portable", "beta", [0.0] * 4, "state does not fit"),
        (
            "portable",
            "prior",
            {"mean": np.zeros(2), "sd": np.zeros(2), "misfit": 0.0},
            "a prior of 2 columns, expected 6",
        ),
        ("portable", "rows", "many", "RlsLearner.rows: 'many' does not fit"),
        ("portable", "burn_in", 0, "state does not fit"),
        ("portable", "started", 1, "RlsLearner.started: 1 does not fit"),
        ("all_rows", "medians", [0.0, np.inf], r"ChangeTest.medians: .* does not fit"),
        ("engines", "0", {}, "state does not fit: KeyError"),
        ("history", "values", np.zeros((1, 2, 3)), "StepHistory.values: an array of"),
        ("targets", "step_time", [], "state does not fit"),
        ("c", "facts", {"kv_usage_ratio": np.inf}, "a fact is not finite"),
        ("targets", "tea_time", {}, "tea_time"),
        ("learners", "learned_rows", -1, "state does not fit"),
        ("learners", "configs", None, "state does not fit"),
    ],
)
def test_a_state_whose_values_do_not_fit_is_refused_by_name(saved, part, name, value, says):
    damaged = with_value(saved, part, name, value)
    with pytest.raises(StateError, match=says):
        Bank(RLS).restore(damaged)


def array(dtype, length, data):
    """A body with one array in it."""
    return {"version": VERSION, "parts": {"a": msgspec.msgpack.Ext(1, msgspec.msgpack.encode([dtype, [length], data]))}}


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"version": VERSION},
        {"version": VERSION, "parts": []},
        {"version": VERSION, "parts": {"a": msgspec.msgpack.Ext(2, b"")}},
        *map(array, ["O", "<f8", "<f8"], [1, 2, -1], [bytes(8), bytes(8), b""]),
    ],
)
def test_what_is_no_tree_is_refused_as_corrupt(body):
    with pytest.raises(StateError, match="corrupt state file"):
        decode(file_of(body))
    with pytest.raises(StateError, match="not a state file"):
        decode(b"something else")


def test_a_state_with_another_checksum_is_refused_and_one_that_expands_beyond_its_bound(saved):
    with pytest.raises(StateError, match="checksum"):
        decode(saved[: len(MAGIC)] + bytes(8) + saved[len(MAGIC) + 8 :])
    with pytest.raises(StateTooLargeError, match="unpacks to more than 0 MiB"):
        decode(saved, 1000)


@pytest.mark.parametrize("value", [[[]] * 9000, array("<f8", 1, [{}] * 9000), [[bytes(300), "x" * 99, 1 << 40]] * 2500])
def test_a_state_of_many_small_values_is_refused_before_they_are_made(value):
    file = file_of({"version": VERSION, "parts": {"a": value}})
    with pytest.raises(StateError, match="more than 9000 values"):
        decode(file, 9000 << 7)


def test_models_no_longer_configured_are_left_out():
    both = Config(feature_sets=("portable", "custom"), custom={"step_time": ("intercept", "requests")})
    bank, fewer = learned(steps(300, 1).rows, settings=both), Bank(RLS)
    fewer.restore(bank.state())
    mine, theirs = (told(each).models["portable"] for each in (fewer, bank))
    assert (mine.features, mine.error) == (theirs.features, theirs.error)


# -------------------------------------------------------------------- priors


def test_a_change_of_configuration_starts_from_the_old_coefficients_also_after_a_restart():
    bank, cold, test = learned(steps(3000, 1).rows), Bank(RLS), steps(500, 77)
    bank.warm_start("new", "c")
    for each in (bank, cold):
        each.learn("new", STEP, steps(8, 9, batch=(4, 6), prefill_share=0.0).rows)
    again = restarted(bank)

    def error(which):
        found = features_of(which, config_id="new")
        beta = [found[name].coefficient if name in found else 0.0 for name in portable(STEP).names]
        return np.mean(np.abs(portable(STEP).evaluate(test.rows) @ beta / test.truth_us - 1))

    assert error(bank) < 0.03
    assert error(cold) > 0.1
    for each in (bank, again):
        each.learn("new", STEP, test.rows)
    assert _published(again, "new") == _published(bank, "new")
