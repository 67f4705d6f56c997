"""Scraping real sockets: good servers, and every kind of bad one."""

import contextlib
import itertools
import json
import shutil
import socket
import ssl
import threading

import pytest

from collector.config import Config, ConfigError, scraping
from collector.ingest.scrape import Scraper, ScrapeTarget, TargetList, read_targets
from collector.runtime import SystemClock
from collector.telemetry import Asked
from tests.support.clocks import eventually
from tests.support.page_server import PageServer, recorded_pages
from tests.wire.certificates import Authority

PAGE = recorded_pages()[-1][1]


def config_of(*urls, **other):
    return Config(scrape=urls, **{"scrape_interval_s": 0.1, **other})


def outcomes(config, wanted, timeout_s=60.0):
    """Scrape until ``wanted`` outcomes have come; the outcomes and the pages."""
    seen, pages = [], []
    scraper = Scraper(config, SystemClock(), seen.append, timeout_s=timeout_s)
    scraper.start()
    eventually(lambda: pages.extend(scraper.take()) or len(seen) >= wanted)
    scraper.stop()
    return list(seen), pages + scraper.take()


def test_a_page_is_taken_again_and_again_over_one_connection():
    with PageServer(lambda *_: (200, {}, PAGE)) as server:
        seen, pages = outcomes(config_of(server.url), 5)
        assert set(seen) == {Asked.TAKEN}
        assert len(pages) >= 5
        assert pages[0].instance == f"http://127.0.0.1:{server.port}"
        assert pages[0].engines[0].model == "tiny"
        assert all(before.mono_ns < after.mono_ns for before, after in itertools.pairwise(pages))


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), Asked.REFUSED),
        ((503, {}, b""), Asked.REFUSED),
        ((401, {}, b""), Asked.UNAUTHENTICATED),
        ((200, {}, b"<html>hello</html>\n"), Asked.UNEXPECTED),
        ((200, {"Content-Length": str(500 * 2**20)}, b"x"), Asked.TOO_LARGE),
        ((200, {}, PAGE.replace(b"num_requests_running", b"now_running")), Asked.MISSING_FAMILIES),
        ((200, {}, PAGE[:-3]), Asked.UNEXPECTED),
        ((200, {}, None), Asked.UNREACHABLE),
    ],
)
def test_a_bad_server_is_counted_by_reason_and_gives_no_page(answer, outcome):
    patience = {"timeout_s": 0.5} if outcome is Asked.UNREACHABLE else {}
    with PageServer(lambda *_: answer) as server:
        seen, pages = outcomes(config_of(server.url), 1, **patience)
        assert seen[0] is outcome
        assert pages == []


def test_nobody_there_and_no_http():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        seen, _ = outcomes(config_of(f"http://127.0.0.1:{free.getsockname()[1]}/metrics"), 1)
    assert seen[0] is Asked.UNREACHABLE


