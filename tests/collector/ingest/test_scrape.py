"""Scraping real sockets: good servers, every kind of bad one, who is asked, and what is said of them in the log."""

import asyncio
import contextlib
import gzip
import itertools
import logging
import shutil
import socket
import ssl
import threading
import time
from unittest.mock import Mock

import pytest

from collector.config import Config, ConfigError, scraping
from collector.decode.pages import PageProblem
from collector.ingest.scrape import Scraper, ScrapeTarget, TargetList, read_page
from collector.runtime import Clock, http, running
from collector.runtime.http import HttpClient
from collector.telemetry import PullOutcome
from tests.support.clocks import eventually
from tests.support.page_server import PageServer, recorded_pages
from tests.support.processes import free_port
from tests.support.sidecars import get, post, running_sidecar
from tests.support.step_exports import make_export
from tests.wire.certificates import Authority

PAGE = recorded_pages()[-1][1]
HEAD = b"HTTP/1.1 200 OK\r\n"


def config_of(*urls, **other):
    return Config(scrape=urls, **{"scrape_interval_s": 0.1, **other})


def outcomes(config, wanted):
    """Scrape until ``wanted`` outcomes have come; the outcomes and the pages."""
    seen, pages = [], []
    scraper = Scraper(config, Clock(), lambda of, one: of == "counters" and seen.append(one), timeout_s=60.0)
    with running(scraper):
        eventually(lambda: pages.extend(scraper.take()) or len(seen) >= wanted)
    return list(seen), pages + scraper.take()


def scraped(url, timeout_s=60.0):
    """What comes of asking a server once."""

    async def ask():
        client = HttpClient(timeout_s)
        page = await read_page(client, Clock(), ScrapeTarget(url), "")
        await client.close()
        return page.outcome if isinstance(page, PageProblem) else PullOutcome.READ

    return asyncio.run(ask())


@contextlib.contextmanager
def listening(answer):
    """``answer(connection)`` for whoever connects, one after the other; the address of the page."""

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
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


def test_a_page_is_taken_again_and_again_over_one_connection():
    with PageServer(lambda *_: (200, {}, PAGE)) as server:
        seen, pages = outcomes(config_of(server.url), 5)
        assert set(seen) == {PullOutcome.READ}
        assert len(pages) >= 5
        assert pages[0].instance == f"http://127.0.0.1:{server.port}"
        assert pages[0].engines[0].model == "tiny"
        assert all(before.mono_ns < after.mono_ns for before, after in itertools.pairwise(pages))


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), PullOutcome.REFUSED),
        ((503, {}, b""), PullOutcome.REFUSED),
        ((401, {}, b""), PullOutcome.UNAUTHENTICATED),
        ((200, {}, b"<html>hello</html>\n"), PullOutcome.UNEXPECTED),
        ((200, {"Content-Encoding": "gzip"}, gzip.compress(PAGE)), PullOutcome.UNEXPECTED),  # packed unasked
        ((200, {"Content-Length": str(500 * 2**20)}, b"x"), PullOutcome.TOO_LARGE),
        ((200, {}, PAGE.replace(b"num_requests_running", b"now_running")), PullOutcome.MISSING_FAMILIES),
        ((200, {}, PAGE[:-3]), PullOutcome.UNEXPECTED),
    ],
)
def test_a_bad_server_is_counted_by_reason_and_gives_no_page(answer, outcome):
    with PageServer(lambda *_: answer) as server:
        assert scraped(server.url) is outcome


def test_what_speaks_no_http_is_unexpected_and_nobody_there_unreachable():
    with listening(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")) as url:
        assert scraped(url) is PullOutcome.UNEXPECTED
    assert scraped(f"http://127.0.0.1:{free_port()}/metrics") is PullOutcome.UNREACHABLE


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b""),
        (HEAD + b"X-Long: ", b"x"),
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

    with listening(drip) as url:
        assert scraped(url, timeout_s=0.3) is PullOutcome.UNREACHABLE


def test_a_page_without_an_end_is_left_at_its_bound():
    """Nothing is announced: what comes is counted."""
    sent = []

    def send(connection):
        connection.recv(1000)
        connection.sendall(HEAD + b"\r\n")
        while len(sent) < 500:
            connection.sendall(b"x" * 2**20)
            sent.append(1)

    with listening(send) as url:
        assert scraped(url) is PullOutcome.TOO_LARGE
    assert len(sent) < 32


def test_little_of_an_answer_is_parsed_at_once_lest_a_flood_of_small_pieces_holds_the_loop():
    with http.open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("", 0))) as opened:
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * http.RECEIVE_BYTES


def test_a_server_that_hangs_does_not_keep_the_others_waiting():
    with PageServer(lambda *_: (200, {}, None)) as hanging, PageServer(lambda *_: (200, {}, PAGE)) as good:
        seen, pages = outcomes(config_of(hanging.url, good.url), 8)
        assert set(seen) == {PullOutcome.READ}
        assert {page.instance for page in pages} == {f"http://127.0.0.1:{good.port}"}


def test_a_token_is_sent_with_every_question(tmp_path):
    token = tmp_path / "token"
    token.write_text("first\n")
    with PageServer(lambda *_: (200, {}, PAGE)) as server:
        outcomes(config_of(server.url, scrape_token_file=str(token)), 1)
        assert server.asked[0][1]["Authorization"] == "Bearer first"
    with pytest.raises(ConfigError, match="token_file"):
        Scraper(config_of("http://h/metrics", scrape_token_file=str(tmp_path / "none")), Clock())


