"""KV events and records of forward passes over real ZMQ sockets: gaps, garbage, floods, silence, return."""

import contextlib
import json
import socket
import struct
import sys
import time
from base64 import b64decode
from functools import cache, partial
from itertools import chain

import msgspec
import pytest
import zmq
from grpc import StatusCode

from collector.app import Sidecar
from collector.cli import main
from collector.config import Config, ConfigError
from collector.ingest.zmq import FPM_FEED, KV_FEED, SOCKET_BYTES, Subscriber
from collector.runtime import Clock, running
from collector.telemetry import Metrics, table
from tests.support.clocks import eventually
from tests.support.gpu_server import serve
from tests.support.kv_batches import payload, stored
from tests.support.pipelines import value_of
from tests.support.processes import free_port
from tests.support.recordings import kv_lines
from tests.support.recordings import payloads as exports
from tests.support.sidecars import call_export, code_of, metric, running_sidecar
from tests.support.vllm_senders import fpm_lines

NOBODY = "tcp://127.0.0.1:1"


class Publisher:
    """PUB with numbered messages, as vLLM's own."""

    def __init__(self, pub, address=""):
        self.seq, self.pub = 0, pub  # XPUB tells when somebody has subscribed; on the wire it is PUB
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.setsockopt(zmq.SNDHWM, 0)  # it sends a minute at once
        if address:
            eventually(lambda: self._takes(address))
        else:
            address = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.address = address

    def _takes(self, address):
        """libzmq gives the port of a closed socket back in a thread of its own."""
        with contextlib.suppress(zmq.ZMQError):
            self.pub.bind(address)
            return True

    def wait_for_subscriber(self):
        assert self.pub.poll(100_000), "nobody subscribed"
        self.pub.recv()

    def publish(self, *bodies, topic=b"", lose=False):
        for body in bodies:
            if not lose:
                self.pub.send_multipart([topic, self.seq.to_bytes(8, "big"), body])
            self.seq += 1


@pytest.fixture
def publishers():
    """Makes them, on an address or on any port."""
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        yield lambda address="": Publisher(stack.enter_context(context.socket(zmq.XPUB)), address)


@pytest.fixture
def publisher(publishers):
    return publishers()


