"""Tasks take turns, check in, and end as they are told; who does not check in is late; time never goes back."""

import threading

import pytest

from collector.runtime.tasks import Health, SteadyClock, Task
from tests.support.clocks import T0_NS, FakeClock

S = 10**9


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def health(clock):
    return Health(clock)


def test_a_turn_that_hangs_makes_it_late_by_its_name_and_the_next_one_mends_that(health, clock):
    gate = threading.Event()
    task = Task("stuck", lambda: gate.wait(60) and 0.0, health=health, timeout_s=5)
    task.start()
    clock.advance(6)
    assert health.late() == ("stuck",)
    assert not task.stop(0), "the turn under way goes on"
    gate.set()
    assert task.join(60)
    assert not health.late(), "who ended as it should is not late"


def test_a_turn_that_raises_ends_the_task_tells_and_leaves_it_late(health, clock, caplog):
    deaths = []
    task = Task("mortal", lambda: 1 / 0, health=health, timeout_s=5, on_death=lambda: deaths.append(1))
    task.start()
    assert task.join(60)
    assert (task.died, deaths) == (True, [1])
    assert "mortal died" in caplog.text
    clock.advance(6)
    assert health.late() == ("mortal",)


def test_who_misses_its_deadline_is_late_until_it_checks_in_or_ends_as_it_should(health, clock):
    health.register("worker", 5)
    clock.advance(5)
    assert not health.late()
    assert not health.ready()
    health.set_serving(True)
    assert health.ready()
    clock.advance(0.1)
    assert health.late() == ("worker",)
    assert not health.ready()
    health.check_in("worker")
    assert not health.late()
    clock.advance(60)
    health.unregister("worker")
    assert not health.late()


def test_a_clock_that_is_set_back_goes_on_from_where_it_was_and_one_set_forward_is_followed(clock):
    steady = SteadyClock(clock)
    clock.advance(5)
    assert steady.unix_nano() == T0_NS + 5 * S
    clock._unix_nano -= 3600 * S
    clock.advance(2)
    assert steady.unix_nano() == T0_NS + 7 * S
    clock._unix_nano += 7200 * S
    assert steady.unix_nano() == T0_NS + 3607 * S
