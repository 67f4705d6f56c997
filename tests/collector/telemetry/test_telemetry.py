"""Our own metrics: one table, label sets complete from the start, sums that hold."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from collector import __version__
from collector.decode.records import Tally
from collector.telemetry.metrics import Metrics
from collector.telemetry.reasons import Malformed, Outcome, Refusal, RowDrop, Skip
from collector.telemetry.table import (
    ACCEPTED_SPANS,
    DECODED_EVENTS,
    DROPPED_ROWS,
    QUEUE_BYTES,
    REFUSED_SPANS,
    ROWS,
    SKIPPED_EVENTS,
    TABLE,
    Kind,
)
from collector.worker.pipeline import Counts
from online.rows import RowOutcome, Target


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


def test_every_metric_of_the_table_is_on_the_page_from_the_start(metrics):
    page = generate_latest(metrics.registry).decode()
    for metric in TABLE:
        suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
        assert f"\n{metric.exposed_name}{suffix}" in page, metric.name
        assert metric.help.endswith("."), metric.name
    for reason in Refusal:
        assert f'tracefit_receiver_refused_spans_total{{reason="{reason}",transport="grpc"}} 0.0' in page
    assert f'tracefit_build_info{{version="{__version__}"}} 1.0' in page


def test_no_two_metrics_share_a_name():
    assert max(Counter(metric.name for metric in TABLE).values()) == 1


def test_a_name_ends_in_its_unit_or_counts_things():
    for metric in TABLE:
        if metric.kind is not Kind.COUNTER and metric.unit in {"bytes", "seconds"}:
            assert metric.name.endswith(f"_{metric.unit}"), metric.name


def test_every_reason_has_an_outcome_of_the_request():
    assert set(Refusal) | set(Malformed) <= {str(outcome) for outcome in Outcome}
    assert set(Malformed) <= set(Refusal)


def test_counts_of_the_pipeline_arrive_by_reason(metrics):
    tally = Tally(events_received=7, events_accepted=5, events_skipped=Counter({Skip.WRONG_TYPE: 2}))
    counts = Counts(
        tally,
        Counter({(Target.STEP_TIME, RowOutcome.LEARNED): 3}),
        Counter({RowDrop.IDLE: 1}),
        Counter(),
    )
    metrics.merge(counts)
    metrics.merge(counts)
    assert metrics.value(DECODED_EVENTS) == 14
    assert metrics.value(SKIPPED_EVENTS, "wrong_type") == 4
    assert metrics.value(ROWS, "step_time", "learned") == 6
    assert metrics.value(DROPPED_ROWS, "idle") == 2


def test_a_gauge_may_read_its_value_at_every_scrape(metrics):
    size = [3]
    metrics.follow(QUEUE_BYTES, lambda: size[0])
    assert metrics.value(QUEUE_BYTES) == 3
    size[0] = 4
    assert metrics.value(QUEUE_BYTES) == 4


def test_a_label_value_outside_its_closed_set_is_an_error_not_a_series(metrics):
    with pytest.raises(KeyError):
        metrics.add(ACCEPTED_SPANS, 1, "pigeon")
    with pytest.raises(TypeError):
        metrics.set(REFUSED_SPANS, 1, "grpc", Refusal.QUEUE_FULL)