def test_a_page_without_an_end_is_left_at_its_bound():
    """Nothing is announced: what comes is counted."""
    sent = []

    def send(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
            while len(sent) < 500:
                connection.sendall(b"x" * 2**20)
                sent.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=send, args=(listener,), daemon=True)
        thread.start()
        seen, pages = outcomes(config_of(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"), 1)
        thread.join(60)
    assert (seen[0], pages) == (Asked.TOO_LARGE, [])
    assert len(sent) < 32


def test_a_server_that_hangs_does_not_keep_the_others_waiting():
    with PageServer(lambda *_: (200, {}, None)) as hanging, PageServer(lambda *_: (200, {}, PAGE)) as good:
        seen, pages = outcomes(config_of(hanging.url, good.url), 8)
        assert set(seen) == {Asked.TAKEN}
        assert {page.instance for page in pages} == {f"http://127.0.0.1:{good.port}"}


def test_a_server_that_scales_to_zero_and_back_is_found_again():
    down = []

    def answer(*_):
        return (503, {}, b"") if down else (200, {}, PAGE)

    with PageServer(answer) as server:
        seen = []
        scraper = Scraper(config_of(server.url), SystemClock(), seen.append)
        scraper.start()
        eventually(lambda: Asked.TAKEN in seen)
        down.append(1)
        eventually(lambda: Asked.REFUSED in seen)
        scraper.take()
        down.clear()
        eventually(scraper.take)
        scraper.stop()


def test_a_token_is_sent_and_read_again(tmp_path):
    token = tmp_path / "token"
    token.write_text("first\n")
    with PageServer(lambda *_: (200, {}, PAGE)) as server:
        outcomes(config_of(server.url, scrape_token_file=str(token)), 2)
        assert server.asked[0][1]["Authorization"] == "Bearer first"
    with pytest.raises(ConfigError, match="token_file"):
        Scraper(config_of("http://h/metrics", scrape_token_file=str(tmp_path / "none")), SystemClock())


def test_tls_needs_a_certificate_that_is_trusted(tmp_path):
    authority = Authority(tmp_path, shutil.which("openssl"))
    certificate, key = authority.pair("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with PageServer(lambda *_: (200, {}, PAGE), context=context) as server:
        url = f"https://127.0.0.1:{server.port}/metrics"
        assert outcomes(config_of(url), 1)[0][0] is Asked.UNREACHABLE
        assert outcomes(config_of(url, ca_file=str(authority.ca)), 1)[0][0] is Asked.TAKEN


def test_authorities_are_read_only_where_somebody_is_asked(tmp_path):
    """Those of the system are 2 MB, resident."""
    assert Scraper(Config(), SystemClock()).tls is None
    assert Scraper(config_of("https://h/metrics"), SystemClock()).tls is not None
    with pytest.raises(ConfigError, match="ca_file"):
        Scraper(Config(ca_file=str(tmp_path / "none")), SystemClock())


# --- who is asked -----------------------------------------------------------------------------------------------------


def test_every_address_behind_a_name_is_a_server_of_its_own():
    config = Config(scrape=("dns+http://vllm.ns.svc:8000/metrics",))
    answers = [["10.0.0.1", "10.0.0.2"], OSError("no such name"), ["10.0.0.2"]]

    def resolve(_host, _port):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    targets = TargetList(config, resolve)
    assert [target.server for target in targets.look()] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert len(targets.look()) == 2  # what it gave before stays
    assert [target.server for target in targets.look()] == ["http://10.0.0.2:8000"]
    assert not targets.static


def test_a_file_of_targets_is_read_as_prometheus_reads_it(tmp_path):
    path = tmp_path / "targets.json"
    labels = {"__scheme__": "https", "__metrics_path__": "/m"}
    path.write_text(json.dumps([{"targets": ["a:1", "b:2"]}, {"targets": ["c:3"], "labels": labels}]))
    assert [t.url for t in read_targets(path)] == ["http://a:1/metrics", "http://b:2/metrics", "https://c:3/m"]
    path.write_text("- targets: ['a:1']\n")
    assert [t.server for t in read_targets(path)] == ["http://a:1"]
    for bad in ("{", "7", "[{}]", '[{"targets": ["ftp://x"]}]', '[{"targets": ["a:notaport"]}]'):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"."):
            read_targets(path)


@pytest.mark.parametrize(
    ("url", "address", "base"),
    [
        ("http://h:8000/metrics", "", "http://h:8000"),
        ("https://h", "", "https://h"),
        ("http://vllm.svc:8000/metrics", "10.0.0.1", "http://10.0.0.1:8000"),
        ("http://vllm.svc:8000", "fd00::1", "http://[fd00::1]:8000"),
        ("https://vllm.svc:8000/metrics", "10.0.0.1", ""),
        ("http://proxy/pods/3/metrics", "", ""),
    ],
)
def test_a_server_is_asked_who_it_is_where_its_page_stands(url, address, base):
    assert ScrapeTarget(url, address).base_url == base


def test_the_number_of_servers_is_bounded(monkeypatch):
    monkeypatch.setattr("collector.ingest.scrape.SERVERS_MAX", 7)
    assert len(TargetList(Config(scrape=tuple(f"http://h{n}/metrics" for n in range(20)))).look()) == 7


def test_the_command_line_adds_to_the_file():
    config = scraping(Config(), ["http://h:8000/metrics", "other:9000"])
    assert [target.url for target in TargetList(config).look()] == ["http://h:8000/metrics", "http://other:9000"]
    with pytest.raises(ConfigError, match="--scrape"):
        scraping(Config(), ["ftp://h"])


# --- how often --------------------------------------------------------------------------------------------------------


def test_a_page_named_twice_is_asked_once():
    config = scraping(Config(), ["http://a:8000/metrics"])
    both = ("http://a:8000/metrics", "http://b/metrics")
    assert scraping(config, both).scrape == both


def test_old_pages_go_when_nobody_takes_them(monkeypatch):
    monkeypatch.setattr("collector.ingest.scrape.QUEUE_PAGES", 2)
    with PageServer(lambda *_: (200, {}, PAGE)) as server:
        seen = []
        scraper = Scraper(config_of(server.url), SystemClock(), seen.append)
        scraper.start()
        eventually(lambda: Asked.DROPPED in seen)
        scraper.stop()
        assert len(scraper.take()) == 2
