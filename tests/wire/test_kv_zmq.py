"""KV events over real ZMQ sockets on loopback: subscription, gaps, garbage, silence, restart."""

from __future__ import annotations

import socket
import sys
import time

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from collector.config import Config, ConfigError
from collector.ingest.zmq import KV_FEED, Subscriber, check_zmq
from collector.telemetry import Metrics, table
from collector.telemetry.reasons import Skip
from tests.support.clocks import eventually
from tests.support.kv_batches import payload, stored

zmq = pytest.importorskip("zmq")

DEADLINE_S = 100.0


def _bound(one, port):
    try:
        one.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError:
        return False
    return True


class Publisher:
    """vLLM's publisher: PUB with numbered messages."""

    def __init__(self, context, port=0):
        self.seq = 0
        self.pub = context.socket(zmq.XPUB)  # XPUB tells when somebody has subscribed; on the wire it is PUB
        self.pub.setsockopt(zmq.LINGER, 0)
        self.port = self._bind(self.pub, port)

    @staticmethod
    def _bind(one, port):
        if port:
            eventually(lambda: _bound(one, port))  # libzmq gives a closed socket's port back in its own time
            return port
        return one.bind_to_random_port("tcp://127.0.0.1")

    @property
    def endpoint(self):
        return f"tcp://127.0.0.1:{self.port}"

    def wait_for_subscriber(self):
        assert self.pub.poll(DEADLINE_S * 1000), "nobody subscribed"
        return self.pub.recv()[1:]

    def publish(self, *events, lose=False, topic=b""):
        body = payload(*events, ts_s=time.time())
        if not lose:
            self.pub.send_multipart([topic, self.seq.to_bytes(8, "big"), body])
        self.seq += 1

    def close(self):
        self.pub.close()


@pytest.fixture
def context():
    with zmq.Context() as one:
        yield one


@pytest.fixture
def publisher(context):
    one = Publisher(context)
    yield one
    one.close()


class Listening(Subscriber):
    """A receiver with what it counts."""

    def __init__(self, config, metrics, **settings):
        super().__init__(KV_FEED, config, metrics, **settings)
        self.metrics = metrics

    def by_label(self, metric):
        ((_, values),) = metric.labels
        counted = {value: self.metrics.value(metric, value) for value in values}
        return {value: number for value, number in counted.items() if number}


@pytest.fixture
def subscribe():
    running = []

    def start(*addresses, **settings):
        one = Listening(Config(kv=addresses), Metrics(CollectorRegistry()), **settings)
        one.start()
        running.append(one)
        return one

    yield start
    for one in running:
        one.stop()


class Taken:
    """Collects what the subscriber hands out."""

    def __init__(self, subscriber):
        self.subscriber, self.batches = subscriber, []

    def seqs(self):
        self.batches += self.subscriber.take()
        return [one.seq for one in self.batches]


def test_batches_of_every_topic_arrive_as_records_with_the_endpoint_as_their_source(publisher, subscribe):
    subscriber = subscribe(publisher.endpoint)
    assert publisher.wait_for_subscriber() == b""
    for blocks in (1, 2, 3):
        publisher.publish(stored(blocks), topic=b"kv-events" * (blocks - 1))
    taken = Taken(subscriber)
    eventually(lambda: len(taken.seqs()) == 3)
    assert [one.stored_blocks for one in taken.batches] == [1, 2, 3]
    assert {one.source for one in taken.batches} == {publisher.endpoint}
    assert subscriber.metrics.value(table.MESSAGES, "kv", table.ACCEPTED) == 3


def test_a_gap_is_counted_and_costs_nothing_but_what_was_lost(publisher, subscribe):
    subscriber = subscribe(f"engine-1={publisher.endpoint}")
    publisher.wait_for_subscriber()
    for number in range(6):
        publisher.publish(stored(1), lose=number in (2, 3))
    taken = Taken(subscriber)
    eventually(lambda: taken.seqs() == [0, 1, 4, 5])
    assert subscriber.metrics.value(table.KV_MISSING) == 2
    assert {one.instance for one in taken.batches} == {"engine-1"}


