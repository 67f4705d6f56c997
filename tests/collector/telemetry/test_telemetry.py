"""Our own metrics: one table, label sets complete from the start, sums that hold."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from collector import __version__
from collector.ingest.status import answer
from collector.telemetry import Counts
from collector.telemetry.metrics import Metrics
from collector.telemetry.reasons import Outcome, RowDrop, Skip
from collector.telemetry.table import (
    ACCEPTED,
    DECODED_EVENTS,
    DROPPED_ROWS,
    KV_UNBOUND,
    OPEN,
    ROWS,
    SIZE_BYTES,
    SPANS,
    TABLE,
    Kind,
)
from online.rows import RowOutcome, Target


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


def test_every_metric_of_the_table_is_on_the_page_from_the_start(metrics):
    page = generate_latest(metrics.registry).decode()
    for metric in TABLE:
        named = "# HELP " * any(values is OPEN for _, values in metric.labels) + metric.exposed_name
        assert f"\n{named}" in page, metric.name
        assert metric.help.endswith("."), metric.name
    for outcome in dict(SPANS.labels)["outcome"]:
        assert f'tracefit_receiver_spans_total{{outcome="{outcome}",transport="grpc"}} 0.0' in page
    assert f'tracefit_build_info{{version="{__version__}"}} 1.0' in page


def test_no_two_metrics_share_a_name():
    assert max(Counter(metric.name for metric in TABLE).values()) == 1


def test_a_name_ends_in_its_unit_or_counts_things():
    for metric in TABLE:
        if metric.kind is not Kind.COUNTER and metric.unit in {"bytes", "seconds"}:
            assert metric.name.endswith(f"_{metric.unit}"), metric.name


def test_every_refusal_has_a_status_that_the_client_sees():
    for refusal in set(Outcome) - {Outcome.ACCEPTED}:
        assert answer(refusal).text
        assert answer(refusal).status >= 400
        assert not answer(refusal).trailers
        assert answer(refusal, 1.0).trailers


def test_counts_of_the_pipeline_arrive_by_reason(metrics):
    counts = Counts()
    counts[DECODED_EVENTS, ACCEPTED] += 7
    counts[DECODED_EVENTS, Skip.INVALID] += 2
    counts[ROWS, Target.STEP_TIME, RowOutcome.LEARNED] += 3
    counts[DROPPED_ROWS, RowDrop.IDLE] += 1
    counts[KV_UNBOUND] = 5
    metrics.merge(counts)
    metrics.merge(counts)
    assert metrics.value(DECODED_EVENTS, "accepted") == 14
    assert metrics.value(DECODED_EVENTS, "invalid") == 4
    assert metrics.value(ROWS, "step_time", "learned") == 6
    assert metrics.value(DROPPED_ROWS, "idle") == 2
    assert metrics.value(KV_UNBOUND) == 5, "a gauge stands at what it was last"


def test_a_gauge_may_read_its_value_at_every_scrape(metrics):
    size = [3]
    metrics.follow(SIZE_BYTES, lambda: size[0], "queue")
    assert metrics.value(SIZE_BYTES, "queue") == 3
    size[0] = 4
    assert metrics.value(SIZE_BYTES, "queue") == 4


def test_a_label_value_outside_its_closed_set_is_an_error_not_a_series(metrics):
    with pytest.raises(KeyError):
        metrics.add(SPANS, 1, "pigeon", ACCEPTED)
    with pytest.raises(KeyError):
        metrics.set(SPANS, 1, "grpc", Outcome.QUEUE_FULL)
