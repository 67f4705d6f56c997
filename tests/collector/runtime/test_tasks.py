"""Tasks take turns, check in, and end as they are told."""

from __future__ import annotations

import threading

import pytest

from collector.runtime.health import Health
from collector.runtime.tasks import Task
from tests.support.clocks import FakeClock, eventually


class Turns:
    """Counts its turns, and pauses as told."""

    def __init__(self, pause_s=0.0):
        self.count = 0
        self.pause_s = pause_s

    def __call__(self):
        self.count += 1
        return self.pause_s


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def health(clock):
    return Health(clock)


def test_turns_follow_each_other_until_the_stop():
    turns = Turns()
    task = Task("turns", turns)
    task.start()
    eventually(lambda: turns.count > 10)
    assert task.stop()
    count = turns.count
    assert not task.running
    assert turns.count == count


def test_a_turn_may_be_the_last():
    task = Task("once", Turns(None))
    task.start()
    assert task.join(60)
    assert not task.died


def test_a_pause_ends_when_the_task_is_woken_or_stopped():
    turns = Turns(3600)
    task = Task("sleeper", turns)
    task.start()
    eventually(lambda: turns.count == 1)
    task.wake()
    eventually(lambda: turns.count == 2)
    assert task.stop(10)
    assert turns.count == 2


def test_a_task_that_never_began_stops_at_once(health, clock):
    assert Task("idle", Turns(), health=health).stop()
    clock.advance(3600)
    assert health.alive()


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


def test_a_pause_does_not_make_it_late(health, clock):
    turns = Turns(100)
    task = Task("sleeper", turns, health=health, turn_timeout_s=5)
    task.start()
    eventually(lambda: health._due_ns["sleeper"] > clock.monotonic_ns() + 100e9)
    clock.advance(104)
    assert health.alive()
    clock.advance(2)
    assert health.late() == ("sleeper",)
    task.stop()


def test_turns_count_as_check_ins_only_while_all_is_well(health, clock):
    well = threading.Event()
    task = Task("receiver", Turns(0.01), health=health, turn_timeout_s=5, is_well=well.is_set)
    task.start()
    clock.advance(6)
    assert health.late() == ("receiver",)
    well.set()
    eventually(health.alive)
    task.stop()


def test_a_turn_that_raises_ends_the_task_tells_and_leaves_it_late(health, clock, caplog):
    deaths = []
    task = Task("mortal", lambda: 1 / 0, health=health, turn_timeout_s=5, on_death=lambda: deaths.append(1))
    task.start()
    assert task.join(60)
    assert (task.died, deaths) == (True, [1])
    assert "mortal died" in caplog.text
    clock.advance(6)
    assert health.late() == ("mortal",)