class ZmtpPublisher:
    """PUB that connects, on a bare socket, and may leave a message without its end."""

    def __init__(self, endpoint):
        eventually(lambda: self._connects(endpoint))

    def _connects(self, endpoint):
        """Whether the other side subscribes; a socket that is being closed may still greet."""
        told = b""
        with contextlib.suppress(ConnectionError):
            self._socket = socket.create_connection(endpoint, 60)
            self._socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(23, b"\0") + bytes(32))
            self._socket.sendall(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB")
            while not told.endswith(b"\x00\x01\x01") and (more := self._socket.recv(64)):
                told += more
        return told.endswith(b"\x00\x01\x01")

    def send(self, frames, *, ends=True):
        last = len(frames) - 1
        flags = [2 | (number < last or not ends) for number in range(len(frames))]
        heads = [struct.pack(">BQ", flag, len(frame)) for flag, frame in zip(flags, frames, strict=True)]
        self._socket.sendall(b"".join(chain.from_iterable(zip(heads, frames, strict=True))))

    def is_closed(self):
        with contextlib.suppress(ConnectionError):
            while self._socket.recv(4096):
                pass
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()


class Listening(Subscriber):
    """A receiver with what it counts, and the numbers of all that it handed out."""

    def __init__(self, feed, config):
        metrics, self.memory_is_short = Metrics(), False
        super().__init__(feed, config, metrics, Clock(), is_short=lambda: self.memory_is_short)
        self.count, self.taken = partial(value_of, metrics), []

    def seqs(self):
        self.taken += self.take()
        return [one.seq for one in self.taken]


@contextlib.contextmanager
def listening(feed=KV_FEED, **addresses):
    one = Listening(feed, Config(**addresses))
    with running(one):
        yield one


@contextlib.contextmanager
def receiver_of(publisher, feed=KV_FEED):
    """A receiver that is subscribed to this publisher alone."""
    with listening(feed, **{feed.key: (publisher.address,)}) as subscriber:
        publisher.wait_for_subscriber()
        yield subscriber


def blocks(*counts):
    return [payload(stored(count), ts_s=time.time()) for count in counts]


def test_batches_of_every_topic_arrive_as_records_of_their_endpoint_also_when_another_is_not_there(publisher):
    with listening(kv=(NOBODY, f"engine-1={publisher.address}")) as subscriber:
        publisher.wait_for_subscriber()
        for number, body in enumerate(blocks(1, 2, 3)):
            publisher.publish(body, topic=b"kv-events" * number)
        eventually(lambda: subscriber.seqs() == [0, 1, 2])
        heard = {(one.source, one.instance, one.block_size) for one in subscriber.taken}
        assert heard == {(publisher.address, "engine-1", 32)}


def test_a_message_of_many_frames_is_left_out_and_one_without_end_is_let_go_of_when_memory_is_short():
    """libzmq bounds neither the frames of a message nor what it has before its end."""
    endpoint = ("127.0.0.1", free_port())
    with listening(kv=(f"tcp://*:{endpoint[1]}",)) as subscriber, ZmtpPublisher(endpoint) as attacker:
        attacker.send([b""] * 100_000)
        attacker.send([bytes(8), *blocks(1)])
        eventually(lambda: subscriber.seqs() == [0])
        assert subscriber.count(table.MESSAGES, "kv", "undecodable") == 1
        attacker.send([bytes(1 << 20)] * 16, ends=False)
        subscriber.memory_is_short = True
        assert attacker.is_closed()
        subscriber.memory_is_short = False
        with ZmtpPublisher(endpoint) as honest:
            honest.send([(1).to_bytes(8, "big"), *blocks(1)])
            eventually(lambda: subscriber.seqs() == [0, 1])
    assert subscriber.count(table.KV_MISSING) == 0


def test_a_publisher_that_comes_back_is_heard_again_and_nothing_is_missing(publishers, publisher):
    with receiver_of(publisher) as subscriber:
        publisher.publish(*blocks(1, 1, 1))
        eventually(lambda: subscriber.seqs() == [0, 1, 2])
        publisher.pub.close()
        again = publishers(publisher.address)
        again.wait_for_subscriber()
        again.publish(*blocks(2))
        eventually(lambda: subscriber.seqs() == [0, 1, 2, 0])
        assert subscriber.count(table.MESSAGES, "kv", "too_large") == 0
        assert subscriber.count(table.KV_MISSING) == 0


def test_without_pyzmq_config_check_says_what_to_install_where_it_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    Sidecar(Config(), Clock())
    with pytest.raises(ConfigError, match=r"kv: .*tracefit's extra kv"):
        Sidecar(Config(kv=(NOBODY,)), Clock())


def test_an_address_nobody_can_use_ends_the_start_with_the_key_named(tmp_path):
    too_long = f"ipc://{'x' * 200}"
    with pytest.raises(ConfigError, match=r"kv: ipc://x"), running_sidecar(tmp_path, KV=too_long):
        pass


def messages(sidecar, feed, outcome):
    return metric(sidecar.http_port, f'tracefit_messages_total{{feed="{feed}",outcome="{outcome}"}}')


def test_publishers_are_heard_while_exports_are_refused_for_want_of_memory(tmp_path, monkeypatch, publisher):
    monkeypatch.setattr("collector.app.resident_bytes", lambda: 400 << 20)
    with running_sidecar(tmp_path, KV=publisher.address, MEMORY_LIMIT_MIB="410") as sidecar:
        publisher.wait_for_subscriber()
        assert code_of(sidecar.grpc_port, next(exports("c1_mixed"))) is StatusCode.RESOURCE_EXHAUSTED
        for body in blocks(*[1] * 10):
            publisher.publish(body)
            time.sleep(0.01)
        eventually(lambda: messages(sidecar, "kv", table.ACCEPTED) == 10)


GARBAGE = {
    "undecodable": ([b"alone"], [b"", b"short", payload(stored())]),
    "invalid": ([b"", bytes(8), payload(stored(), ts_s=-5.0)],),
}


def test_what_publishers_say_garbage_and_gaps_included_is_on_the_page(tmp_path, publisher):
    with running_sidecar(tmp_path, KV=f"{publisher.address},{NOBODY}") as sidecar:
        publisher.wait_for_subscriber()
        for frames in (frames for several in GARBAGE.values() for frames in several):
            publisher.pub.send_multipart(frames)
        body = payload(stored(2), ["TransferInitiated", 1, "r", "GPU", "CPU", 8, 7])
        for number in range(5):
            publisher.publish(body, lose=number in (2, 3))
        made_up = (1 << 60).to_bytes(8, "big")
        publisher.pub.send_multipart([b"", made_up, body])
        page = sidecar.http_port
        eventually(lambda: metric(page, 'tracefit_kv_batches_total{outcome="accepted"}') == 4)
        assert messages(sidecar, "kv", "accepted") == 4
        assert {reason: messages(sidecar, "kv", reason) for reason in GARBAGE} == {"undecodable": 2, "invalid": 1}
        assert metric(page, "tracefit_kv_missing_messages_total") == 2
        assert metric(page, "tracefit_kv_unbound_publishers") == 1
        assert metric(page, 'tracefit_kv_events_total{outcome="accepted"}') == 8


def test_steps_learned_beside_live_kv_events_carry_their_blocks(tmp_path, publisher):
    """c5 again, live: its KV messages by ZMQ, its spans by gRPC; the publisher is the only engine's."""
    with running_sidecar(tmp_path, KV=publisher.address) as sidecar:
        page = sidecar.http_port
        publisher.wait_for_subscriber()
        for line in map(json.loads, kv_lines("c5_offload")):
            publisher.pub.send_multipart([b"", line["seq"].to_bytes(8, "big"), b64decode(line["payload_b64"])])
        eventually(lambda: metric(page, 'tracefit_kv_batches_total{outcome="accepted"}') == 520)
        assert metric(page, "tracefit_kv_unbound_publishers") == 1
        for export in exports("c5_offload"):
            call_export(sidecar.grpc_port, export)
        eventually(lambda: metric(page, "tracefit_kv_unbound_publishers") == 0)
        assert metric(page, "tracefit_kv_missing_messages_total") == 0


@cache
def packed():
    """A thousand records of forward passes."""
    lines = list(fpm_lines(serve("llama8b-h100", 60.0, 11)))[:1000]
    return [msgspec.msgpack.encode(json.loads(line)) for line in lines]


@pytest.mark.parametrize(("before", "target"), [("", "gpu_time"), ("tcp", "step_time"), ("gpu+tcp", "gpu_time")])
def test_a_sidecar_learns_from_what_an_engine_publishes_and_on_a_socket_of_the_file_system_of_the_gpu(
    tmp_path, publishers, publisher, before, target, capsys
):
    if before:
        address = publisher.address.replace("tcp", before)
    else:
        address = f"ipc://{tmp_path}/fpm.0"
        publisher = publishers(address)
    soon = {"IDLE_TIMEOUT_S": "1", "ALLOWED_LATENESS_S": "0.5", "ENGINES_MAX": "1"}
    of_another = msgspec.msgpack.encode(msgspec.msgpack.decode(packed()[0]) | {"worker_id": "another"})
    with running_sidecar(tmp_path / "state", FPM=address, MODEL="m", **soon) as sidecar:
        publisher.wait_for_subscriber()
        publisher.publish(*packed()[:400], of_another)
        publisher.pub.send_multipart([b"alone"])
        eventually(lambda: sidecar.snapshot() and sidecar.snapshot().configs)
        eventually(lambda: set(sidecar.snapshot().configs[0].targets) == {target})
        (config,) = sidecar.snapshot().configs
        assert (config.telemetry, config.config["model"]) == ("fpm", "m")
        outcomes = "accepted", "undecodable"
        eventually(lambda: [messages(sidecar, "fpm", outcome) for outcome in outcomes] == [401, 1])

        def doctor_says(words):
            main(["doctor", f"127.0.0.1:{sidecar.http_port}"])
            return words in (said := capsys.readouterr().out) and said

        said = eventually(lambda: doctor_says("1 engines or configurations have no place"))
    assert "and 401 messages since its start" in said
    assert "1 messages were left out" in said


def test_a_record_of_no_sensible_size_is_counted_and_its_publisher_is_heard_on(publisher):
    with receiver_of(publisher, FPM_FEED) as subscriber:
        publisher.publish(packed()[0], bytes(1 << 16), packed()[1])
        eventually(lambda: subscriber.count(table.MESSAGES, "fpm", table.ACCEPTED) == 2)
        assert subscriber.count(table.MESSAGES, "fpm", "too_large") == 1
        publisher.publish(bytes(SOCKET_BYTES + 1))  # which ends the connection, and libzmq does not connect again
        eventually(lambda: subscriber.count(table.MESSAGES, "fpm", "undecodable") == 1)
        accepted = partial(subscriber.count, table.MESSAGES, "fpm", table.ACCEPTED)
        eventually(lambda: publisher.publish(packed()[2]) or accepted() > 2)


def test_a_publisher_that_is_gone_without_a_word_is_let_go_of(monkeypatch):
    monkeypatch.setattr("collector.ingest.zmq.HEARTBEAT_MS", 100)
    endpoint = ("127.0.0.1", free_port())
    with listening(kv=(f"tcp://*:{endpoint[1]}",)), ZmtpPublisher(endpoint) as gone:
        assert gone.is_closed()


def test_records_wait_for_a_worker_that_is_busy_for_two_seconds(publisher):
    """So long it may import what it learns its first row with."""
    with receiver_of(publisher, FPM_FEED) as subscriber:
        publisher.publish(*packed() * 20)
        eventually(lambda: subscriber.count(table.MESSAGES, "fpm", table.ACCEPTED) == 20_000)
        assert subscriber.count(table.MESSAGES, "fpm", table.DROPPED) == 0


def test_of_a_publisher_that_floods_the_newest_are_kept(publisher, monkeypatch):
    monkeypatch.setattr("collector.ingest.zmq.QUEUE_MAX", 50)
    with receiver_of(publisher, FPM_FEED) as subscriber:
        publisher.publish(*packed()[:500])
        eventually(lambda: subscriber.count(table.MESSAGES, "fpm", table.ACCEPTED) == 500)
        assert subscriber.count(table.SIZE, "fpm") == 50
        assert subscriber.count(table.MESSAGES, "fpm", table.DROPPED) == 450
        newest = [msgspec.msgpack.decode(body)["counter_id"] for body in packed()[450:500]]
        assert [passed.counter for passed in subscriber.take()] == newest
