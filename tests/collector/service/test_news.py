"""What the log says of published snapshots: each piece of news once, in words for people."""

import logging
from unittest.mock import Mock

import msgspec
import pytest

from collector.runtime.terminal import OncePerInterval
from collector.service import publish
from collector.service.publish import Publisher
from collector.telemetry.metrics import Metrics
from collector.telemetry.table import WRITES
from exporters.what_if import Advisory
from online.snapshot import DriftSnapshot, ReplicaSnapshot
from tests.support import exporter_cases as cases
from tests.support.clocks import T0_NS, FakeClock
from tests.support.pipelines import value_of
from tests.support.sidecars import CountingProcessor

NOON_NS = T0_NS - T0_NS % 86_400_000_000_000 + 43_200_000_000_000
MINUTE_NS = 60_000_000_000


@pytest.fixture
def log(caplog):
    """Publishes configurations at noon, and returns what its log says, behind the filter of a real one."""
    clock, source = FakeClock(NOON_NS), CountingProcessor()
    publisher = Publisher(source, Metrics(), clock, 0.0, Advisory().verdict)
    repeated = OncePerInterval(clock)
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(repeated)

    def log_of(*configs):
        caplog.clear()
        made = msgspec.structs.replace(cases.snapshot(*configs), created_unix_nano=NOON_NS)
        source.snapshot = lambda *_, **__: made
        source.learned_rows += 1
        publisher.tick()
        return [
            f"{record.levelname} {record.getMessage()}" for record in caplog.records if record.name == publish.__name__
        ]

    yield log_of
    caplog.handler.removeFilter(repeated)


def config(config_id="a", *, name="tiny", changed_ns=None, gain=1.42, doubts=(), term=""):
    """A configuration whose speed changed then."""
    told = {"gain": gain, "term": term} if changed_ns else {"gain": None}
    drift = DriftSnapshot(last_unix_nano=changed_ns, count=int(bool(changed_ns)), **told)
    step = msgspec.structs.replace(cases.target("step_time"), drift=drift)
    made = cases.config(config_id, name=name, targets={"step_time": step})
    return msgspec.structs.replace(made, doubts=list(doubts))


def test_a_change_of_speed_is_one_warning_with_the_time_of_the_day(log):
    assert log(config()) == []
    changed = config(changed_ns=NOON_NS - 3 * MINUTE_NS)
    assert log(changed) == ["WARNING tiny: steps take 1.42 × as long since 11:57 UTC: no single term is sure"]
    assert log(changed) == []
    assert log(config()) == [] == log(changed), "a copy with what waits knew it sooner"
    faster = "WARNING tiny: steps take 0.70 × as long since 12:00 UTC: no single term is sure"
    assert log(config(changed_ns=NOON_NS, gain=0.7)) == [faster]


def test_the_term_that_moved_is_told_once_it_is_known(log):
    log(config(changed_ns=NOON_NS))
    alike = "WARNING tiny: steps take 1.42 × as long since 12:00 UTC: every term alike"
    assert log(config(changed_ns=NOON_NS, term="all")) == [alike]
    known = config(changed_ns=NOON_NS, term="intercept")
    assert log(known) == ["WARNING tiny: steps take 1.42 × as long since 12:00 UTC: every step by the same time"]
    assert log(known) == log(config()) == log(known) == []


def test_an_engine_of_another_speed_is_told_again_when_its_term_is_known(log):
    def beside(term):
        made = config()
        odd = ReplicaSnapshot(engine="b", rows=900, ratio=1.2, stderr=0.01, differs=True, term=term)
        made.targets["step_time"].replicas[:] = [odd, msgspec.structs.replace(odd, engine="a", differs=False)]
        return made

    line = (
        "tiny: engine 'b' takes 1.200 ± 0.020 times as long as the only other one, and of two either may be the odd one"
    )
    assert log(beside("")) == [f"WARNING {line}: no single term is sure"]
    assert log(beside("decode")) == [f"WARNING {line}: decode, not prefill"]
    assert log(beside("")) == log(beside("decode")) == []
    assert log(config()) == log(beside("")) == []


def test_a_doubt_is_told_when_it_comes_not_when_its_numbers_move(log):
    assert log(config(doubts=["12 % of its steps"])) == ["WARNING tiny: not usable: 12 % of its steps"]
    assert log(config(doubts=["9.5 % of its steps"])) == []
    assert log(config(doubts=["9.5 % of its steps", "other"])) == ["WARNING tiny: not usable: other"]
    assert log(config()) == []


def test_what_many_configurations_say_is_told_once_however_many_they_are(log, monkeypatch):
    monkeypatch.setattr(publish, "LOGGED_MAX", 10)
    many = [config(f"{number:012x}", doubts=["sampled"]) for number in range(12)]
    assert len(log(*many)) == 12
    assert log(*many) == []


def test_a_verdict_that_raises_is_counted_and_the_snapshot_is_published_all_the_same():
    source, metrics, made = CountingProcessor(), Metrics(), cases.snapshot(config())
    source.snapshot = lambda *_, **__: made
    source.learned_rows = 1
    publisher = Publisher(source, metrics, FakeClock(), 0.0, Mock(side_effect=ValueError("boom")))
    publisher.tick()
    publisher.tick()
    assert publisher.current() is made
    assert value_of(metrics, WRITES, "generation", "failed") == 1
