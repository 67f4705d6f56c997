"""CPU of the pages at full size: 50 configurations with the default sets. ``make bench WHAT=exporters``.

Process CPU time, best of several runs, so that a busy machine changes little. The limits are the project's promises.
"""

from __future__ import annotations

import gzip
import http.client
import resource
import threading
import time
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, enable_created_metrics
from prometheus_client.process_collector import ProcessCollector

from exporters.client_view import ClientView
from exporters.pages import AskPages
from exporters.pages.routing import Request
from exporters.pages.snapshot_pages import SnapshotDocuments
from exporters.prometheus.advisory import Advisory
from exporters.prometheus.exposition import MetricsPage
from exporters.routes import make_routes
from exporters.status_page.status_page import StatusPage
from exporters.what_if import Mix
from tests.support import exporter_cases as cases
from tests.support.pages import page_server

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
OWN_SERIES = 150


@pytest.fixture(autouse=True)
def no_created_series():
    """As the process itself does: they would double the counters."""
    disable_created_metrics()
    yield
    enable_created_metrics()


def own_registry():
    """About as many series as the process has of its own."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for name in range(10):
        counter = Counter(f"tracefit_own_{name}", "Something counted.", ["reason"], registry=registry)
        for reason in range(OWN_SERIES // 10):
            counter.labels(f"reason_{reason}").inc(reason)
    return registry


def cpu_ms(work, repeat):
    """Least CPU of one call over ``repeat`` calls, ms."""
    best = float("inf")
    for _ in range(repeat):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best * 1e3


def report(name, measured, limit):
    print(f"{name}: {measured:.2f} ms CPU (limit {limit})")
    assert measured <= limit


def test_a_new_generation_costs_at_most_250_ms():
    snapshots = [cases.full_snapshot(50, generation=g) for g in range(4)]
    current = [snapshots[0]]
    page = MetricsPage(own_registry(), lambda: current[0])

    def render():
        current[0] = snapshots.pop()
        page.render(OPENMETRICS, "gzip")

    report("first scrape of a generation", cpu_ms(render, 4), 250)


def test_a_new_generation_with_advice_costs_at_most_250_ms():
    """Every configuration serves, and has three targets: 100 loads and 150 plans."""
    snapshots = [cases.full_snapshot(50, generation=g) for g in range(4)]
    current = [snapshots[0]]
    mix = Mix(400.0, 247.0, 0.25, 12.0, 41_000.0, 310_000.0)
    advisory = Advisory(ClientView(lambda: current[0]), lambda _: mix, (30.0, 50.0, 100.0))
    page = MetricsPage(own_registry(), lambda: current[0], advisory=advisory)

    def render():
        current[0] = snapshots.pop()
        page.render(OPENMETRICS, "gzip")

    report("first scrape of a generation with advice", cpu_ms(render, 4), 250)
    report("a further one", cpu_ms(lambda: page.render(OPENMETRICS, "gzip"), 50), 10)


@pytest.mark.parametrize(("encoding", "limit_ms"), [("", 2), ("gzip", 10)])
def test_a_further_scrape_costs_little_more_than_its_compression(encoding, limit_ms):
    shown = cases.full_snapshot(50)
    page = MetricsPage(own_registry(), lambda: shown)
    first = page.render(OPENMETRICS, encoding)
    report(f"further scrape {encoding or 'identity'}", cpu_ms(lambda: page.render(OPENMETRICS, encoding), 50), limit_ms)
    size = len(gzip.decompress(first.body) if encoding else first.body)
    print(f"page {size} bytes, sent {len(first.body)}")


def test_an_unchanged_snapshot_costs_at_most_1_ms_on_the_wire():
    shown = cases.full_snapshot(50)
    page = MetricsPage(own_registry(), lambda: shown)
    healthy = lambda: (True, {})  # noqa: E731 - a probe
    server = page_server(make_routes(page, SnapshotDocuments(lambda: shown), alive=healthy, ready=healthy))
    server.start()
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, 10)) as client:
        client.request("GET", "/snapshot")
        response = client.getresponse()
        response.read()
        headers = {"If-None-Match": response.getheader("ETag")}
        cpu_of_server = []
        for _ in range(200):
            mine = time.thread_time()
            both = time.process_time()
            client.request("GET", "/snapshot", headers=headers)
            answer = client.getresponse()
            assert (answer.status, answer.read()) == (304, b"")
            cpu_of_server.append(time.process_time() - both - (time.thread_time() - mine))
    server.stop()
    report("/snapshot 304", sorted(cpu_of_server)[100] * 1e3, 1)


def test_a_scraper_every_10_ms_leaves_memory_alone():
    shown = cases.full_snapshot(50)
    page = MetricsPage(own_registry(), lambda: shown)
    healthy = lambda: (True, {})  # noqa: E731 - a probe
    server = page_server(make_routes(page, SnapshotDocuments(lambda: shown), alive=healthy, ready=healthy))
    server.start()

    def scrape(times):
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, 10)) as client:
            for _ in range(times):
                client.request("GET", "/metrics", headers={"Accept": OPENMETRICS, "Accept-Encoding": "gzip"})
                assert client.getresponse().read()[:2] == b"\x1f\x8b"

    scrape(50)
    threads_before = threading.active_count()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scrape(300)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    assert threading.active_count() <= threads_before + 1
    server.stop()
    print(f"300 scrapes: peak memory +{grown_mib:.1f} MiB")
    assert grown_mib < 16


def test_the_status_page_of_50_configurations_costs_at_most_50_ms():
    shown = cases.full_snapshot(50)
    history = cases.learned_history(9000)
    page = StatusPage(
        lambda: shown, own_registry(), ready=lambda: (True, {}), unix_nano=lambda: 0, history_of=lambda _: history
    )
    route = make_routes(
        MetricsPage(CollectorRegistry(), lambda: shown),
        SnapshotDocuments(lambda: shown),
        alive=lambda: (True, {}),
        ready=lambda: (True, {}),
        status_page=page,
    )[0]
    report("status page", cpu_ms(lambda: route.handler(Request("/", (), {}, {})), 5), 50)


PREDICTIONS = {
    "step": {"requests": "20", "prefill": "512", "context": "30000"},
    "load": {"prompt": "2000", "output": "300", "concurrency": "20", "prefix_hit": "0.4"},
    "crowd": {"prompt": "2000", "output": "300", "concurrency": "1000000"},
}
PLANS = {
    "itl": {"prompt": "2000", "output": "300", "itl": "500ms"},
    "rate": {"prompt": "2000", "output": "300", "itl": "500ms", "ttft": "5s", "rate": "3", "safe": "true"},
    "to the end": {"prompt": "10", "output": "1000000000", "rate": "0.000001", "max_num_seqs": "999999"},
}


@pytest.mark.parametrize(("ask", "limit"), [("predict", 1), ("plan", 20)])
def test_a_question_costs_little_of_50_configurations(ask, limit):
    """As a simulator or router asks: again and again, and once with a configuration that nobody has asked for yet."""
    shown = cases.full_snapshot(50)
    for name, query in (PREDICTIONS if ask == "predict" else PLANS).items():
        pages = AskPages(ClientView(lambda: shown))
        answer = pages.answer_predict if ask == "predict" else pages.answer_plan
        fresh = iter(shown.configs)
        status = answer(Request("", (), {**query, "config": shown.configs[0].config_id}, {})).status
        assert status == 200, name

        def first(answer=answer, query=query, fresh=fresh):
            answer(Request("", (), {**query, "config": next(fresh).config_id}, {}))

        report(f"/{ask} {name}, first of a configuration", cpu_ms(first, 40), limit)
        again = Request("", (), {**query, "config": shown.configs[0].config_id}, {})
        report(f"/{ask} {name}, again", cpu_ms(lambda answer=answer, again=again: answer(again), 50), limit)
