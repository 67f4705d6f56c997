"""``tracefit demo --fleet``: the slow machine is the recording with longer times, and every sidecar has a name."""

from itertools import islice

import pytest

from collector.commands.demo_feed import find_recording
from collector.commands.demo_fleet import SLOWER, exports_of_two_machines, named_export
from collector.receive import Export, count_spans
from collector.worker import make_pipeline
from tests.support.fleets import CONFIG


@pytest.fixture(scope="module")
def sent():
    return list(islice(exports_of_two_machines(find_recording(None), print), 90))


def learned(requests, number):
    """Bank of a sidecar that was sent these exports."""
    pipeline = make_pipeline(CONFIG)
    for request in requests:
        payload = named_export(request, number)
        pipeline.process([Export(payload, "demo", "grpc", count_spans(payload), "")])
    pipeline.flush()
    return pipeline.snapshot(0, 1).configs[0]


def test_the_slow_machine_takes_so_much_longer_for_the_same_steps(sent):
    even, slow = (learned([pair[index] for pair in sent], 7) for index in (0, 1))
    assert [engine.instance for engine in slow.engines] == ["engine-7"]
    assert slow.config_id == even.config_id
    steps = [config.targets["step_time"] for config in (even, slow)]
    assert steps[0].models["portable"].rows == pytest.approx(steps[1].models["portable"].rows, rel=0.02)
    assert steps[1].mean_us / steps[0].mean_us == pytest.approx(SLOWER, rel=0.01)
