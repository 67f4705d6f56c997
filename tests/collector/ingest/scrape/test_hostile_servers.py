"""Servers that drip, close, or are called what no server is called, and what is said of them in the log."""

import asyncio
import contextlib
import gzip
import itertools
import logging
import shutil
import socket
import ssl
import threading

import pytest

from collector.config import Config, ConfigError, scraping
from collector.ingest.scrape import (
    EVERY_S,
    SERVERS_SHOWN,
    Cadence,
    OutcomeLog,
    ScrapedServer,
    Scraper,
    ScrapeTarget,
    TargetList,
    read_targets,
)
from collector.runtime import SystemClock
from collector.runtime.http import HttpClient
from collector.telemetry import Asked
from tests.support.clocks import eventually
from tests.support.page_server import PageServer, recorded_pages
from tests.wire.certificates import Authority

PAGE = recorded_pages()[-1][1]
HEAD = b"HTTP/1.1 200 OK\r\n"


def scraped(url, *, times=1, timeout_s=60.0, address="", token="", tls=None):
    """What comes of asking one server so often, over one client."""

    async def ask():
        client = HttpClient(timeout_s, tls)
        server = ScrapedServer(ScrapeTarget(url, address), client, Cadence(1.0, 1.0), SystemClock())
        outcomes = [(await server.scrape(token))[0] for _ in range(times)]
        await client.close()
        return outcomes

    return asyncio.run(ask())


@contextlib.contextmanager
def listening(answer):
    """``answer(connection)`` for whoever connects, one after the other; the port."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    answer(connection)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP", b""),
        (HEAD + b"X-Long: ", b"x"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (HEAD + b"\r\n", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_whatever_part_of_an_answer_a_server_drips_it_is_left_when_its_time_is_over(head, piece):
    def drip(connection):
        connection.recv(4096)
        connection.sendall(head)
        while piece or connection.recv(1):  # one that says no more stays until the client has left
            connection.sendall(piece)
            threading.Event().wait(0.01)

    with listening(drip) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        assert scraped(url, timeout_s=0.3) == [Asked.UNREACHABLE]


def test_a_server_that_closes_after_each_answer_is_dialled_again_in_the_same_way(tmp_path):
    """The address behind the name, and never in the clear: a token goes with every question."""
    authority = Authority(tmp_path, shutil.which("openssl"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.pair("server"))
    first_bytes = []

    def answer(connection):
        first_bytes.append(connection.recv(1, socket.MSG_PEEK))
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(4096)
            secured.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(PAGE) + PAGE)

    tls = ssl.create_default_context(cafile=str(authority.ca))
    tls.check_hostname = False  # the certificate is of an address
    with listening(answer) as port:
        url = f"https://name.invalid:{port}/metrics"
        outcomes = scraped(url, times=3, address="127.0.0.1", token="secret", tls=tls)
    assert outcomes == [Asked.TAKEN] * 3
    assert set(first_bytes) == {b"\x16"}  # a TLS handshake


def test_a_page_that_was_packed_unasked_is_no_page():
    packed = gzip.compress(PAGE)
    with PageServer(lambda *_: (200, {"Content-Encoding": "gzip"}, packed)) as server:
        assert scraped(server.url) == [Asked.UNEXPECTED]


@pytest.mark.parametrize(
    "url",
    [
        "http://h:99999/metrics",
        "h:port",
        "http://[::1",
        "http://[:::::1]",
        ":8000",
        "",
        "http://a b",
        "http://u:hunter2@h",
    ],
)
def test_what_is_no_address_is_said_at_the_start_and_never_with_its_password(url):
    with pytest.raises(ConfigError) as raised:
        scraping(Config(), [url])
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        '[{"targets": ["h:99999"]}]',
        '[{"targets": ["h:1"], "labels": ["x"]}]',
        '[{"targets": [["h:1"]]}]',
        '[{"targets": [null]}]',
        '[{"targets": ["h:1"], "labels": {"__metrics_path__": null}}]',
        '[{"targets": ["user:hunter2@h:1"]}]',
    ],
)
def test_a_bad_file_of_targets_takes_none_of_the_other_servers_away(tmp_path, caplog, content):
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    with pytest.raises(ValueError, match=r"target|label"):
        read_targets(bad)
    with PageServer(lambda *_: (200, {}, PAGE)) as server:
        scraper = Scraper(Config(scrape=(server.url, str(bad))), SystemClock(), timeout_s=60.0)
        scraper.start()
        eventually(scraper.take)
        scraper.stop()
    assert str(bad) in caplog.text
    assert "hunter2" not in caplog.text


def test_all_sources_that_give_nothing_are_named_in_one_line_without_what_they_are_asked_with(tmp_path, caplog):
    def resolve(*_):
        raise OSError("no such name")

    files = tuple(str(tmp_path / name) for name in ("a.json", "b.json"))
    assert TargetList(Config(scrape=("dns+http://pods:8000/m?token=hunter2", *files)), resolve).look() == []
    (line,) = caplog.messages
    assert all(name in line for name in ("http://pods:8000/m: no such name", *files))
    assert "hunter2" not in line


def test_every_server_whose_page_is_not_read_is_named_with_what_it_lacks(caplog):
    caplog.set_level(logging.INFO)
    log, now_ns = OutcomeLog(), itertools.count(0, int(EVERY_S * 1e9))
    first_ns = next(now_ns)
    log.note("http://a", "taken", first_ns)
    log.note("http://b", "missing_families: vllm:num_requests_running", first_ns)
    log.note("http://c", "timeout", first_ns)
    log.note("http://a", "", first_ns)
    assert caplog.messages == ["page read of http://a"]
    log.note("http://a", "", next(now_ns))
    lacking = "http://b (missing_families: vllm:num_requests_running)"
    assert caplog.messages[1:] == [f"no page of {lacking}, http://c (timeout)"]
    many_ns = next(now_ns)
    for server in range(SERVERS_SHOWN + 3):
        log.note(f"http://{server}", "timeout", many_ns - 1)
    log.note("http://a", "", many_ns)
    assert caplog.messages[2].endswith("http://9 (timeout) and 3 more")
