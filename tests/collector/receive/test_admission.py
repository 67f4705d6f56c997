"""The byte-bounded queue: who enters, who waits, who is told what."""

from __future__ import annotations

import threading

import pytest

from collector.receive.admission import HINT_MAX_S, HINT_MIN_S, AdmissionQueue, Refused
from collector.telemetry.reasons import Outcome
from tests.support.clocks import FakeClock, eventually

CAPACITY = 1000
GATHER_BYTES = 1 << 19


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


def test_the_wait_of_the_oldest_export_is_told_with_the_batch():
    clock = FakeClock()
    queue = make_queue(clock)
    queue.put("a", 1)
    clock.advance(3)
    queue.put("b", 1)
    assert queue.take(10, 0).waited_ns == 3_000_000_000


def test_the_oldest_export_says_how_far_behind_its_reader_is():
    clock = FakeClock()
    queue = make_queue(clock)
    assert queue.unread_ns() == 0
    queue.put("a", 1)
    clock.advance(3)
    queue.put("b", 1)
    clock.advance(1)
    assert queue.unread_ns() == 4_000_000_000
    queue.take(1, 0)
    assert queue.unread_ns() == 1_000_000_000
    queue.take(1, 0)
    assert queue.unread_ns() == 0


def gathering_queue(wait_s=0.0, **more):
    clock = FakeClock()
    gathers = {"gather_s": 3.0, "gather_bytes": GATHER_BYTES}
    settings = {"capacity_bytes": 4 * GATHER_BYTES, "wait_s": wait_s, "waiters_max": 6, **gathers, **more}
    return clock, AdmissionQueue(clock, **settings)


def test_small_exports_wait_for_others_while_nobody_could_see_them_learned():
    clock, queue = gathering_queue()
    queue.put("first", 10)
    assert queue.take(100, 0, 2.0) is None
    clock.advance(1)
    queue.put("second", 10)
    assert queue.take(100, 0, 1.0) is None
    clock.advance(1)
    assert queue.take(100, 0, 0.0).items == ("first", "second"), "a generation is due"


def test_an_export_waits_no_longer_for_others_than_it_may():
    clock, queue = gathering_queue()
    queue.put("lonely", 10)
    clock.advance(2.9)
    assert queue.take(100, 0, 60.0) is None
    clock.advance(0.1)
    assert queue.take(100, 0, 60.0).items == ("lonely",)


def test_enough_exports_wait_for_nobody():
    _, queue = gathering_queue()
    queue.put("large", GATHER_BYTES)
    assert queue.take(100, 0, 60.0).items == ("large",)


def test_a_worker_that_lets_exports_gather_is_told_when_they_are_enough():
    _, queue = gathering_queue()
    batches = []
    worker = threading.Thread(target=lambda: batches.append(queue.take(10 * GATHER_BYTES, 60.0, 60.0)))
    worker.start()
    eventually(lambda: queue._gathers)
    for item, size_bytes in (("small", 10), ("large", GATHER_BYTES)):
        queue.put(item, size_bytes)
    worker.join(60)
    assert [batch.items for batch in batches] == [("small", "large")]


def test_nobody_waits_for_others_once_the_queue_is_closed():
    _, queue = gathering_queue()
    queue.put("last", 10)
    queue.close()
    assert queue.take(100, 0, 60.0).items == ("last",)


def test_nobody_waits_for_others_while_somebody_waits_for_room():
    clock = FakeClock()
    queue = AdmissionQueue(clock, capacity_bytes=CAPACITY, wait_s=30, waiters_max=6, gather_s=3.0)
    queue.put("inside", CAPACITY // 5)
    assert queue.take(CAPACITY, 0, 60.0) is None
    outside = threading.Thread(target=lambda: queue.put("outside", CAPACITY))
    outside.start()
    eventually(lambda: queue._waiters == 1)
    batch = queue.take(CAPACITY, 0, 60.0)
    assert batch.items == ("inside",)
    queue.done(batch.size_bytes)
    outside.join(60)


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


def test_a_worker_looks_up_when_a_generation_is_due_and_lets_nobody_gather_then(monkeypatch):
    _, queue = gathering_queue()
    waits = []
    monkeypatch.setattr(queue._work, "wait", waits.append)
    assert queue.take(100, 60.0, 0.25) is None
    assert queue.take(100, 60.0, 0.0) is None
    assert queue.take(100, 60.0, 60.0) is None
    assert waits == [0.25, 60.0, 3.0], "and who meets an empty queue waits no longer for others than it may"
