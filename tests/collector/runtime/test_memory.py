"""The memory guard: which limit holds, what a refusal looks like."""

import pytest

from collector.ingest.consumer import ExportConsumer
from collector.ingest.queue import ExportQueue
from collector.ingest.status import answer
from collector.runtime.filesystem import MemoryGuard, limit_bytes
from collector.telemetry.metrics import Metrics
from collector.telemetry.reasons import Outcome
from collector.telemetry.table import ACCEPTED, REQUESTS, SPANS
from tests.support.clocks import FakeClock
from tests.support.pipelines import value_of
from tests.support.sidecars import take_in
from tests.support.step_exports import make_export

MIB = 1 << 20


def test_over_the_limit_exports_are_refused_with_a_hint_until_memory_is_back():
    used = [300 * MIB]
    metrics = Metrics()
    queue = ExportQueue(FakeClock(), capacity_bytes=MIB, wait_s=0)
    consumer = ExportConsumer(queue, metrics, MemoryGuard(256 * MIB, lambda: used[0]))
    one = make_export().SerializeToString()
    assert take_in(consumer, one) == answer(Outcome.MEMORY)
    used[0] = 200 * MIB
    assert take_in(consumer, one) is None
    assert value_of(metrics, REQUESTS, "grpc", "memory") == value_of(metrics, SPANS, "grpc", ACCEPTED) == 1


@pytest.mark.parametrize(
    ("configured_mib", "text", "expected"),
    [
        (0, "104857600\n", 80 * MIB),
        (256, "104857600\n", 256 * MIB),
        (0, "max\n", None),
        (0, "9223372036854771712", None),
        (0, "", None),
    ],
)
def test_the_configured_limit_goes_before_a_share_of_the_cgroups_of_both_versions_and_without_one_there_is_none(
    tmp_path, configured_mib, text, expected
):
    file = tmp_path / "memory.max"
    file.write_text(text)
    limit = limit_bytes(configured_mib, (tmp_path / "absent", file))
    assert limit == expected
    assert MemoryGuard(limit, lambda: 1000 * MIB).is_short() is (expected is not None)