def test_an_endpoint_that_is_not_there_holds_nobody_up(publisher, subscribe):
    nobody = "tcp://127.0.0.1:1"
    subscriber = subscribe(nobody, publisher.endpoint)
    publisher.wait_for_subscriber()
    publisher.publish(stored(1))
    taken = Taken(subscriber)
    eventually(lambda: taken.seqs() == [0])


def test_garbage_is_counted_by_reason_and_the_next_message_is_read(publisher, subscribe):
    subscriber = subscribe(publisher.endpoint)
    publisher.wait_for_subscriber()
    for frames in (
        [b"alone"],
        [b"", b"short", payload(stored())],
        [b"", (0).to_bytes(8, "big"), b"\xc1garbage"],
        [b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode({"ts": "soon"})],
        [b"", (2).to_bytes(8, "big"), payload(stored(), ts_s=-5.0)],
        [b"", b"\xff" * 8, b""],
        [b"1", b"2", b"3", b"4", b"5", b"6"],
    ):
        publisher.pub.send_multipart(frames)
    publisher.seq = 3
    publisher.publish(stored(1))
    taken = Taken(subscriber)
    eventually(lambda: taken.seqs() == [3])
    became = [subscriber.metrics.value(table.MESSAGES, "kv", each) for each in (Skip.UNDECODABLE, Skip.INVALID)]
    assert became == [6, 1]


def test_a_publisher_that_comes_back_is_heard_again_and_nothing_is_missing(context, subscribe):
    first = Publisher(context)
    subscriber = subscribe(first.endpoint)
    first.wait_for_subscriber()
    for _ in range(3):
        first.publish(stored(1))
    taken = Taken(subscriber)
    eventually(lambda: len(taken.seqs()) == 3)
    first.close()
    second = Publisher(context, port=first.port)
    second.wait_for_subscriber()
    second.publish(stored(2))
    eventually(lambda: taken.seqs() == [0, 1, 2, 0])
    assert subscriber.metrics.value(table.KV_MISSING) == 0
    second.close()


def test_a_full_queue_loses_the_oldest_and_says_so(publisher, subscribe):
    subscriber = subscribe(publisher.endpoint, queue_max=10)
    publisher.wait_for_subscriber()
    for sent in range(1, 101):
        publisher.publish(stored(1))
        eventually(
            lambda sent=sent: subscriber.metrics.value(table.MESSAGES, "kv", table.ACCEPTED) == sent
        )  # the socket's own queue is as short
    value = subscriber.metrics.value
    assert (value(table.SIZE, "kv"), value(table.MESSAGES, "kv", table.DROPPED)) == (10, 90)
    assert [one.seq for one in subscriber.take()] == list(range(90, 100))
    assert subscriber.metrics.value(table.SIZE, "kv") == 0


def test_a_connecting_publisher_is_heard_by_binding(context, subscribe):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    subscriber = subscribe(f"tcp://*:{port}")
    with context.socket(zmq.XPUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        pub.connect(f"tcp://127.0.0.1:{port}")
        assert pub.poll(DEADLINE_S * 1000)
        pub.send_multipart([b"", bytes(8), payload(stored(1))])
        taken = Taken(subscriber)
        eventually(lambda: taken.seqs() == [0])


def test_without_pyzmq_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    config = Config(kv=("tcp://127.0.0.1:1",))
    with pytest.raises(ConfigError, match=r"kv: .*tracefit's extra kv"):
        Subscriber(KV_FEED, config, Metrics(CollectorRegistry())).start()
    check_zmq(Config())
    with pytest.raises(ConfigError, match=r"kv: .*tracefit's extra kv"):  # and so does config check
        check_zmq(config)
