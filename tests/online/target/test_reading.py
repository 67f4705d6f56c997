"""What readers are told while a block waits for its end, and that asking changes nothing."""

import msgspec
import pytest

from collector.config import Config
from online import Target
from tests.support.banks import RLS, STEP, learned, restarted, told
from tests.support.linear_steps import steps


def _learned(n_rows, settings=RLS):
    return learned(steps(n_rows, 5).rows, settings=settings)


def _live(bank):
    return bank.targets("c", exact=False)["step_time"]


@pytest.mark.parametrize("n_rows", [40, 700, 5003])
@pytest.mark.parametrize("exact", [True, False])
def test_asking_leaves_the_state_as_it_is_and_what_was_told_stays(n_rows, exact):
    bank = _learned(n_rows, Config(feature_sets=("portable",)))
    state = bank.state()
    first = bank.targets("c", exact=exact)
    text = msgspec.json.encode(first)
    assert bank.targets("c", exact=exact) == first
    assert bank.state() == state
    rows_come(bank)
    assert msgspec.json.encode(first) == text


@pytest.mark.parametrize("start", [333, 4000])
def test_rows_left_out_move_no_coefficient_by_half_its_error(start):
    left_out, rows, more = 0, steps(2 * start, 5).rows, start // 7
    bank = learned(rows.slice(0, start))
    for begin in range(start, 2 * start - more, more):
        bank.learn("c", STEP, rows.slice(begin, begin + more))
        every, live = (each.models["portable"] for each in (told(bank), _live(bank)))
        left_out += every.effective_rows != live.effective_rows
        for known, now in zip(every.features, live.features, strict=True):
            assert abs(known.coefficient - now.coefficient) <= 0.5 * known.stderr
    assert left_out > 0


@pytest.mark.parametrize("n_rows", [5, 20, 60, 120])
def test_the_first_rows_are_told_at_once(n_rows):
    bank = _learned(n_rows)
    assert bank.targets("c", exact=False) == bank.targets("c")


def test_a_target_of_which_nothing_comes_is_told_once():
    bank = _learned(120)
    before = _live(bank)
    bank.learn("d", STEP, steps(700, 6).rows)
    assert _live(bank) is before


def rows_come(bank):
    bank.learn("c", STEP, steps(3000, 6).rows)


def another_engine_is_found_to_be_of_it(bank):
    bank.learn("d", STEP, steps(700, 6).rows)
    bank.rename("d", "c")


def it_is_described(bank):
    bank.describe("c", {"gpu_name": "NVIDIA H100 80GB HBM3"})


@pytest.mark.parametrize("n_rows", [120, 700])
@pytest.mark.parametrize("happens", [rows_come, another_engine_is_found_to_be_of_it, it_is_described])
def test_what_changes_is_told(n_rows, happens):
    bank = _learned(n_rows)
    before = _live(bank)
    happens(bank)
    assert _live(bank) is not before
    assert _live(bank) == _live(restarted(bank))


def test_what_a_changed_configuration_inherits_is_told_of_all_its_targets():
    bank = learned(steps(10, 7).rows, target=Target.SCHEDULE_TIME)
    bank.learn("old", Target.SCHEDULE_TIME, steps(3000, 6).rows)
    before = bank.targets("c", exact=False)["schedule_time"]
    bank.warm_start("c", "old")
    assert bank.targets("c", exact=False)["schedule_time"] != before
    assert bank.targets("c", exact=False) == bank.targets("c")
