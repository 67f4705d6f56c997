"""A receiver that no longer receives makes the process not alive, and the pages name it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import urllib.error
from http.client import HTTPConnection
from types import SimpleNamespace

import grpc
import pytest

from collector.app import Sidecar
from collector.ingest import kv as kv_zmq
from collector.ingest.otlp import otlp_grpc, otlp_http
from collector.ingest.otlp.way_in import HUNG_S
from tests.support.clocks import FakeClock, eventually
from tests.support.paths import DOCS
from tests.support.sidecars import get, make_config, running_sidecar
from tests.support.silent_calls import own_channel, silent_calls
from tests.support.step_exports import make_export
from tests.wire.certificates import Authority

GRPC_NAME, HTTP_NAME = otlp_grpc.NAME, otlp_http.NAME
LATE_S = 61.0
"""Longer than any receiver may go without a check-in."""
OPENSSL = shutil.which("openssl")
PAYLOAD = make_export(1).SerializeToString()


class Hang:
    """Where this is called, nothing goes on until it is over."""

    def __init__(self):
        self.over = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, *_):
        self.entered.release()
        assert self.over.wait(60)

    def has_caught(self, count=1):
        for _ in range(count):
            assert self.entered.acquire(timeout=100)


@pytest.fixture
def hang():
    one = Hang()
    yield one
    one.over.set()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def sidecar(tmp_path, clock, monkeypatch):
    """Behind a clock of ours; its receivers look around often enough for a test."""
    for module in (otlp_grpc, otlp_http):
        monkeypatch.setattr(module, "CHECK_EVERY_S", 0.05)
    with contextlib.ExitStack() as stack:
        kv = f"[{{endpoint: 'ipc://{tmp_path}/kv'}}]"
        one = Sidecar(make_config(tmp_path, RECEIVERS__KV__ENDPOINTS=kv, SNAPSHOT__PUBLISH_INTERVAL_S="0.5"), clock)
        stack.callback(one.stop)
        one.start()
        yield one


def alive(sidecar):
    """What the liveness probe is told: status, who is late."""
    try:
        return 200, json.loads(get(sidecar.http_port, "/healthz"))["late"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["late"]


def only_late(sidecar, name):
    """After everybody else has had time to check in."""
    eventually(lambda: alive(sidecar) == (503, [name]))


def test_an_http_receiver_that_no_longer_accepts_is_not_alive_until_it_does(sidecar, clock, hang, monkeypatch):
    monkeypatch.setattr(sidecar._receivers.http._server, "verify_request", lambda *_: hang() or True)
    with socket.create_connection(("127.0.0.1", sidecar.otlp_http_port)):
        hang.has_caught()
        clock.advance(LATE_S)
        only_late(sidecar, HTTP_NAME)
        hang.over.set()
        eventually(lambda: alive(sidecar) == (200, []))


def test_an_http_receiver_in_which_an_export_hangs_is_not_alive(sidecar, clock, hang, monkeypatch):
    monkeypatch.setattr(sidecar._keeper._made_journal, "sync", hang)
    sidecar._keeper._journal = sidecar._keeper._made_journal
    connection = HTTPConnection("127.0.0.1", sidecar.otlp_http_port)
    connection.request("POST", "/v1/traces", PAYLOAD, {"Content-Type": "application/x-protobuf"})
    hang.has_caught()
    for _ in range(2):
        clock.advance(HUNG_S + 1)
    only_late(sidecar, HTTP_NAME)
    hang.over.set()
    assert connection.getresponse().status == 200
    connection.close()
    eventually(lambda: alive(sidecar) == (200, []))


def test_a_kv_receiver_whose_thread_hangs_is_not_alive(sidecar, clock, hang, monkeypatch):
    monkeypatch.setattr(sidecar._kv._subscriber, "_poller", SimpleNamespace(poll=lambda _: hang() or []))
    hang.has_caught()
    clock.advance(kv_zmq.TURN_TIMEOUT_S + 1)
    only_late(sidecar, kv_zmq.NAME)
    hang.over.set()
    eventually(lambda: alive(sidecar) == (200, []))


def test_a_grpc_receiver_whose_handlers_all_hang_is_not_alive(sidecar, clock, hang, monkeypatch):
    monkeypatch.setattr(otlp_grpc, "CHECK_TIMEOUT_S", 0.1)
    threads = otlp_grpc.THREADS
    monkeypatch.setattr(sidecar.queue, "put", hang)
    with grpc.insecure_channel(f"127.0.0.1:{sidecar.grpc_port}") as channel:
        calls = [channel.unary_unary(otlp_grpc.METHOD).future(PAYLOAD) for _ in range(threads)]
        hang.has_caught(threads)
        clock.advance(LATE_S)
        only_late(sidecar, GRPC_NAME)
        hang.over.set()
        eventually(lambda: alive(sidecar) == (200, []))
        assert all(call.exception(timeout=100) is None for call in calls)


def test_a_grpc_receiver_with_120_silent_calls_on_one_connection_stays_alive(sidecar, clock):
    with own_channel(sidecar.grpc_port) as channel, silent_calls(channel, 120):
        for _ in range(3):
            clock.advance(LATE_S)
            eventually(lambda: alive(sidecar) == (200, []))
            with own_channel(sidecar.grpc_port) as other:
                assert other.unary_unary(otlp_grpc.METHOD)(PAYLOAD, timeout=100) == b""


def takes_address(place, address):
    try:
        place.bind(address)
    except OSError:
        return False
    return True


def test_a_grpc_receiver_whose_listener_is_gone_is_not_alive(sidecar, clock):
    receiver = sidecar._receivers.grpc
    receiver._server.stop(None).wait(100)
    with socket.socket() as held:  # else another test's server may be given the port meanwhile
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        eventually(lambda: takes_address(held, ("127.0.0.1", receiver.port)))
        eventually(lambda: not receiver._listens())
        clock.advance(LATE_S)
        only_late(sidecar, GRPC_NAME)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, OPENSSL)


@pytest.mark.parametrize("days", [2, -1])
def test_where_strangers_are_turned_away_the_handlers_threads_have_to_run(tmp_path, authority, hang, monkeypatch, days):
    monkeypatch.setattr(otlp_grpc, "CHECK_TIMEOUT_S", 0.1)
    cert, key = authority.pair("server", days=days)
    settings = {"CERT_FILE": str(cert), "KEY_FILE": str(key), "CLIENT_CA_FILE": str(authority.ca)}
    with running_sidecar(tmp_path, **{f"RECEIVERS__TLS__{k}": v for k, v in settings.items()}) as sidecar:
        receiver = sidecar._receivers.grpc

        def is_well():
            receiver._check_server()
            return receiver._is_well()

        eventually(is_well)
        held = [receiver._pool.submit(hang) for _ in range(otlp_grpc.THREADS)]
        assert not is_well()
        hang.over.set()
        assert [task.result(20) for task in held] == [None] * len(held)
        eventually(is_well)


def test_the_runbook_names_everybody_who_may_be_late(sidecar):
    chapter = (DOCS / "runbooks.md").read_text(encoding="utf-8").split("## TracefitDown")[1].split("\n## ")[0]
    assert all(f"`{name}`" in chapter for name in sidecar.health._due_ns)