def test_tls_needs_a_certificate_that_is_trusted_and_authorities_are_read_only_where_somebody_is_asked(tmp_path):
    """Those of the system are 2 MB, resident."""
    authority = Authority(tmp_path, shutil.which("openssl"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.pair("server"))
    with PageServer(lambda *_: (200, {}, PAGE), context=context) as server:
        url = f"https://127.0.0.1:{server.port}/metrics"
        assert outcomes(config_of(url), 1)[0][0] is PullOutcome.UNREACHABLE
        assert outcomes(config_of(url, ca_file=str(authority.ca)), 1)[0][0] is PullOutcome.READ
    assert Scraper(Config(), Clock()).tls is None
    with pytest.raises(ConfigError, match="ca_file"):
        Scraper(Config(ca_file=str(tmp_path / "none")), Clock())


def test_old_pages_go_when_nobody_takes_them(monkeypatch):
    monkeypatch.setattr("collector.ingest.scrape.QUEUE_PAGES", 2)
    with PageServer(lambda *_: (200, {}, PAGE)) as server:
        seen = []
        scraper = Scraper(config_of(server.url), Clock(), lambda _, outcome: seen.append(outcome))
        with running(scraper):
            eventually(lambda: PullOutcome.DROPPED in seen)
        assert len(scraper.take()) == 2


# --- who is asked -----------------------------------------------------------------------------------------------------


def test_every_address_behind_a_name_is_a_server_of_its_own():
    config = Config(scrape=("dns+http://vllm.ns.svc:8000/metrics",))
    resolve = Mock(side_effect=[["10.0.0.1", "10.0.0.2"], OSError("no such name"), ["10.0.0.2"]])
    targets = TargetList(config, resolve)
    both = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    for expected in (both, both, both[1:]):  # what it gave before stays
        assert [target.server for target in targets.find_targets()] == expected


def test_a_fault_of_ours_ends_no_asking_and_a_server_that_is_gone_is_asked_no_more(monkeypatch):
    monkeypatch.setattr("collector.ingest.scrape.REFRESH_S", 0.05)
    monkeypatch.setattr("collector.ingest.scrape.BACKOFF_MAX_S", 0.05)
    monkeypatch.setattr("collector.ingest.scrape.parse_page", lambda _: 1 // 0)
    with PageServer(lambda *_: (200, {}, PAGE)) as server:
        targets = [ScrapeTarget(server.url)]
        monkeypatch.setattr(TargetList, "find_targets", lambda _: targets.copy())
        scraper = Scraper(config_of(server.url), Clock())
        with running(scraper):
            eventually(lambda: [path for path, _ in server.asked].count("/metrics") > 2)
            targets.clear()
            eventually(lambda: not scraper.servers)
            asked = len(server.asked)
            time.sleep(0.3)
    assert len(server.asked) <= asked + 1


def test_the_number_of_servers_is_bounded(monkeypatch):
    monkeypatch.setattr("collector.ingest.scrape.SERVERS_MAX", 7)
    assert len(TargetList(Config(scrape=tuple(f"http://h{n}/metrics" for n in range(20)))).find_targets()) == 7


@pytest.mark.parametrize(
    "url",
    [
        "http://h:99999/metrics",
        "h:port",
        "http://[::1",
        "http://[:::::1]",
        ":8000",
        "",
        "ftp://h",
        "http://u:hunter2@h",
    ],
)
def test_what_is_no_address_is_said_at_the_start_and_never_with_its_password(url):
    with pytest.raises(ConfigError, match="--scrape") as raised:
        scraping(Config(), [url])
    assert "hunter2" not in str(raised.value)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_a_server_is_named_once_when_its_page_is_read_or_is_not_and_with_what_it_lacks(caplog):
    caplog.set_level(logging.INFO)
    lacking = PAGE.replace(b"num_requests_running", b"now_running")
    answers = itertools.chain([PAGE, PAGE, lacking, lacking], itertools.repeat(PAGE))
    with PageServer(lambda path, *_: (200, {}, next(answers) if path == "/metrics" else b"")) as server:
        outcomes(config_of(server.url), 5)
    name = f"http://127.0.0.1:{server.port}"
    lacks = f"no page of {name} (missing_families: vllm:num_requests_running)"
    assert caplog.messages == [f"page read of {name}", lacks, f"page read of {name}"]


def test_where_no_name_server_answers_pages_and_packed_exports_are_taken_all_the_same(tmp_path, monkeypatch):
    answered, begun, look_up = threading.Event(), [], socket.getaddrinfo

    def unanswered(host, *rest, **more):
        if str(host).endswith(".example"):
            begun.append(host)
            answered.wait(100)
        return look_up("127.0.0.1" if str(host).endswith(".example") else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", unanswered)
    names = [f"http://vllm-{number}.example:1" for number in range(40)]
    with (
        PageServer(lambda *_: (200, {}, PAGE)) as known,
        running_sidecar(
            tmp_path, SCRAPE=f"{[*names, f'http://localhost:{known.port}']}", SCRAPE_INTERVAL_S="0.3"
        ) as sidecar,
    ):
        try:
            eventually(lambda: begun)
            eventually(lambda: known.asked)
            assert b'"ok":true' in get(sidecar.http_port, "/healthz")
            packed = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
            assert post(sidecar.otlp_http_port, gzip.compress(make_export().SerializeToString()), packed)[0] == 200
        finally:
            answered.set()
