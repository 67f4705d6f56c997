"""A receiver that no longer receives makes the process not alive, and the pages name it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import urllib.error
from http.client import HTTPConnection

import grpc
import pytest

from collector.app import Sidecar
from collector.config.schema import GrpcConfig
from collector.receive.kv import kv_intake
from collector.receive.otlp import otlp_grpc, otlp_http, watch
from collector.receive.otlp.grpc_probe import Answer, call_health
from collector.receive.otlp.otlp_grpc import OtlpGrpcReceiver
from collector.receive.otlp.reception import GRPC_NAME, HTTP_NAME
from collector.receive.otlp.watch import CHECK_IN_TIMEOUT_S, HUNG_S
from tests.support.builders import FakeClock, call_export, eventually, get, make_config, make_export, running_sidecar
from tests.support.paths import DOCS
from tests.wire.certificates import Authority

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
            assert self.entered.acquire(timeout=20)


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
    for module in (watch, otlp_http):
        monkeypatch.setattr(module, "CHECK_EVERY_S", 0.05)
    with contextlib.ExitStack() as stack:
        kv = f"[{{endpoint: 'ipc://{tmp_path}/kv'}}]"
        one = Sidecar(make_config(tmp_path, RECEIVERS__KV__ENDPOINTS=kv, SNAPSHOT__INTERVAL_S="1"), clock)
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


def test_everybody_who_checks_in_stays_alive_as_time_goes_by(sidecar, clock):
    assert {GRPC_NAME, HTTP_NAME, kv_intake.NAME, "worker", "state-writer", "snapshot-writer"} == set(
        sidecar.health._deadline_ns
    )
    for _ in range(3):
        clock.advance(CHECK_IN_TIMEOUT_S + 1)
        eventually(lambda: alive(sidecar) == (200, []))


def test_an_http_receiver_that_no_longer_accepts_is_not_alive_until_it_does(sidecar, clock, hang, monkeypatch):
    monkeypatch.setattr(sidecar._reception.http._server, "verify_request", lambda *_: hang() or True)
    with socket.create_connection(("127.0.0.1", sidecar.otlp_http_port)):
        hang.has_caught()
        clock.advance(CHECK_IN_TIMEOUT_S + 1)
        only_late(sidecar, HTTP_NAME)
        hang.over.set()
        eventually(lambda: alive(sidecar) == (200, []))


def test_an_http_receiver_in_which_an_export_hangs_is_not_alive(sidecar, clock, hang, monkeypatch):
    monkeypatch.setattr(sidecar._keep._made_journal, "sync", hang)
    sidecar._keep._journal = sidecar._keep._made_journal
    connection = HTTPConnection("127.0.0.1", sidecar.otlp_http_port)
    connection.request("POST", "/v1/traces", PAYLOAD, {"Content-Type": "application/x-protobuf"})
    hang.has_caught()
    for _ in range(2):
        clock.advance(max(CHECK_IN_TIMEOUT_S, HUNG_S) + 1)
    only_late(sidecar, HTTP_NAME)
    hang.over.set()
    assert connection.getresponse().status == 200
    connection.close()
    eventually(lambda: alive(sidecar) == (200, []))


def test_a_kv_receiver_whose_thread_hangs_is_not_alive(sidecar, clock, hang, monkeypatch):
    monkeypatch.setattr(sidecar._kv._subscriber, "_attend", hang)
    hang.has_caught()
    clock.advance(kv_intake.CHECK_IN_TIMEOUT_S + 1)
    only_late(sidecar, kv_intake.NAME)
    hang.over.set()
    eventually(lambda: alive(sidecar) == (200, []))


def test_a_grpc_receiver_whose_handlers_all_hang_is_not_alive(sidecar, clock, hang, monkeypatch):
    monkeypatch.setattr(otlp_grpc, "CHECK_TIMEOUT_S", 0.1)
    threads = sidecar.config.receivers.grpc.threads
    monkeypatch.setattr(sidecar.queue, "put", hang)
    with grpc.insecure_channel(f"127.0.0.1:{sidecar.grpc_port}") as channel:
        calls = [channel.unary_unary(otlp_grpc.METHOD).future(PAYLOAD) for _ in range(threads)]
        hang.has_caught(threads)
        clock.advance(CHECK_IN_TIMEOUT_S + 1)
        only_late(sidecar, GRPC_NAME)
        hang.over.set()
        eventually(lambda: alive(sidecar) == (200, []))
        assert all(call.exception(timeout=20) is None for call in calls)


def test_a_grpc_receiver_whose_serving_thread_has_ended_is_not_alive(sidecar, clock, monkeypatch):
    monkeypatch.setattr(otlp_grpc, "CHECK_TIMEOUT_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr("grpc._server._process_event_and_continue", lambda *_: False)
        with pytest.raises(grpc.RpcError):
            call_export(sidecar.grpc_port, PAYLOAD, timeout_s=0.3)
    clock.advance(CHECK_IN_TIMEOUT_S + 1)
    only_late(sidecar, GRPC_NAME)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, OPENSSL)


def test_the_call_to_ourselves_is_answered_in_the_clear_and_through_tls(tmp_path, authority):
    with running_sidecar(tmp_path) as sidecar:
        assert call_health("0.0.0.0", sidecar.grpc_port, tls=False, timeout_s=5) is Answer.SERVING
    for days in (2, -1):
        cert, key = authority.pair(f"server{days}", days=days)
        settings = {"RECEIVERS__TLS__CERT_FILE": str(cert), "RECEIVERS__TLS__KEY_FILE": str(key)}
        with running_sidecar(tmp_path, **settings) as sidecar:
            assert call_health("127.0.0.1", sidecar.grpc_port, tls=True, timeout_s=5) is Answer.SERVING


def test_where_strangers_are_turned_away_the_handlers_threads_have_to_run(tmp_path, authority, hang, monkeypatch):
    monkeypatch.setattr(watch, "POOL_WAIT_S", 0.1)
    cert, key = authority.pair("server")
    settings = {"CERT_FILE": str(cert), "KEY_FILE": str(key), "CLIENT_CA_FILE": str(authority.ca)}
    with running_sidecar(tmp_path, **{f"RECEIVERS__TLS__{k}": v for k, v in settings.items()}) as sidecar:
        assert call_health("127.0.0.1", sidecar.grpc_port, tls=True, timeout_s=5) is Answer.CLOSED
        check, seen = sidecar._reception.grpc.check, []
        monkeypatch.setattr(check, "_check_in", lambda: seen.append(1))
        check.look()
        assert seen == [1]
        held = [check._pool.submit(hang) for _ in range(sidecar.config.receivers.grpc.threads)]
        check.look()
        assert seen == [1]
        hang.over.set()
        assert [task.result(20) for task in held] == [None] * len(held)
        monkeypatch.undo()


def test_a_full_server_is_alive():
    config = GrpcConfig(endpoint="127.0.0.1:0", max_connections=2)
    seen = []
    receiver = OtlpGrpcReceiver(config, lambda *_: None, check_in=lambda: seen.append(1))
    port = receiver.start()
    with contextlib.ExitStack() as stack:
        stack.callback(receiver.stop, 0.1)
        for _ in range(2):
            guest = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert guest.recv(9), "the server's SETTINGS: the place is taken"
        assert call_health("127.0.0.1", port, tls=False, timeout_s=5) is Answer.CLOSED
        receiver.check.look()
    assert seen == [1]


def test_nobody_there_and_somebody_mute_are_both_silence():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        assert call_health("127.0.0.1", port, tls=False, timeout_s=0.1) is Answer.SILENT
        assert call_health("127.0.0.1", port, tls=True, timeout_s=0.1) is Answer.SILENT
    assert call_health("127.0.0.1", port, tls=False, timeout_s=0.1) is Answer.SILENT


def test_an_answer_that_is_no_yes_is_not_taken_for_one():
    receiver = OtlpGrpcReceiver(GrpcConfig(endpoint="127.0.0.1:0"), lambda *_: None)
    port = receiver.start()
    try:
        assert call_health("127.0.0.1", port, tls=False, timeout_s=5) is Answer.SERVING
        receiver._health.set("", 2)
        assert call_health("127.0.0.1", port, tls=False, timeout_s=5) is Answer.SILENT
    finally:
        receiver.stop(0.1)


def test_the_runbook_names_everybody_who_may_be_late(sidecar):
    chapter = (DOCS / "runbooks.md").read_text(encoding="utf-8").split("## TracefitDown")[1].split("\n## ")[0]
    assert all(f"`{name}`" in chapter for name in sidecar.health._deadline_ns)
