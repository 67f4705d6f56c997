"""Short of memory: refused, given up, said, and over by itself; alive only as long as something helps."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from collector.config.schema import JoinConfig
from collector.ingest import Export
from collector.recordings import Recording, TimedKv, merged
from collector.runtime.filesystem import MemoryGuard
from collector.runtime.tasks import Health
from collector.service.memory_relief import MemoryRelief
from collector.telemetry import Metrics, table
from collector.telemetry.reasons import JoinEvent
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
            MemoryGuard(100 * MIB, lambda: self.used_mib * MIB, self.clock),
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


def test_giving_up_frees_the_older_half_of_what_waits_and_counts_it():
    pipeline = new_pipeline(join=JoinConfig(window_s=180))
    exports = recording(DATA / "c6_saturated" / "otlp.pb.gz")
    half = len(exports) // 2
    pipeline.process(exports[:half])
    ((before,),) = ([one for one in pipeline.waiting() if one.steps],)
    pipeline.give_up_oldest()
    given_up = pipeline.take_counts()
    ((after,),) = ([one for one in pipeline.waiting() if one.steps],)
    assert after.steps <= before.steps / 2 + 2, "the step before the next row stays"
    assert after.requests <= before.requests / 2 + 1
    for later in (exports[half : half + half // 2], exports[half + half // 2 :]):
        pipeline.process(later)
        pipeline.give_up_oldest()
    pipeline.flush()
    counts = pipeline.take_counts()
    targets = pipeline.snapshot(0, 1).configs[0].targets
    assert targets["step_time"].models["portable"].rows > 0.5 * 1849, "what is not given up is learned"
    steps = sum(each[table.JOIN_EVENTS, JoinEvent.STEP_GIVEN_UP] for each in (given_up, counts))
    rows = targets["schedule_time"].models["portable"].rows
    assert C6_BUSY_STEPS <= rows + steps <= C6_BUSY_STEPS + 20, "each is learned from or counted; a few came late"
    assert counts[table.JOIN_EVENTS, JoinEvent.STEP_MISSING] <= C6_MISSING_STEPS, "given up, not missing"


def test_giving_up_while_nothing_waits_loses_no_step():
    rows = []
    for gives_up in (False, True):
        pipeline = new_pipeline()
        for number, payload in enumerate(step_payloads(15, 40)):
            pipeline.process([Export(payload, "peer", "test", 1)])
            if gives_up and number in {8, 12}:  # the first block has passed
                pipeline.give_up_oldest()
        pipeline.flush()
        assert pipeline.take_counts()[table.JOIN_EVENTS, JoinEvent.STEP_GIVEN_UP] == 0
        rows.append([target.models["portable"].rows for target in pipeline.snapshot(0, 1).configs[0].targets.values()])
    assert rows[0] == rows[1]
    assert min(rows[0]) >= 15 * 40 - 3


def test_giving_up_lets_go_of_prefills_whose_kv_events_are_awaited():
    pipeline = new_pipeline()
    files = [DATA / "c7_async_sim" / name for name in ("otlp.pb.gz", "kv.jsonl.gz")]
    for number, timed in enumerate(merged([Recording(path, print) for path in files])):
        if isinstance(timed, TimedKv):
            pipeline.process_kv([timed.batch])
        else:
            pipeline.process([timed.export])
        if number % 150 == 149:
            pipeline.give_up_oldest()
    assert pipeline.take_counts()[table.JOIN_EVENTS, JoinEvent.STEP_GIVEN_UP] > 0
