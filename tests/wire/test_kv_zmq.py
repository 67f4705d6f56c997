"""KV events over real ZMQ sockets on loopback: subscription, gaps and replay, garbage, silence, restart."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import msgspec
import pytest

from collector.config import KvConfig, KvEndpoint
from collector.config.errors import ConfigError
from collector.config.load import load
from collector.receive.kv.kv_zmq import KvSubscriber
from collector.runtime.clock import SystemClock
from collector.runtime.health import Health
from collector.telemetry import table
from collector.telemetry.reasons import KvSkip
from tests.support.kv_batches import payload, stored

zmq = pytest.importorskip("zmq")

DEADLINE_S = 100.0


def until(condition):
    """Wait for other threads, at most DEADLINE_S; a condition that never holds fails the test."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "never came true"
        threading.Event().wait(0.005)


def _bound(one, port):
    try:
        one.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError:
        return False
    return True


class Publisher:
    """vLLM's publisher: PUB with numbered messages, ROUTER that replays what it buffered."""

    def __init__(self, context, form=3, port=0, replay_first=0):
        self.form, self.seq, self.buffer, self.replay_first = form, 0, [], replay_first
        self.context = context
        self.pub = context.socket(zmq.XPUB)  # XPUB tells when somebody has subscribed; on the wire it is PUB
        self.pub.setsockopt(zmq.LINGER, 0)
        self.port = self._bind(self.pub, port)
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.replay_port = self._bind(self.router, 0)

    @staticmethod
    def _bind(one, port):
        if port:
            until(lambda: _bound(one, port))  # libzmq gives a closed socket's port back in its own time
            return port
        return one.bind_to_random_port("tcp://127.0.0.1")

    @property
    def endpoint(self):
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay(self):
        return f"tcp://127.0.0.1:{self.replay_port}"

    def wait_for_subscriber(self):
        assert self.pub.poll(DEADLINE_S * 1000), "nobody subscribed"
        return self.pub.recv()[1:]

    def publish(self, *events, lose=False, topic=b"", raw=None):
        body = raw if raw is not None else payload(*events, ts_s=time.time())
        self.buffer.append((self.seq, body))
        if not lose:
            self.pub.send_multipart([topic, self.seq.to_bytes(8, "big"), body])
        self.seq += 1

    def serve_replay(self):
        """Answer one request, as vLLM does: message by message, then the end mark."""
        assert self.router.poll(DEADLINE_S * 1000), "nobody asked"
        identity, empty, start = self.router.recv_multipart()
        assert empty == b""
        head = [identity, b""] if self.form == 3 else [identity, b"", b"topic"]
        for seq, body in self.buffer:
            if seq >= max(int.from_bytes(start, "big"), self.replay_first):
                self.router.send_multipart([*head, seq.to_bytes(8, "big"), body])
        self.router.send_multipart([*([identity, b""] if self.form == 3 else [identity, b"", b""]), b"\xff" * 8, b""])
        return int.from_bytes(start, "big")

    def close(self):
        self.pub.close()
        self.router.close()


CLOCK = SystemClock()


@pytest.fixture
def context():
    with zmq.Context() as one:
        yield one


@pytest.fixture
def publisher(context):
    one = Publisher(context)
    yield one
    one.close()


@pytest.fixture
def subscribe():
    running = []

    def start(*endpoints, **settings):
        one = KvSubscriber(KvConfig(endpoints=endpoints, **settings), CLOCK, Health(CLOCK))
        one.start()
        running.append(one)
        return one

    yield start
    for one in running:
        one.stop()
        assert not one.alive


class Taken:
    """Collects what the subscriber hands out."""

    def __init__(self, subscriber):
        self.subscriber, self.batches = subscriber, []

    def seqs(self):
        self.batches += self.subscriber.take()
        return [one.seq for one in self.batches]


def test_batches_arrive_as_records_with_the_endpoint_as_their_source(publisher, subscribe):
    subscriber = subscribe(KvEndpoint(endpoint=publisher.endpoint))
    publisher.wait_for_subscriber()
    for blocks in (1, 2, 3):
        publisher.publish(stored(blocks))
    taken = Taken(subscriber)
    until(lambda: len(taken.seqs()) == 3)
    assert [one.stored_blocks for one in taken.batches] == [1, 2, 3]
    assert {one.source for one in taken.batches} == {publisher.endpoint}
    counts = subscriber.counts()
    assert counts[table.KV_RECEIVED_MESSAGES] == counts[table.KV_RECEIVED_OK] == 3


