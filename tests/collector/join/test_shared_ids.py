"""Two processes under one service.instance.id are two engines; one after the other is a restart."""

from collections import Counter

import pytest

from collector.decode import Export
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent
from tests.support.pipelines import replayed
from tests.support.step_exports import STEP_US, make_export

PIECE = 25


def piece(pid, first_step, *, late_s=0.0, pid_attribute=True, host=None):
    """Half a second of steps of one process; each has clocks of its own."""
    request = make_export(1, steps_per_span=PIECE, first_step=first_step, instance="pod-1")
    resource = request.resource_spans[0].resource
    if pid_attribute:
        resource.attributes.add(key="process.pid").value.int_value = 7 if host else pid
    if host:
        resource.attributes.add(key="host.name").value.string_value = host
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.span_id = pid.to_bytes(4, "big") + first_step.to_bytes(4, "big")
    late_ns = int(late_s * 1e9)
    span.start_time_unix_nano += late_ns
    span.end_time_unix_nano += late_ns
    for event in span.events:
        event.time_unix_nano += late_ns
        for each in event.attributes:
            if each.key in ("step.ts_start_ns", "step.ts_end_ns"):
                each.value.int_value += pid * 1_000_003 + late_ns
    return Export(request.SerializeToString(), "peer", "grpc", 1)


def ranks(steps=1200, hosts=(None, None), **options):
    """Two ranks of data parallelism, the second a few hundred steps behind in its ids."""
    for first in range(1, steps, PIECE):
        yield piece(77, first + 300, late_s=-300 * STEP_US / 1e6, host=hosts[0], **options)
        yield piece(78, first, host=hosts[1], **options)


def run(exports):
    """The pipeline, how often what happened, and the engines by name."""
    pipeline = replayed(exports)
    happened = Counter(pipeline.take_counts().by_label(table.JOIN_EVENTS))
    engines = [engine.instance for config in pipeline.snapshot(0, 1).configs for engine in config.engines]
    return pipeline, happened, sorted(engines)


@pytest.mark.parametrize(
    ("hosts", "second"),
    [((None, None), "pod-1 (pid 78)"), (("a", "b"), "pod-1 (pid 7 on b)")],
    ids=["pids", "pods whose pids are the same"],
)
def test_two_processes_under_one_id_are_two_engines_and_both_are_learned(hosts, second):
    pipeline, happened, engines = run(ranks(hosts=hosts))
    assert engines == ["pod-1", second]
    assert happened[JoinEvent.ID_SHARED] == 1
    assert happened[JoinEvent.ENGINE_RESTART] <= 6, "until the second overlap is seen"
    rows = sum(config.targets["step_time"].models["portable"].rows for config in pipeline.snapshot(0, 1).configs)
    assert rows > 0.9 * 2400


def test_processes_that_nothing_tells_apart_are_noticed_by_the_steps_that_contradict_each_other():
    pipeline, happened, engines = run(ranks(pid_attribute=False))
    assert engines == ["pod-1"]
    (engine,) = pipeline.joiner.engines.values()
    assert len(engine.processes) <= 8
    assert happened[JoinEvent.ENGINE_CONFLICT] >= 10


@pytest.mark.parametrize("pid_attribute", [True, False])
def test_a_restart_under_its_id_stays_one_engine(pid_attribute):
    before = [piece(77, first, pid_attribute=pid_attribute) for first in range(1, 1000, PIECE)]
    after = [piece(91, first, late_s=25.0, pid_attribute=pid_attribute) for first in range(1, 1000, PIECE)]
    _, happened, engines = run([*before, *after])
    assert engines == ["pod-1"]
    assert happened[JoinEvent.ENGINE_RESTART] == 1
    assert happened[JoinEvent.ID_SHARED] == 0
