"""A process that learns nothing says so, and one bad learner does not stop the others."""

from __future__ import annotations

import pytest

from collector.config.schema import Config
from collector.ingest.queue import Export
from collector.service.pipeline import make_pipeline
from collector.service.watches import StallWatch, WorkerProgress
from collector.telemetry import table
from collector.telemetry.reasons import Stall
from online.rows import RowOutcome, Target
from tests.support.clocks import FakeClock
from tests.support.step_exports import make_export

AFTER_S = 600.0


def watched(later, *, minutes=11, first=None):
    clock = FakeClock()
    watch = StallWatch(clock, AFTER_S)
    watch.record(first or WorkerProgress())
    for _ in range(minutes):
        clock.advance(60)
        watch.record(later)
    return clock, watch


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (WorkerProgress(batches_failed=3), Stall.WORKER),
        (WorkerProgress(), Stall.DECODE),
        (WorkerProgress(spans_understood=9), Stall.JOIN),
        (WorkerProgress(spans_understood=9, rows_offered=9), Stall.LEARNER),
    ],
)
def test_spans_without_rows_learned_are_a_stall_with_its_reason(later, reason):
    _, watch = watched(later)
    assert watch.stalled() is reason


def test_it_takes_its_time_and_ends_with_the_first_row():
    clock, watch = watched(WorkerProgress(spans_understood=1), minutes=9)
    assert watch.stalled() is None
    clock.advance(61)
    watch.record(WorkerProgress(spans_understood=2))
    assert watch.stalled() is Stall.JOIN
    watch.record(WorkerProgress(spans_understood=3, rows_offered=1, rows_learned=1))
    assert watch.stalled() is None


def test_silence_is_no_stall():
    clock, watch = watched(WorkerProgress(spans_understood=1))
    clock.advance(AFTER_S + 1)
    assert watch.stalled() is None
    watch.record(WorkerProgress(spans_understood=2))
    assert watch.stalled() is None, "the first span after a quiet night begins anew"


def two_engines(pipeline, first_step):
    for engine, other_steps in (("good", 0), ("bad", 5000)):
        payload = make_export(60, first_step=first_step + other_steps, instance=engine).SerializeToString()
        pipeline.process([Export(payload, "peer", "grpc", 60)])


def test_a_config_whose_learner_raises_is_put_aside_and_the_others_go_on(monkeypatch, caplog):
    pipeline = make_pipeline(Config(learners=("rls",)))
    two_engines(pipeline, 1)
    two_engines(pipeline, 601)
    bank = pipeline._bank
    configs = {pipeline.joiner.emitters_of(c)[0].instance: c for c in pipeline.joiner.config_ids()}
    learn = bank.learn

    def raising(config_id, *rest):
        if config_id == configs["bad"]:
            raise FloatingPointError("boom")
        return learn(config_id, *rest)

    monkeypatch.setattr(bank, "learn", raising)
    pipeline.take_counts()
    two_engines(pipeline, 1201)
    counts = pipeline.take_counts()
    assert counts[table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED] == 600
    assert counts[table.ROWS, Target.STEP_TIME, RowOutcome.QUARANTINED] == 600
    assert (counts[table.QUARANTINES], counts[table.QUARANTINED]) == (1, 1)
    shown = {c.engines[0].instance: c for c in pipeline.snapshot(1, 1).configs}
    assert shown["good"].targets
    assert not shown["good"].quarantined
    assert shown["bad"].targets == {}
    assert shown["bad"].quarantined.endswith("FloatingPointError")
    assert caplog.text.count("is put aside") == 1, "said once"
    two_engines(pipeline, 1801)
    assert pipeline.take_counts()[table.QUARANTINES] == 0
    assert pipeline.take_counts()[table.QUARANTINED] == 1


def test_a_config_that_cannot_be_shown_is_put_aside_too(monkeypatch):
    pipeline = make_pipeline(Config(learners=("rls",)))
    two_engines(pipeline, 1)
    two_engines(pipeline, 601)
    bad = pipeline.joiner.config_ids()[0]
    targets = pipeline._bank.targets
    monkeypatch.setattr(pipeline._bank, "targets", lambda c, *, exact: 1 / 0 if c == bad else targets(c, exact=exact))
    shown = {c.config_id: c for c in pipeline.snapshot(1, 1).configs}
    assert shown.pop(bad).quarantined == "snapshot: ZeroDivisionError"
    assert all(config.targets for config in shown.values())