def test_only_the_topic_asked_for_is_subscribed(publisher, subscribe):
    subscriber = subscribe(KvEndpoint(endpoint=publisher.endpoint, topic="kv-events"))
    assert publisher.wait_for_subscriber() == b"kv-events"
    publisher.publish(stored(1), topic=b"kv-events")
    taken = Taken(subscriber)
    until(lambda: taken.seqs() == [0])


@pytest.mark.parametrize("form", [3, 4], ids=["the fork's replay", "0.32's replay"])
def test_a_gap_is_replayed_and_nothing_comes_twice(context, subscribe, form):
    publisher = Publisher(context, form=form)
    subscriber = subscribe(KvEndpoint(endpoint=publisher.endpoint, replay=publisher.replay))
    publisher.wait_for_subscriber()
    for number in range(6):
        publisher.publish(stored(1), lose=number in (2, 3))
    assert publisher.serve_replay() == 2
    taken = Taken(subscriber)
    until(lambda: len(taken.seqs()) == 6)
    until(lambda: subscriber.counts()[table.KV_SEQUENCE, "replays_finished"] == 1)
    assert sorted(taken.seqs()) == [0, 1, 2, 3, 4, 5]
    counts = subscriber.counts()
    numbers = counts.by_label(table.KV_SEQUENCE)
    assert (numbers["gaps"], numbers["missing"], numbers["recovered"], "unrecoverable" in numbers) == (1, 2, 2, False)
    assert counts.by_label(table.KV_RECEIVED_SKIPPED) == {KvSkip.DUPLICATE: 2}
    publisher.close()


def test_a_late_start_asks_for_what_came_before_and_what_is_gone_is_counted(context, subscribe):
    publisher = Publisher(context, replay_first=3)
    for _ in range(5):
        publisher.publish(stored(1), lose=True)
    subscriber = subscribe(KvEndpoint(endpoint=publisher.endpoint, replay=publisher.replay))
    publisher.wait_for_subscriber()
    publisher.publish(stored(1))
    assert publisher.serve_replay() == 0
    taken = Taken(subscriber)
    until(lambda: sorted(taken.seqs()) == [3, 4, 5])
    until(lambda: subscriber.counts()[table.KV_SEQUENCE, "unrecoverable"] == 3)
    publisher.close()


def test_a_replay_that_never_answers_costs_nothing_but_the_gap(publisher, subscribe):
    subscriber = subscribe(KvEndpoint(endpoint=publisher.endpoint, replay=publisher.replay), replay_timeout_s=0.05)
    publisher.wait_for_subscriber()
    publisher.publish(lose=True)
    publisher.publish(stored(1))
    until(lambda: subscriber.counts()[table.KV_SEQUENCE, "replays_unanswered"] >= 1)
    publisher.publish(stored(2))
    taken = Taken(subscriber)
    until(lambda: taken.seqs() == [1, 2])


def test_an_endpoint_that_is_not_there_holds_nobody_up(publisher, subscribe):
    nobody = KvEndpoint(endpoint="tcp://127.0.0.1:1", replay="tcp://127.0.0.1:1")
    subscriber = subscribe(nobody, KvEndpoint(endpoint=publisher.endpoint))
    publisher.wait_for_subscriber()
    publisher.publish(stored(1))
    taken = Taken(subscriber)
    until(lambda: taken.seqs() == [0])


def test_garbage_is_counted_by_reason_and_the_next_message_is_read(publisher, subscribe):
    subscriber = subscribe(KvEndpoint(endpoint=publisher.endpoint))
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
    until(lambda: taken.seqs() == [3])
    counts = subscriber.counts()
    skipped = counts.by_label(table.KV_RECEIVED_SKIPPED)
    assert skipped == {KvSkip.FRAMES: 4, KvSkip.UNDECODABLE: 2, KvSkip.OUT_OF_RANGE: 1}
    assert counts[table.KV_RECEIVED_MESSAGES] == counts[table.KV_RECEIVED_OK] + sum(skipped.values()) == 8


