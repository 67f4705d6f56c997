"""The page: formats, encodings, and what is rendered how often."""

from __future__ import annotations

import gzip
import math

import pytest
from prometheus_client import CollectorRegistry, Gauge

from exporters.metrics_page import MetricsPage, accepts_gzip, wants_openmetrics
from tests.support import exporter_cases as cases

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=1.0.0;q=0.1,text/plain", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=none", False),
        ("text/html,*/*;q=0.8", False),
        ("", False),
    ],
)
def test_the_format_the_client_likes_best_is_chosen(accept, expected):
    assert wants_openmetrics(accept) is expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [("gzip", True), ("gzip;q=0", False), ("deflate, GZIP;q=0.5", True), ("*", True), ("*;q=0", False), ("br", False)],
)
def test_gzip_is_used_where_it_is_accepted(header, expected):
    assert accepts_gzip(header) is expected


@pytest.mark.parametrize("accept", ["", PROMETHEUS_2])
@pytest.mark.parametrize("source", [cases.snapshot, lambda: None])
def test_the_compressed_page_is_one_gzip_member_with_the_bytes_of_the_plain_one(accept, source):
    shown = source()
    page = MetricsPage(CollectorRegistry(), lambda: shown)
    plain, compressed = page.render(accept), page.render(accept, "gzip")
    assert gzip.decompress(compressed.body) == plain.body
    assert compressed.body.count(b"\x1f\x8b\x08") == 1
    assert (plain.content_encoding, compressed.content_encoding) == ("", "gzip")


def test_a_gauge_with_nothing_to_compare_has_no_series_until_it_has():
    registry = CollectorRegistry()
    gauge = Gauge("share", "Of two.", registry=registry)
    page = MetricsPage(registry, lambda: None)
    gauge.set(math.nan)
    assert page.render().body == b"# HELP share Of two.\n# TYPE share gauge\n"
    gauge.set(0.5)
    assert page.render().body.endswith(b"share 0.5\n")
