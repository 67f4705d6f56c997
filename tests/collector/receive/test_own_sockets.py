"""What the kernel says of our own sockets, without a connection made."""

import errno
import os
import socket
import sys

import pytest

from collector.receive.otlp import own_sockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="own_sockets reads /proc and TCP_INFO of Linux")


def listening(family=socket.AF_INET, backlog=8):
    server = socket.socket(family)
    server.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
    server.listen(backlog)
    return server


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listener_is_found_by_its_port_until_it_is_closed(family):
    with listening(family) as server:
        port = server.getsockname()[1]
        assert own_sockets.has_listener(port) is True
        with socket.create_connection(server.getsockname()[:2]) as client:
            assert own_sockets.has_listener(client.getsockname()[1]) is False, "a connection is no listener"
    assert own_sockets.has_listener(port) is False


def test_a_port_that_is_only_bound_or_of_another_protocol_has_no_listener():
    with socket.socket() as bound, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        for each in (bound, datagrams):
            each.bind(("127.0.0.1", 0))
            assert own_sockets.has_listener(each.getsockname()[1]) is False


def test_a_listener_whose_queue_is_full_takes_nobody():
    with listening(backlog=1) as server:
        clients = [socket.socket() for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        assert own_sockets.has_listener(server.getsockname()[1]) is False, "nobody accepts"
        for client in clients:
            client.close()


def test_to_ask_leaves_no_descriptor_open_and_makes_no_connection():
    with listening() as server:
        before = len(own_sockets.open_descriptors())
        for _ in range(5):
            own_sockets.has_listener(server.getsockname()[1])
        assert len(own_sockets.open_descriptors()) == before
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("tells", [True, False], ids=["from Linux 6.2 on", "before"])
def test_open_descriptors_are_counted_one_by_one(monkeypatch, tells):
    if not tells:
        monkeypatch.setattr(own_sockets.os, "stat", lambda _: os.stat_result([0] * 10))
    before = own_sockets.count_descriptors()
    with socket.socket(), socket.socket():
        assert own_sockets.count_descriptors() == before + 2


def test_without_proc_it_cannot_be_told(monkeypatch, tmp_path):
    monkeypatch.setattr(own_sockets, "_DESCRIPTORS", tmp_path / "nowhere")
    assert own_sockets.has_listener(1) is None
    assert own_sockets.count_descriptors() == 0


def test_a_kernel_that_says_nothing_of_listeners_does_not_say_that_nobody_listens(monkeypatch):
    """Else a sandbox that has /proc and forbids the question has its receiver restarted for ever."""
    with listening() as server:
        port = server.getsockname()[1]
        with monkeypatch.context() as patched:
            patched.delattr(socket, "TCP_INFO")
            assert own_sockets.has_listener(port) is None
        for code in (errno.ENOPROTOOPT, errno.EPERM):

            def refused(*_, code=code):
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patched:
                patched.setattr(own_sockets, "_listens", refused)
                assert own_sockets.has_listener(port) is None
        assert own_sockets.has_listener(port) is True


def test_a_descriptor_that_is_closed_meanwhile_is_no_reason_to_doubt(monkeypatch):
    listed = own_sockets.open_descriptors()
    monkeypatch.setattr(own_sockets, "open_descriptors", lambda: [*listed, "1000000"])
    with listening() as server:
        port = server.getsockname()[1]
    assert own_sockets.has_listener(port) is False
