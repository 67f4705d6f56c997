"""The /metrics page: negotiated, and rendered once per generation.

Two parts with two lifetimes. The snapshot's families change with the generation: rendered once per format and kept. Our
own counters change between scrapes: rendered every time. The page is their concatenation, snapshot first, because then
the OpenMetrics end mark stands in the fresh part.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from exporters.client_view import PerGeneration
from exporters.prometheus.advisory import Advisory
from exporters.prometheus.families import DEFAULT_MAX_SERIES
from exporters.prometheus.snapshot_families import ExemplarOf, snapshot_families
from online import Snapshot

_OPENMETRICS = "application/openmetrics-text; version=1.0.0"
_PLAIN = "text/plain; version=0.0.4"
_EOF = b"# EOF\n"
_GZIP_LEVEL = 6


class Page(NamedTuple):
    """A rendered page; ``content_encoding`` is empty for identity."""

    content_type: str
    content_encoding: str
    body: bytes


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Known(Collector):
    """What somebody's metrics say now: a gauge that has nothing to compare has no series, rather than NaN."""

    def __init__(self, own: Collector) -> None:
        self._own = own

    def collect(self) -> Iterable[Metric]:
        for family in self._own.collect():
            family.samples = [sample for sample in family.samples if not math.isnan(sample.value)]
            yield family


class MetricsPage:
    """Renders /metrics from our own registry and the newest snapshot.

    Args:
        own: registry (or any collector) with the process's own metrics; asked at every scrape.
        source: returns the newest snapshot, or None before the first.
        max_series: capacity of the page for series of the snapshot.
        exemplar_of: (config_id, target) -> trace id of the observation that confirmed the newest drift.
        advisory: what the coefficients say of the load of the last minutes.
    """

    def __init__(
        self,
        own: Collector,
        source: Callable[[], Snapshot | None],
        *,
        max_series: int = DEFAULT_MAX_SERIES,
        exemplar_of: ExemplarOf | None = None,
        advisory: Advisory | None = None,
    ) -> None:
        self._own = _Known(own)
        self._source = source
        self._max_series = max_series
        self._exemplar_of = exemplar_of
        self._advice_of = None if advisory is None else advisory.samples
        self._parts = PerGeneration[str, bytes]()

    def render(self, accept: str = "", accept_encoding: str = "") -> Page:
        """Render the page for one scrape.

        Args:
            accept: the request's Accept header; anything but OpenMetrics gets the 0.0.4 text.
            accept_encoding: the request's Accept-Encoding header.

        Returns:
            Content type, content encoding and body.
        """
        wanted = _OPENMETRICS if wants_openmetrics(accept) else _PLAIN
        encode, content_type = choose_encoder(wanted)
        kept = self._parts.get(self._source, wanted, partial(self._render_kept, wanted))
        fresh = encode(self._own)
        if wanted == _OPENMETRICS and not fresh.endswith(_EOF):
            fresh += _EOF
        if accepts_gzip(accept_encoding):
            return Page(content_type, "gzip", gzip.compress(kept + fresh, _GZIP_LEVEL, mtime=0))
        return Page(content_type, "", kept + fresh)

    def _render_kept(self, wanted: str, snapshot: Snapshot | None) -> bytes:
        """The part of the page that stays the same for a generation."""
        families: Iterable[Metric] = ()
        if snapshot is not None:
            families = snapshot_families(snapshot, self._max_series, self._exemplar_of, self._advice_of)
        return choose_encoder(wanted)[0](_Families(families)).removesuffix(_EOF)


def wants_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics is what the client likes best of the two formats we speak.

    Args:
        accept: an Accept header. Only ``version=1.0.0`` or no version counts as OpenMetrics.
    """
    best = {"openmetrics": 0.0, "text": 0.0}
    for media, parameters in _header_items(accept):
        if media == "application/openmetrics-text" and parameters.get("version", "1.0.0") == "1.0.0":
            best["openmetrics"] = max(best["openmetrics"], _quality(parameters))
        elif media in {"text/plain", "text/*", "*/*"}:
            best["text"] = max(best["text"], _quality(parameters))
    return best["openmetrics"] > 0 and best["openmetrics"] >= best["text"]


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header allows gzip; ``gzip;q=0`` refuses it."""
    named = {coding: _quality(parameters) for coding, parameters in _header_items(accept_encoding)}
    return named.get("gzip", named.get("*", 0.0)) > 0


def _header_items(header: str) -> Iterable[tuple[str, dict[str, str]]]:
    for item in header.lower().split(",")[:32]:
        head, *parameters = (part.strip() for part in item.split(";"))
        pairs = (part.partition("=") for part in parameters)
        yield head, {key.strip(): value.strip().strip('"') for key, _, value in pairs}


def _quality(parameters: dict[str, str]) -> float:
    try:
        return float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
