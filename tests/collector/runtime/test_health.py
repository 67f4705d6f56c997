"""Health by check-in."""

from __future__ import annotations

from collector.runtime.tasks import Health
from tests.support.clocks import FakeClock


def test_who_misses_its_deadline_is_late_until_it_checks_in():
    clock = FakeClock()
    health = Health(clock)
    health.register("worker", 5)
    clock.advance(5)
    assert health.alive()
    clock.advance(0.1)
    assert health.late() == ("worker",)
    health.check_in("worker")
    assert health.alive()


def test_ready_is_serving_and_alive():
    clock = FakeClock()
    health = Health(clock)
    health.register("worker", 5)
    assert health.alive()
    assert not health.ready()
    health.set_serving(True)
    assert health.ready()
    clock.advance(6)
    assert not health.ready()


def test_who_ended_as_it_should_is_not_late():
    clock = FakeClock()
    health = Health(clock)
    health.register("worker", 5)
    health.unregister("worker")
    clock.advance(60)
    assert health.alive()
