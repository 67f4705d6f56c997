"""Who gives way when all places of a gRPC server are taken."""

from __future__ import annotations

import contextlib
import logging
import socket

import pytest

from collector.receive.otlp import silent_connections
from collector.receive.otlp.silent_connections import SilentConnections
from tests.support.clocks import eventually

PLACES = 4


@pytest.fixture
def crowd(monkeypatch):
    """A listener's port, and pairs of a client and its accepted connection; any silence is long enough."""
    monkeypatch.setattr(silent_connections, "SILENT_MS", 0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        pairs = []
        for _ in range(PLACES):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            pairs.append((client, stack.enter_context(listener.accept()[0])))
        yield port, pairs


def is_shut(client):
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def say_something(client, accepted):
    client.sendall(bytes(4096))
    received = 0
    while received < 4096:
        received += len(accepted.recv(4096))


def test_whoever_made_no_call_gives_way_before_who_did(crowd, caplog):
    port, pairs = crowd
    client, accepted = pairs[0]
    say_something(client, accepted)
    watch = SilentConnections(PLACES)
    with caplog.at_level(logging.WARNING):
        assert watch.make_room(port) == 1, "a fourth of the places"
    eventually(lambda: sum(is_shut(client) for client, _ in pairs) == 1)
    assert not is_shut(client)
    next(accepted for client, accepted in pairs if is_shut(client)).close()  # as its owner does
    assert watch.make_room(port) == 0, "there is room"
    assert [record.message for record in caplog.records] == [
        "all 4 places for gRPC connections are taken: the most silent give way"
    ]


def test_who_made_a_call_gives_way_when_everybody_did(crowd):
    port, pairs = crowd
    for client, accepted in pairs:
        say_something(client, accepted)
    assert SilentConnections(PLACES).make_room(port) == 1


def test_nobody_gives_way_who_is_not_silent_or_while_there_is_room(crowd, monkeypatch):
    port, pairs = crowd
    assert SilentConnections(PLACES + 1).make_room(port) == 0
    assert SilentConnections(PLACES).make_room(port + 1) == 0, "connections of other ports are no business of its"
    monkeypatch.setattr(silent_connections, "SILENT_MS", 3_600_000)
    assert SilentConnections(PLACES).make_room(port) == 0
    assert not any(is_shut(client) for client, _ in pairs)
