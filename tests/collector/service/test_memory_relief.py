"""Short of memory: refused, given up, said, and over by itself; alive only as long as something helps."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from collector.ingest import Export
from collector.runtime.filesystem import MemoryGuard
from collector.runtime.tasks import Health
from collector.service.watches import MemoryRelief
from collector.telemetry import JoinEvent, Metrics, table
from tests.support.clocks import FakeClock
from tests.support.gpu_server import step_payloads
from tests.support.paths import DATA
from tests.support.pipelines import new_pipeline
from tests.support.recordings import recording

MIB = 1 << 20
C6_BUSY_STEPS, C6_MISSING_STEPS = 1850, 16


class House:
    """A relief whose memory is a number; what giving up frees is said by the test."""

    def __init__(self, used_mib, *, given_up=0, stuck_s=60.0):
        self.clock = FakeClock()
        self.metrics = Metrics(CollectorRegistry())
        self.health = Health(self.clock)
        self.used_mib = used_mib
        self.done = []
        self.relief = MemoryRelief(
            MemoryGuard(100 * MIB, lambda: self.used_mib * MIB),
            lambda: self.gives_up(given_up),
            stuck_s=stuck_s,
            metrics=self.metrics,
            health=self.health,
            clock=self.clock,
        )

    def gives_up(self, mib):
        self.done.append("give up")
        self.used_mib -= mib

    def turns(self, seconds):
        for _ in range(int(seconds * 2)):
            self.relief.tick()
            self.clock.advance(0.5)


def test_what_waits_is_given_up_when_memory_is_short_for_three_seconds():
    house = House(120, given_up=15)
    house.turns(2.5)
    assert not house.done
    house.turns(7)
    assert house.done.count("give up") == 2
    assert not house.relief.guard.is_short()
    assert house.health.alive()


def test_a_limit_below_what_it_takes_to_run_at_all_is_said_with_its_remedy():
    house = House(150)
    house.turns(1)
    assert house.relief.problem == ("more than 100 MiB in use, without any load; raise the limit: exports are refused")


@pytest.mark.parametrize(("flickers", "alive"), [(False, False), (True, True)])
def test_refusing_everything_for_too_long_is_not_being_alive(flickers, alive):
    house = House(150)
    for number in range(20):
        house.turns(5)
        house.used_mib = 90 if flickers and number % 2 else 150
    assert house.health.alive() is alive
    assert house.health.late() == (() if alive else ("memory",))


def test_when_memory_is_short_what_is_pending_is_learned_and_let_go_of():
    pipeline = new_pipeline()
    exports = recording(DATA / "c6_saturated" / "otlp.pb.gz")
    half = len(exports) // 2
    pipeline.process(exports[:half])
    (before,) = [one for one in pipeline.pending() if one.steps]
    assert before.steps > 500
    assert pipeline.learned_rows == 0
    pipeline.shed_memory()
    assert pipeline.learned_rows > 0.9 * before.steps
    assert pipeline.pending() == []
    (engine,) = pipeline.joiner.emitters.values()
    assert engine.newest_process.window.size <= 3, "the step before the next row stays"
    pipeline.process(exports[half:])
    pipeline.flush()
    targets = pipeline.snapshot(0, 1).configs[0].targets
    assert targets["step_time"].models["portable"].rows > 0.9 * 1849
    late = pipeline.take_counts()[table.JOIN_EVENTS, JoinEvent.STEP_LATE]
    assert 0 < late < 60, "summaries that come after the rows around them have left"
    assert C6_BUSY_STEPS - 20 <= targets["schedule_time"].models["portable"].rows + late <= C6_BUSY_STEPS + 20


def test_shedding_memory_while_nothing_is_pending_loses_no_step():
    rows = []
    for sheds in (False, True):
        pipeline = new_pipeline()
        for number, payload in enumerate(step_payloads(15, 40)):
            pipeline.process([Export(payload, "peer", "test", 1)])
            if sheds and number in {8, 12}:  # the first block has passed
                pipeline.shed_memory()
        pipeline.flush()
        rows.append([target.models["portable"].rows for target in pipeline.snapshot(0, 1).configs[0].targets.values()])
    assert rows[0] == rows[1]
    assert min(rows[0]) >= 15 * 40 - 3
