"""Tasks take turns, check in, and end as they are told."""

from __future__ import annotations

import threading

import pytest

from collector.runtime.tasks import Health, Task
from tests.support.clocks import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def health(clock):
    return Health(clock)


def test_a_turn_that_hangs_makes_it_late_by_its_name_and_the_next_one_mends_that(health, clock):
    gate = threading.Event()
    task = Task("stuck", lambda: gate.wait(60) and 0.0, health=health, turn_timeout_s=5)
    task.start()
    clock.advance(6)
    assert health.late() == ("stuck",)
    assert not task.stop(0), "the turn under way goes on"
    gate.set()
    assert task.join(60)
    assert health.alive(), "who ended as it should is not late"


def test_a_turn_that_raises_ends_the_task_tells_and_leaves_it_late(health, clock, caplog):
    deaths = []
    task = Task("mortal", lambda: 1 / 0, health=health, turn_timeout_s=5, on_death=lambda: deaths.append(1))
    task.start()
    assert task.join(60)
    assert (task.died, deaths) == (True, [1])
    assert "mortal died" in caplog.text
    clock.advance(6)
    assert health.late() == ("mortal",)
