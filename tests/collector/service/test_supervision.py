"""One bad learner does not stop the others."""

import pytest

from collector.config.schema import Config
from collector.decode import Export
from collector.service.pipeline import make_pipeline
from collector.telemetry import table
from online.rows import RowOutcome, Target
from tests.support.step_exports import make_export


def two_engines(pipeline, first_step):
    for engine, other_steps in (("good", 0), ("bad", 5000)):
        payload = make_export(60, first_step=first_step + other_steps, instance=engine).SerializeToString()
        pipeline.process([Export(payload, "peer", 60)])


@pytest.fixture
def two():
    """A pipeline that has learned of two engines, and the id of the second's configuration."""
    pipeline = make_pipeline(Config(learners=("rls",)))
    two_engines(pipeline, 1)
    two_engines(pipeline, 601)
    pipeline.take_counts()
    return pipeline, next(
        config_id for config_id, (one, *_) in pipeline.joiner.emitters_by_config().items() if one.instance == "bad"
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
        assert counts[table.QUARANTINED,] == 1
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
