"""Short of memory: refused, given up, said, and over by itself."""

import pytest

from collector.runtime.filesystem import MemoryGuard
from collector.service.watches import MemoryLimiter
from collector.telemetry import JoinEvent, table
from tests.support.clocks import FakeClock
from tests.support.pipelines import new_pipeline
from tests.support.recordings import otlp_file, recording

MIB = 1 << 20
C6_BUSY_STEPS = 1850


class House:
    """A relief whose memory is a number; shedding frees so much of it."""

    def __init__(self, used_mib, *, freed_mib=0):
        self.clock = FakeClock()
        self.used_mib, self.freed_mib, self.sheds = used_mib, freed_mib, 0
        guard = MemoryGuard(100 * MIB, lambda: self.used_mib * MIB)
        self.relief = MemoryLimiter(guard, self.shed, self.clock)

    def shed(self):
        self.sheds += 1
        self.used_mib -= self.freed_mib

    def turns(self, seconds):
        for _ in range(int(seconds * 2)):
            self.relief.tick()
            self.clock.advance(0.5)


def test_what_waits_is_given_up_when_memory_is_short_for_three_seconds():
    house = House(120, freed_mib=15)
    house.turns(2.5)
    assert not house.sheds
    assert house.relief.problem == "more than 100 MiB in use: exports are refused"
    house.turns(7)
    assert house.sheds == 2
    assert house.relief.problem == ""


def test_when_memory_is_short_what_is_pending_is_learned_and_let_go_of():
    pipeline = new_pipeline()
    exports = recording(otlp_file("c6_saturated"))
    half = len(exports) // 2
    pipeline.process(exports[:half])
    before = pipeline.joiner.pending()
    assert before.steps > 500
    assert pipeline.learned_rows == 0
    pipeline.shed_memory()
    assert pipeline.learned_rows > 0.9 * before.steps
    assert pipeline.joiner.pending().engines == 0
    (engine,) = pipeline.joiner.emitters
    assert engine.process.window.size <= 3, "the step before the next row stays"
    pipeline.process(exports[half:])
    pipeline.flush()
    targets = pipeline.snapshot(0, 1).configs[0].targets
    assert targets["step_time"].models["portable"].rows > 0.9 * C6_BUSY_STEPS
    late = pipeline.take_counts()[table.JOIN_EVENTS, JoinEvent.STEP_LATE]
    assert 0 < late < 60, "summaries that come after the rows around them have left"
    assert targets["schedule_time"].models["portable"].rows + late == pytest.approx(C6_BUSY_STEPS, abs=20)
