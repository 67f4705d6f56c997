"""The accounting closes over any traffic."""

from hypothesis import given
from hypothesis import strategies as st

from collector.decode import read_span_ends
from collector.ingest.consumer import ExportConsumer
from collector.ingest.queue import ExportQueue
from collector.telemetry.metrics import Metrics
from collector.telemetry.table import ACCEPTED, REQUESTS, SPANS
from tests.support.clocks import FakeClock
from tests.support.pipelines import value_of
from tests.support.sidecars import take_in
from tests.support.step_exports import make_export


class BrokenQueue(ExportQueue):
    """Fails now and then, as only a fault of ours could."""

    async def put(self, item):
        if item.spans == 3:
            raise MemoryError
        return await super().put(item)


@given(
    st.lists(
        st.one_of(st.binary(max_size=30), st.integers(0, 4).map(lambda n: make_export(n).SerializeToString())),
        max_size=20,
    ),
    st.integers(0, 20),
)
def test_every_call_and_every_span_is_counted_once_whatever_becomes_of_it(payloads, closed_after):
    metrics = Metrics()
    queue = BrokenQueue(FakeClock(), capacity_bytes=20_000, wait_s=0)
    consumer = ExportConsumer(queue, metrics)
    spans = 0
    for index, payload in enumerate(payloads):
        if index == closed_after:
            queue.close()
        ends = read_span_ends(payload)
        spans += len(ends) if isinstance(ends, list) else 0
        take_in(consumer, payload)

    def total(metric):
        others = [values for _, values in metric.labels[1:]]
        return sum(
            value_of(metrics, metric, "grpc", *labels) for labels in (zip(*others, strict=True) if others else [()])
        )

    assert total(SPANS) == spans
    assert total(REQUESTS) == len(payloads)
    taken = queue.take(10**9, 0)
    assert value_of(metrics, SPANS, "grpc", ACCEPTED) == (sum(export.spans for export in taken.items) if taken else 0)
