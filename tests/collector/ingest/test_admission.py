"""The byte-bounded queue: who enters, who waits, who is told what."""

import asyncio
import gc

import pytest

from collector.decode import Export
from collector.ingest.budget import BudgetExceededError, ReceiveBudget
from collector.ingest.consumer import ExportConsumer
from collector.ingest.queue import ExportQueue
from collector.ingest.status import answer
from collector.telemetry import Metrics, Signal, Transport, table
from collector.telemetry.reasons import Outcome
from tests.support.clocks import FakeClock
from tests.support.pipelines import value_of
from tests.support.sidecars import take_in
from tests.support.step_exports import make_export

CAPACITY = 1000


def make_queue(clock=None, *, wait_s=0.0, batch_s=0.0):
    return ExportQueue(clock or FakeClock(), capacity_bytes=CAPACITY, wait_s=wait_s, batch_s=batch_s)


def sized(size_bytes, name="", address="a"):
    return Export(bytes(size_bytes), f"{address}:1", 1, name)


def put(queue, name, size_bytes, *address):
    """What the queue says of an export of so many bytes; None if it is in."""
    return queue.put_nowait(sized(size_bytes, name, *address))


def names(batch):
    return [export.recording for export in batch.items]


class PassedOn:
    """In place of what passes telemetry on: remembers it."""

    def __init__(self):
        self.got = []

    def enqueue(self, signal, payload, spans=0):
        self.got.append((signal, payload, spans))


@pytest.mark.parametrize("forward", [PassedOn(), None])
def test_where_there_is_no_room_to_learn_telemetry_is_passed_on_all_the_same(forward):
    queue, metrics, payload = make_queue(), Metrics(), make_export().SerializeToString()
    put(queue, "full", CAPACITY)
    refused = take_in(ExportConsumer(queue, metrics, forward=forward), payload)
    assert value_of(metrics, table.SPANS, Transport.GRPC, Outcome.QUEUE_FULL) == 1
    if forward is None:
        assert refused.outcome is Outcome.QUEUE_FULL
    else:
        assert (refused, forward.got) == (None, [(Signal.TRACES, payload, 1)])


def test_spans_of_a_sender_who_leaves_are_counted_by_what_they_waited_for():
    def leave(_):
        asyncio.current_task().cancel()
        return Outcome.LOG

    queue, metrics = ExportQueue(FakeClock(), capacity_bytes=1 << 20, record=leave), Metrics()
    with pytest.raises(asyncio.CancelledError):
        take_in(ExportConsumer(queue, metrics), make_export().SerializeToString())
    assert value_of(metrics, table.SPANS, Transport.GRPC, Outcome.LOG) == 1


def test_what_is_put_is_taken_in_order_and_together_as_far_as_the_batch_may_grow():
    queue = make_queue()
    for item in "abcd":
        assert put(queue, item, 60) is None
    assert names(queue.take(190, 0)) == ["a", "b", "c"]
    assert names(queue.take(1, 0)) == ["d"], "a batch never holds nothing"
    assert queue.take(100, 0) is None


def test_bytes_count_until_the_worker_is_done_and_an_export_larger_than_the_capacity_enters_an_empty_house_only():
    queue = make_queue()
    put(queue, "huge", 10 * CAPACITY)
    batch = queue.take(CAPACITY, 0)
    assert queue.in_flight_bytes == 10 * CAPACITY
    assert put(queue, "small", 1).outcome is Outcome.QUEUE_FULL
    queue.done(batch)
    assert put(queue, "small", 1) is None
    assert queue.in_flight_bytes == 1
    assert put(queue, "huge", 10 * CAPACITY).outcome is Outcome.QUEUE_FULL


def test_who_asks_at_the_very_moment_in_which_room_is_made_does_not_wait_for_the_next():
    class Racing(ExportQueue):
        def put_nowait(self, item):
            refused = super().put_nowait(item)
            if refused is not None:
                self.done(batch)
            return refused

    queue = Racing(FakeClock(), capacity_bytes=CAPACITY, wait_s=60)
    put(queue, "full", CAPACITY)
    batch = queue.take(CAPACITY, 0)
    assert asyncio.run(queue.put(sized(1))) is None


def test_who_waited_in_vain_leaves_nothing_behind():
    queue = make_queue(wait_s=0.001)
    put(queue, "inside", CAPACITY)

    async def scenario():
        for _ in range(50):
            await queue.put(sized(1))
        gc.collect()
        return sum(isinstance(each, asyncio.Future) for each in gc.get_objects())

    assert asyncio.run(scenario()) < 25


def test_nobody_waits_for_room_in_a_log_that_has_made_none_in_all_the_time_of_another():
    queue = ExportQueue(FakeClock(), capacity_bytes=CAPACITY, wait_s=0.001, record=lambda _: Outcome.LOG)

    async def waits(meanwhile=lambda: None):
        putting = asyncio.create_task(queue.put(sized(1)))
        await asyncio.sleep(0)
        waited = not putting.done()
        meanwhile()
        assert await putting == answer(Outcome.LOG)
        return waited

    async def scenario():
        before = await waits(queue.retry), await waits(), await waits()
        queue.retry()
        return *before, await waits()

    assert asyncio.run(scenario()) == (True, True, False, True)


