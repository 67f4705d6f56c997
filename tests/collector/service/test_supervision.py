"""A process that learns nothing says so, and one bad learner does not stop the others."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from collector.config.schema import Config
from collector.decode import Export
from collector.service.pipeline import make_pipeline
from collector.service.watches import StallWatch
from collector.telemetry import Counts, Metrics, table
from collector.telemetry.reasons import Stall
from online.rows import RowOutcome, Target
from tests.support.clocks import FakeClock
from tests.support.step_exports import make_export

FAILED, UNDERSTOOD = Counts(), Counts({(table.DECODED_SPANS, table.ACCEPTED): 9})
OFFERED = UNDERSTOOD | {(table.ROWS, Target.STEP_TIME, RowOutcome.NOT_POSITIVE): 9}
LEARNED = UNDERSTOOD | {(table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED): 9}


def watched(each_minute, *, minutes):
    clock = FakeClock()
    watch = StallWatch(Metrics(CollectorRegistry()), clock)
    for minute in range(minutes + 1):
        clock.advance(60 if minute else 0)
        watch.record(Counts(each_minute if minute else {}), failed=each_minute is FAILED)
        watch.tick()
    return clock, watch


@pytest.mark.parametrize(
    ("each_minute", "reason"),
    [(FAILED, Stall.WORKER), ({}, Stall.DECODE), (UNDERSTOOD, Stall.JOIN), (OFFERED, Stall.LEARNER), (LEARNED, None)],
)
def test_spans_without_rows_learned_for_ten_minutes_are_a_stall_with_its_reason(each_minute, reason, caplog):
    assert watched(each_minute, minutes=9)[1].stalled() is None
    assert watched(each_minute, minutes=11)[1].stalled() is reason
    assert caplog.messages == ([f"spans arrive and nothing is learned: {reason}"] if reason else [])


def test_a_stall_ends_with_the_first_row_and_silence_is_none():
    _, watch = watched(UNDERSTOOD, minutes=11)
    watch.record(Counts(LEARNED))
    assert watch.stalled() is None
    clock, watch = watched(UNDERSTOOD, minutes=9)
    clock.advance(601)
    assert watch.stalled() is None
    watch.record(UNDERSTOOD)
    assert watch.stalled() is None, "the first span after a quiet night begins anew"


def test_a_server_that_is_asked_every_nine_minutes_is_not_stalled_by_its_pauses():
    clock, watch = watched(LEARNED, minutes=1)
    for _ in range(2):
        clock.advance(570)
        watch.record(UNDERSTOOD)
        clock.advance(35)
        watch.record(UNDERSTOOD)
        assert watch.stalled() is None
    for _ in range(8):
        clock.advance(570)
        watch.record(UNDERSTOOD)
    assert watch.stalled() is Stall.JOIN, "after ten of them none of which gave a row"


def two_engines(pipeline, first_step):
    for engine, other_steps in (("good", 0), ("bad", 5000)):
        payload = make_export(60, first_step=first_step + other_steps, instance=engine).SerializeToString()
        pipeline.process([Export(payload, "peer", "grpc", 60)])


@pytest.fixture
def two():
    """A pipeline that has learned of two engines, and the id of the second's configuration."""
    pipeline = make_pipeline(Config(learners=("rls",)))
    two_engines(pipeline, 1)
    two_engines(pipeline, 601)
    pipeline.take_counts()
    return pipeline, next(
        c for c in pipeline.joiner.config_ids() if pipeline.joiner.emitters_of(c)[0].instance == "bad"
    )


def failing_for(bad, work):
    """The same, but for one configuration."""
    return lambda config_id, *rest, **named: 1 / 0 if config_id == bad else work(config_id, *rest, **named)


def test_a_config_whose_learner_raises_is_quarantined_and_the_others_go_on(two, monkeypatch, caplog):
    pipeline, bad = two
    monkeypatch.setattr(pipeline._bank, "learn", failing_for(bad, pipeline._bank.learn))
    for first_step in (1201, 1801):
        two_engines(pipeline, first_step)
        counts = pipeline.take_counts()
        assert counts[table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED] == 600
        assert counts[table.ROWS, Target.STEP_TIME, RowOutcome.QUARANTINED] == 600
        assert counts[table.QUARANTINED] == 1
    shown = {c.config_id: c for c in pipeline.snapshot(1, 1).configs}
    put_aside = shown.pop(bad)
    assert (put_aside.targets, put_aside.quarantined) == ({}, "schedule_time: ZeroDivisionError")
    assert all(config.targets and not config.quarantined for config in shown.values())
    assert caplog.text.count("is quarantined") == 1, "said once"


def test_a_config_that_cannot_be_shown_is_quarantined_too(two, monkeypatch):
    pipeline, bad = two
    monkeypatch.setattr(pipeline._bank, "targets", failing_for(bad, pipeline._bank.targets))
    shown = {c.config_id: c for c in pipeline.snapshot(1, 1).configs}
    assert shown.pop(bad).quarantined == "snapshot: ZeroDivisionError"
    assert all(config.targets for config in shown.values())
