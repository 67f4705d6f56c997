"""The byte-bounded queue: who enters, who waits, who is told what."""

from __future__ import annotations

import threading

import pytest

from collector.ingest.intake import HINT_MAX_S, HINT_MIN_S, AdmissionQueue, Refused
from collector.telemetry.reasons import Outcome
from tests.support.clocks import FakeClock, eventually

CAPACITY = 1000


def make_queue(clock=None, *, wait_s=0.0, waiters_max=6):
    return AdmissionQueue(clock or FakeClock(), capacity_bytes=CAPACITY, wait_s=wait_s, waiters_max=waiters_max)


def test_what_is_put_is_taken_in_order_and_together():
    queue = make_queue()
    for item in "abc":
        assert queue.put(item, 10) is None
    batch = queue.take(100, 0)
    assert (batch.items, batch.size_bytes) == (("a", "b", "c"), 30)
    assert queue.take(100, 0) is None


def test_a_batch_ends_before_it_grows_too_large_but_never_holds_nothing():
    queue = make_queue()
    for item in "abc":
        queue.put(item, 60)
    assert queue.take(130, 0).items == ("a", "b")
    assert queue.take(1, 0).items == ("c",)


def test_bytes_count_until_the_worker_is_done_with_them():
    queue = make_queue()
    queue.put("a", CAPACITY)
    batch = queue.take(CAPACITY, 0)
    assert (queue.queued_bytes, queue.in_flight_bytes) == (0, CAPACITY)
    assert queue.put("b", 1).reason is Outcome.QUEUE_FULL
    queue.done(batch.size_bytes)
    assert queue.put("b", 1) is None
    assert queue.in_flight_bytes == 1


def test_an_export_larger_than_the_capacity_enters_an_empty_house_only():
    queue = make_queue()
    queue.put("small", 1)
    assert queue.put("huge", 10 * CAPACITY).reason is Outcome.QUEUE_FULL
    queue.done(queue.take(1, 0).size_bytes)
    assert queue.put("huge", 10 * CAPACITY) is None


def test_only_so_many_wait_and_the_next_is_refused_at_once():
    queue = make_queue(wait_s=30, waiters_max=2)
    queue.put("full", CAPACITY)
    results = []
    waiters = [threading.Thread(target=lambda: results.append(queue.put("x", 1))) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    eventually(lambda: queue._waiters == 2)
    assert queue.put("third", 1).reason is Outcome.QUEUE_FULL
    queue.done(queue.take(CAPACITY, 0).size_bytes)
    for waiter in waiters:
        waiter.join(60)
    assert results == [None, None]


def test_closing_tells_those_who_wait_and_lets_the_rest_be_taken():
    queue = make_queue(wait_s=30)
    queue.put("inside", CAPACITY)
    results = []
    waiter = threading.Thread(target=lambda: results.append(queue.put("outside", 1)))
    waiter.start()
    eventually(lambda: queue._waiters == 1)
    queue.close()
    waiter.join(60)
    assert results == [Refused(Outcome.SHUTTING_DOWN)]
    assert queue.put("later", 1) == Refused(Outcome.SHUTTING_DOWN)
    assert not queue.exhausted
    assert queue.take(CAPACITY, 0).items == ("inside",)
    assert queue.exhausted


@pytest.mark.parametrize(
    ("busy_s", "hint_s"),
    [(0.001, HINT_MIN_S), (0.8 * 0.2, 0.5 * 0.8), (100.0, HINT_MAX_S)],
    ids=["fast worker", "worker that drains the capacity in 0.8 s", "slow worker"],
)
def test_the_hint_is_the_time_to_drain_half_the_queue_within_its_bounds(busy_s, hint_s):
    clock = FakeClock()
    queue = make_queue(clock)
    queue.put("a", CAPACITY)
    batch = queue.take(CAPACITY, 0)
    clock.advance(busy_s)
    queue.done(batch.size_bytes)  # the first of its kind moves the smoothed rate by a fifth
    queue.put("a", CAPACITY)
    assert queue.put("b", 1).retry_after_s == pytest.approx(max(hint_s, HINT_MIN_S), rel=1e-3)


def test_an_export_that_found_no_room_finds_it_when_it_comes_again():
    clock = FakeClock()
    queue = AdmissionQueue(clock, capacity_bytes=CAPACITY, wait_s=0, waiters_max=0, gather_s=3.0)
    queue.put("small", CAPACITY // 5)
    assert isinstance(queue.put("large", CAPACITY), Refused)
    batch = queue.take(CAPACITY, 0, 60.0)
    assert batch.items == ("small",)
    queue.done(batch.size_bytes)
    assert queue.put("large", CAPACITY) is None
    queue.take(CAPACITY, 0, 60.0)
    queue.put("later", CAPACITY // 5)
    assert queue.take(CAPACITY, 0, 60.0) is None
