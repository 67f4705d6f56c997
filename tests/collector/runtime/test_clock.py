"""The clock by which arrivals are told: it is set forward with the machine's, and never back."""

from __future__ import annotations

from collector.runtime.tasks import SteadyClock
from tests.support.clocks import T0_NS, FakeClock

S = 10**9


def test_a_clock_that_is_set_back_goes_on_from_where_it_was():
    machine = FakeClock()
    steady = SteadyClock(machine)
    machine.advance(5)
    assert steady.unix_nano() == T0_NS + 5 * S
    machine._unix_nano -= 3600 * S
    machine.advance(2)
    assert steady.unix_nano() == T0_NS + 7 * S


def test_a_clock_that_is_set_forward_is_followed():
    machine = FakeClock()
    steady = SteadyClock(machine)
    machine._unix_nano += 3600 * S
    assert steady.unix_nano() == T0_NS + 3600 * S