def test_closing_tells_those_who_wait_and_lets_the_rest_be_taken():
    queue = make_queue(wait_s=30)
    put(queue, "inside", CAPACITY)

    async def scenario():
        waiting, gone, large = (asyncio.create_task(queue.put(sized(each))) for each in (1, 1, CAPACITY))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert large.done()
        await asyncio.to_thread(queue.close)
        return await waiting

    assert asyncio.run(scenario()) == answer(Outcome.SHUTTING_DOWN)
    assert put(queue, "later", 1) == answer(Outcome.SHUTTING_DOWN)
    assert not queue.exhausted
    assert names(queue.take(CAPACITY, 0)) == ["inside"]
    assert queue.exhausted


def test_the_large_exports_of_an_address_hold_half_of_the_capacity_its_small_ones_and_all_large_ones_three_quarters():
    queue = make_queue()
    for item, parts_of_four, address, enters in (
        ("large", 1.01, "loud", True),
        ("large", 1.01, "loud", False),
        ("large", 2, "another", False),
        ("small", 0.98, "loud", True),
        ("small", 0.98, "loud", True),
        ("small", 0.1, "loud", False),
        ("small", 1, "quiet", True),
    ):
        assert (put(queue, item, int(parts_of_four * CAPACITY / 4), address) is None) is enters
    queue.done(queue.take(CAPACITY // 2, 0))
    assert put(queue, "large", CAPACITY // 4 + 1, "loud") is None


def test_exports_are_taken_together_when_the_oldest_has_waited_or_there_are_many_bytes():
    clock = FakeClock()
    queue = make_queue(clock, batch_s=2.0)
    for item in "ab":
        put(queue, item, 10)
    assert queue.take(CAPACITY, 0) is None
    clock.advance(2.0)
    assert names(queue.take(CAPACITY, 0)) == ["a", "b"]
    put(queue, "large", CAPACITY // 4)
    assert names(queue.take(CAPACITY, 0)) == ["large"]


def test_a_connection_that_brought_what_it_announced_goes_first_and_who_sends_nothing_makes_room(monkeypatch):
    monkeypatch.setattr("collector.ingest.budget.CONTENDED_TIMEOUT_S", 0.05)
    order = []

    async def receive(budget, connection, size_bytes, arrived):
        async with budget.receiving(connection, 100) as receiving:
            order.append(connection)
            await receiving.read(arrived.wait())
            budget.shrink(receiving, size_bytes)

    async def scenario():
        budget, arrived, nothing = ReceiveBudget(100), asyncio.Event(), asyncio.Event()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(budget, "loud", 1, nothing), 0.01)
        held = [asyncio.create_task(receive(budget, f"first {n}", 1, arrived)) for n in range(4)]
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(receive(budget, name, 1, arrived)) for name in ("loud", "loud", "quiet")]
        await asyncio.sleep(0)
        arrived.set()
        await asyncio.gather(*held, *waiting)
        silent = [asyncio.create_task(receive(budget, f"silent {n}", 1, nothing)) for n in range(4)]
        await asyncio.sleep(0)
        await receive(budget, "honest", 1, arrived)
        assert {type(each) for each in await asyncio.gather(*silent, return_exceptions=True)} == {BudgetExceededError}

    asyncio.run(scenario())
    assert order[5:8] == ["quiet", "loud", "loud"]
    assert order[-1] == "honest"


def test_large_messages_are_received_one_after_the_other_since_each_is_held_twice_for_a_moment():
    size_bytes = 32 << 20

    async def scenario():
        budget = ReceiveBudget(size_bytes)
        async with budget.receiving("first", size_bytes) as first:
            second = asyncio.create_task(budget.receiving("second", size_bytes).__aenter__())
            await asyncio.sleep(0)
            budget.shrink(first, size_bytes)
            await asyncio.sleep(0)
            assert not second.done()
        async with asyncio.timeout(5):
            await second

    asyncio.run(scenario())


def test_many_calls_on_one_connection_come_in_after_each_other_and_one_that_gives_up_lets_the_next_in():
    inside = []

    async def receive(budget, size_bytes):
        async with budget.receiving("one", size_bytes):
            inside.append(size_bytes)
            await asyncio.sleep(0)
            assert len(inside) == 1
            inside.clear()

    async def scenario():
        budget = ReceiveBudget(100)
        await asyncio.gather(*(receive(budget, 100) for _ in range(500)))
        held = [budget.receiving(f"other {n}", size_bytes) for n, size_bytes in enumerate((100, 100, 100, 50))]
        for each in held:
            await each.__aenter__()
        large, small = (asyncio.create_task(receive(budget, size_bytes)) for size_bytes in (100, 50))
        await asyncio.sleep(0)
        large.cancel()
        async with asyncio.timeout(1):
            await small

    asyncio.run(scenario())
