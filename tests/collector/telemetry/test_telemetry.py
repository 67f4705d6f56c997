"""Our own metrics: one table, label sets complete from the start, sums that hold."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from collector import __version__
from collector.ingest.status import answer
from collector.telemetry import Counts
from collector.telemetry.metrics import Metrics
from collector.telemetry.reasons import REFUSALS, Outcome, RowDrop, Skip
from collector.telemetry.table import (
    ACCEPTED_SPANS,
    DECODED_EVENTS,
    DROPPED_ROWS,
    KV_HELD,
    OPEN,
    QUEUE_BYTES,
    REFUSED_SPANS,
    ROWS,
    SKIPPED_EVENTS,
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
    for reason in REFUSALS:
        assert f'tracefit_receiver_refused_spans_total{{reason="{reason}",transport="grpc"}} 0.0' in page
    assert f'tracefit_build_info{{version="{__version__}"}} 1.0' in page


def test_no_two_metrics_share_a_name():
    assert max(Counter(metric.name for metric in TABLE).values()) == 1


def test_a_name_ends_in_its_unit_or_counts_things():
    for metric in TABLE:
        if metric.kind is not Kind.COUNTER and metric.unit in {"bytes", "seconds"}:
            assert metric.name.endswith(f"_{metric.unit}"), metric.name


def test_every_refusal_has_a_status_that_the_client_sees():
    for refusal in REFUSALS:
        assert answer(refusal).text
        assert answer(refusal).status >= 400
        assert not answer(refusal).trailers
        assert answer(refusal, 1.0).trailers


def test_counts_of_the_pipeline_arrive_by_reason(metrics):
    counts = Counts()
    counts[DECODED_EVENTS] += 7
    counts[SKIPPED_EVENTS, Skip.WRONG_TYPE] += 2
    counts[ROWS, Target.STEP_TIME, RowOutcome.LEARNED] += 3
    counts[DROPPED_ROWS, RowDrop.IDLE] += 1
    counts[KV_HELD] = 5
    metrics.merge(counts)
    metrics.merge(counts)
    assert metrics.value(DECODED_EVENTS) == 14
    assert metrics.value(SKIPPED_EVENTS, "wrong_type") == 4
    assert metrics.value(ROWS, "step_time", "learned") == 6
    assert metrics.value(DROPPED_ROWS, "idle") == 2
    assert metrics.value(KV_HELD) == 5, "a gauge stands at what it was last"


def test_a_gauge_may_read_its_value_at_every_scrape(metrics):
    size = [3]
    metrics.follow(QUEUE_BYTES, lambda: size[0])
    assert metrics.value(QUEUE_BYTES) == 3
    size[0] = 4
    assert metrics.value(QUEUE_BYTES) == 4


def test_a_label_value_outside_its_closed_set_is_an_error_not_a_series(metrics):
    with pytest.raises(KeyError):
        metrics.add(ACCEPTED_SPANS, 1, "pigeon")
    with pytest.raises(KeyError):
        metrics.set(REFUSED_SPANS, 1, "grpc", Outcome.QUEUE_FULL)
