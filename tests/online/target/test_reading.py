"""What readers are told while a block waits for its end, and that asking changes nothing."""

from __future__ import annotations

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


@pytest.mark.parametrize("n_rows", [5, 20, 60, 150])
def test_the_first_rows_are_told_at_once(n_rows):
    bank = _learned(n_rows)
    assert bank.targets("c", exact=False) == bank.targets("c")
