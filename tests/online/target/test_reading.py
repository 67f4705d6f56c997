"""What readers are told while a block waits for its end, and that asking changes nothing."""

from __future__ import annotations

import copy

import msgspec
import pytest

from collector.config import Config
from online.bank import Bank
from online.rows import Target
from tests.support.linear_steps import steps

TARGET = Target.STEP_TIME


def _learned(n_rows):
    bank = Bank(Config(learners=("rls",)))
    bank.learn("c", TARGET, steps(n_rows, 5).rows)
    return bank


def _read(bank, *, exact):
    return bank.targets("c", exact=exact)["step_time"].models["portable"]


@pytest.mark.parametrize("n_rows", [40, 700, 5003])
@pytest.mark.parametrize("exact", [True, False])
def test_asking_leaves_the_state_as_it_is(n_rows, exact):
    bank = _learned(n_rows)
    state = bank.state()
    first = bank.targets("c", exact=exact)
    assert bank.targets("c", exact=exact) == first
    assert bank.state() == state


def test_a_snapshot_is_not_changed_by_rows_that_come_later():
    bank = _learned(5003)
    told = bank.targets("c", exact=False)
    text = msgspec.json.encode(told)
    bank.learn("c", TARGET, steps(2000, 6).rows)
    assert msgspec.json.encode(told) == text


@pytest.mark.parametrize("start", [333, 4000])
def test_rows_left_out_move_no_coefficient_by_half_its_error(start):
    left_out = 0
    for n_rows in range(start, 2 * start, start // 7):
        bank = _learned(n_rows)
        every, live = _read(bank, exact=True), _read(bank, exact=False)
        left_out += every.effective_rows != live.effective_rows
        for known, told in zip(every.features, live.features, strict=True):
            assert abs(known.coefficient - told.coefficient) <= 0.5 * known.stderr
    assert left_out > 0


@pytest.mark.parametrize("n_rows", [5, 20, 60, 120])
def test_the_first_rows_are_told_at_once(n_rows):
    bank = _learned(n_rows)
    assert bank.targets("c", exact=False) == bank.targets("c")


def _young(n_rows):
    """Of young targets readers are told from a copy."""
    bank = _learned(n_rows)
    return bank, bank.targets("c", exact=False)["step_time"]


def test_a_target_of_which_nothing_comes_is_told_once():
    bank, told = _young(120)
    bank.learn("d", TARGET, steps(700, 6).rows)
    assert bank.targets("c", exact=False)["step_time"] is told


def rows_come(bank):
    bank.learn("c", TARGET, steps(3000, 6).rows)


def another_engine_is_found_to_be_of_it(bank):
    bank.learn("d", TARGET, steps(700, 6).rows)
    bank.rename("d", "c")


def it_is_described(bank):
    bank.describe("c", {"gpu_name": "NVIDIA H100 80GB HBM3"})


@pytest.mark.parametrize("n_rows", [120, 700])
@pytest.mark.parametrize("happens", [rows_come, another_engine_is_found_to_be_of_it, it_is_described])
def test_what_changes_is_told(n_rows, happens):
    bank, told = _young(n_rows)
    happens(bank)
    again = bank.targets("c", exact=False)["step_time"]
    assert again is not told
    other = Bank(Config(learners=("rls",)))
    other.restore(bank.state())
    assert again == other.targets("c", exact=False)["step_time"]


def test_a_block_that_only_fills_leaves_what_was_told():
    bank, told = _young(4500)
    rows, kept = steps(3000, 6).rows, []
    for at in range(0, 3000, 20):
        bank.learn("c", TARGET, rows.slice(at, at + 20))
        again = bank.targets("c", exact=False)["step_time"]
        assert again == copy.deepcopy(bank).targets("c", exact=False)["step_time"]
        kept.append(again is told)
        told = again
    assert 50 < sum(kept) < 149


def test_a_copy_that_is_flushed_tells_its_own():
    bank, told = _young(700)
    other = copy.deepcopy(bank)
    other.learn("c", TARGET, steps(30, 6).rows)
    assert other.targets("c", exact=False)["step_time"].models["portable"].rows != told.models["portable"].rows
    assert bank.targets("c", exact=False)["step_time"] is told


def test_what_a_changed_configuration_inherits_is_told_of_all_its_targets():
    bank = Bank(Config(learners=("rls",)))
    bank.learn("old", Target.SCHEDULE_TIME, steps(3000, 6).rows)
    bank.learn("c", Target.SCHEDULE_TIME, steps(10, 7).rows)
    told = bank.targets("c", exact=False)["schedule_time"]
    bank.inherit("c", "old")
    assert bank.targets("c", exact=False)["schedule_time"] != told
    assert bank.targets("c", exact=False) == bank.targets("c")