def test_a_publisher_that_comes_back_is_heard_again_and_counts_as_restarted(context, subscribe):
    first = Publisher(context)
    subscriber = subscribe(KvEndpoint(endpoint=first.endpoint))
    first.wait_for_subscriber()
    for _ in range(3):
        first.publish(stored(1))
    taken = Taken(subscriber)
    until(lambda: len(taken.seqs()) == 3)
    first.close()
    second = Publisher(context, port=first.port)
    second.wait_for_subscriber()
    second.publish(stored(2))
    until(lambda: taken.seqs() == [0, 1, 2, 0])
    assert subscriber.counts()[table.KV_SEQUENCE, "restarts"] == 1
    second.close()


def test_a_full_queue_loses_the_oldest_and_says_so(publisher, subscribe):
    subscriber = subscribe(KvEndpoint(endpoint=publisher.endpoint), queue_batches=10)
    publisher.wait_for_subscriber()
    for sent in range(1, 101):
        publisher.publish(stored(1))
        until(lambda sent=sent: subscriber.counts()[table.KV_RECEIVED_OK] == sent)  # the socket's own queue is as short
    assert (subscriber.queued, subscriber.counts()[table.KV_DROPPED_MESSAGES]) == (10, 90)
    assert [one.seq for one in subscriber.take()] == list(range(90, 100))
    assert subscriber.queued == 0


def test_a_replay_larger_than_the_queue_waits_for_the_worker(context, subscribe):
    publisher = Publisher(context)
    for _ in range(100):
        publisher.publish(stored(1), lose=True)
    subscriber = subscribe(KvEndpoint(endpoint=publisher.endpoint, replay=publisher.replay), queue_batches=10)
    publisher.wait_for_subscriber()
    publisher.publish(stored(1))
    publisher.serve_replay()
    until(lambda: subscriber.queued >= 5)
    publisher.publish(stored(1))
    until(lambda: subscriber.counts()[table.KV_SEQUENCE, "recovered"] == 4)
    taken = Taken(subscriber)
    until(lambda: len(taken.seqs()) == 102)
    assert sorted(taken.seqs()) == list(range(102))
    assert subscriber.counts()[table.KV_DROPPED_MESSAGES] == 0
    publisher.close()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{endpoints: [{endpoint: '127.0.0.1:5557'}]}", "endpoints[0].endpoint"),
        ("{endpoints: [{endpoint: 'tcp://a:1'}, {endpoint: ''}]}", "endpoints[1].endpoint"),
        ("{endpoints: [{}]}", "endpoints[0]"),
        ("{endpoints: [{endpoint: 'tcp://a:1', replay: 'b:1'}]}", "endpoints[0].replay"),
        ("{endpoints: [{endpoint: 'tcp://a:1', token: x}]}", "endpoints[0]"),
        ("{queue_batches: 0}", "queue_batches"),
        ("{replay_timeout_s: .nan}", "replay_timeout_s"),
    ],
)
def test_a_bad_setting_is_named_and_exits_78(tmp_path, text, key):
    (tmp_path / "x.yaml").write_text(f"receivers: {{kv: {text}}}")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "x.yaml", {})
    assert error.value.key.startswith(f"receivers.kv.{key}")


def test_without_pyzmq_the_start_says_what_to_install():
    code = (
        "import sys; sys.modules['zmq'] = None\n"
        "from collector.runtime import Health, SystemClock\n"
        "from collector.config import KvEndpoint, KvConfig\n"
        "from collector.receive.kv.kv_zmq import *\n"
        "config = KvConfig(endpoints=(KvEndpoint(endpoint='tcp://127.0.0.1:1'),))\n"
        "try: KvSubscriber(config, SystemClock(), Health(SystemClock())).start()\n"
        "except KvUnavailable as error: print(error)\n"
        "from collector.receive.kv import check_kv\n"
        "check_kv(KvConfig())\n"
        "try: check_kv(config)\n"
        "except Exception as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.count("tracefit's extra kv") == 2
    assert "config error: receivers.kv.endpoints: " in said.stdout, "and so does check-config"
