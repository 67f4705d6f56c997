"""Our own metrics: one table, label sets complete from the start, sums that hold."""

import pytest
from prometheus_client import generate_latest

from collector import __version__
from collector.ingest.status import answer
from collector.telemetry import Counts
from collector.telemetry.metrics import Metrics
from collector.telemetry.reasons import Outcome, Skip
from collector.telemetry.table import (
    ACCEPTED,
    DECODED_EVENTS,
    KV_UNBOUND,
    SIZE_BYTES,
    SPANS,
    TABLE,
)
from tests.support.pipelines import value_of


@pytest.fixture
def metrics():
    return Metrics()


def test_every_metric_of_the_table_is_on_the_page_from_the_start(metrics):
    page = generate_latest(metrics.registry).decode()
    for metric in TABLE:
        assert f"\n{metric.exposed_name}" in page, metric.name
        assert metric.help.endswith("."), metric.name
    for outcome in dict(SPANS.labels)["outcome"]:
        assert f'tracefit_receiver_spans_total{{outcome="{outcome}",transport="grpc"}} 0.0' in page
    assert f'tracefit_build_info{{version="{__version__}"}} 1.0' in page


def test_every_refusal_has_a_status_that_the_client_sees():
    for refusal in set(Outcome) - {Outcome.ACCEPTED}:
        assert answer(refusal).text
        assert answer(refusal).status >= 400


def test_counts_of_the_pipeline_arrive_by_reason_and_a_gauge_stands_at_what_it_was_last_or_reads(metrics):
    counts = Counts({(DECODED_EVENTS, ACCEPTED): 7, (DECODED_EVENTS, Skip.INVALID): 2, (KV_UNBOUND,): 5})
    for _ in range(2):
        metrics.merge(counts)
    assert [value_of(metrics, DECODED_EVENTS, each) for each in (ACCEPTED, Skip.INVALID)] == [14, 4]
    assert value_of(metrics, KV_UNBOUND) == 5
    size = [3]
    metrics.follow(SIZE_BYTES, lambda: size[0], "queue")
    size[0] = 4
    assert value_of(metrics, SIZE_BYTES, "queue") == 4


def test_a_label_value_outside_its_closed_set_is_an_error_not_a_series(metrics):
    with pytest.raises(KeyError):
        metrics.add(SPANS, 1, "pigeon", ACCEPTED)
    with pytest.raises(AttributeError):
        metrics.set(SPANS, 1, "grpc", Outcome.QUEUE_FULL)
