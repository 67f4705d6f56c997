"""The HTTP port, through real sockets on loopback."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http import HTTPStatus
from types import SimpleNamespace

import pytest

from exporters.blis import export
from exporters.pages import plain
from online.snapshot import Snapshot
from tests.support import exporter_cases as cases
from tests.support.pages import routes_of, serving


@pytest.fixture
def sidecar():
    """The exporters' side of the process, with its inputs in the open."""
    process = SimpleNamespace(snapshot=cases.snapshot(), alive=(True, {"worker": "checked in"}), ready=(True, {}))
    process.routes = routes_of(lambda: process.snapshot, alive=lambda: process.alive, ready=lambda: process.ready)
    return process


@contextmanager
def connected(routes, **kwargs):
    with serving(routes, **kwargs) as server:
        host = kwargs.get("address", "127.0.0.1")
        with closing(http.client.HTTPConnection(host, server.port, 60)) as client:
            yield client


@pytest.fixture
def client(sidecar):
    with connected(sidecar.routes) as client:
        yield client


def ask(client, path, method="GET"):
    client.request(method, path)
    response = client.getresponse()
    return response, response.read()


def test_metrics_are_text_as_prometheus_reads_it_and_other_methods_are_405_and_name_the_allowed_ones(client):
    response, page = ask(client, "/metrics")
    assert response.getheader("Content-Type").startswith("text/plain; version=0.0.4")
    assert page.startswith(b"# HELP tracefit_snapshot_generation ")
    response, _ = ask(client, "/metrics", "POST")
    assert (response.status, response.getheader("Allow")) == (405, "GET, HEAD")


def test_the_snapshot_is_the_newest_and_a_503_before_the_first(client, sidecar):
    response, body = ask(client, "/snapshot")
    assert response.status == 200
    assert Snapshot.from_json(body) == cases.snapshot()
    assert response.getheader("Content-Type") == "application/json"
    sidecar.snapshot = cases.snapshot(generation=43)
    response, body = ask(client, "/snapshot")
    assert (response.status, json.loads(body)["generation"]) == (200, 43)
    sidecar.snapshot = None
    response, _ = ask(client, "/snapshot")
    assert (response.status, response.getheader("Retry-After")) == (503, "5")


def test_one_configuration_can_be_pulled_alone(client, sidecar):
    sidecar.snapshot = cases.snapshot(cases.config("aaaaaaaaaaaa"), cases.config("bbbbbbbbbbbb"))
    response, body = ask(client, "/snapshot/bbbbbbbbbbbb")
    assert response.status == 200
    assert [config.config_id for config in Snapshot.from_json(body).configs] == ["bbbbbbbbbbbb"]
    assert ask(client, "/snapshot/cccccccccccc")[0].status == 404
    assert ask(client, "/snapshot/cccccccccccc/blis.yaml")[0].status == 404


def test_blis_gets_the_bytes_that_the_command_line_gives(client, sidecar):
    path = "/snapshot/0f3c52aa9b1e/blis.yaml"
    response, body = ask(client, path)
    assert (response.status, b"--model-config" in body) == (422, True)
    sidecar.snapshot = cases.snapshot(cases.config_for_blis())
    of = (sidecar.snapshot, sidecar.snapshot.configs[0])
    response, body = ask(client, path)
    assert (response.status, response.getheader("Content-Type")) == (200, "application/yaml")
    assert body == export(*of)[0]


@pytest.mark.parametrize(("path", "name"), [("/healthz", "alive"), ("/readyz", "ready")])
def test_a_probe_answers_its_verdict_and_its_detail(client, sidecar, path, name):
    assert ask(client, path)[0].status == 200
    setattr(sidecar, name, (False, {"reason": "worker has not checked in"}))
    response, body = ask(client, path)
    assert response.status == 503
    assert json.loads(body) == {"ok": False, "reason": "worker has not checked in"}


def test_a_failing_page_is_500_without_its_secrets():
    def fail(_):
        raise RuntimeError("secret detail")

    with connected({"/": fail}) as client:
        response, body = ask(client, "/")
    assert (response.status, b"secret" in body) == (500, False)


def test_more_callers_than_there_are_places_are_all_answered(monkeypatch):
    """Who is being answered, or has just come, keeps its place; a newcomer has the next one that becomes free."""

    def answer(_):
        time.sleep(0.02)
        return plain(HTTPStatus.OK)

    for name, value in (("CONNECTIONS_MAX", 4), ("SEND_S", 60.0), ("ANSWER_S", 60.0)):  # no less on a busy machine
        monkeypatch.setattr(f"collector.runtime.http.{name}", value)
    with serving({"/": answer}) as server, ThreadPoolExecutor(24) as pool:

        def call(_):
            with closing(http.client.HTTPConnection("127.0.0.1", server.port, 60)) as client:
                return ask(client, "/")[0].status

        assert set(pool.map(call, range(96))) == {200}


@pytest.mark.parametrize("asked", ["/big", "/long"])
def test_a_reader_of_one_byte_at_a_time_and_a_page_that_takes_long_keep_nobody_out(asked, monkeypatch):
    begun, over = threading.Event(), threading.Event()

    def long(_):
        begun.set()
        over.wait(200)
        return plain(HTTPStatus.OK)

    monkeypatch.setattr("collector.runtime.http.CONNECTIONS_MAX", 1)
    body = b"x" * 64_000_000  # more than the socket buffers of both ends hold
    routes = {"/big": lambda _: plain(HTTPStatus.OK, body.decode()), "/long": long, "/": lambda _: plain(HTTPStatus.OK)}
    with serving(routes) as server:
        slow = socket.create_connection(("127.0.0.1", server.port), 60)
        slow.sendall(f"GET {asked} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert begun.wait(60) if asked == "/long" else slow.recv(1) == b"H"
        give_up_s = time.monotonic() + 100
        status = None
        while status is None and time.monotonic() < give_up_s:
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", server.port, 60)) as client:
                    status = ask(client, "/")[0].status
            except (OSError, http.client.HTTPException):
                continue  # refused while the only place is taken
        slow.close()
        over.set()
    assert status == 200
