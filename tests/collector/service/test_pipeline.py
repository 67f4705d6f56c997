"""Admitted bytes in, coefficients out: recordings of real engines, and the books that balance on each."""

from __future__ import annotations

import pytest

from collector.config import Config
from collector.ingest.queue import Export
from collector.service.pipeline import make_pipeline
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent
from online.rows import RowOutcome, Target
from tests.support.paths import DATA
from tests.support.pipelines import replayed, step_coefficients
from tests.support.recordings import recording
from tests.support.step_exports import make_export
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import exports_of, pieces

RECORDINGS = ["c1_mixed", "c3_preempt", "c5_offload", "c6_saturated", "c7_async_sim"]


@pytest.mark.parametrize("name", RECORDINGS)
def test_spans_of_a_recording_are_accounted_for_its_journeys_agree_and_every_step_is_learned(name):
    exports = recording(DATA / name / "otlp.pb.gz")
    pipeline = replayed(exports)
    counts = pipeline.take_counts()
    assert counts.total(table.DECODED_SPANS) == sum(export.spans for export in exports)
    # c6: four steps of a call whose further prompts send no journeys
    assert counts[table.JOIN_EVENTS, JoinEvent.STEP_MISMATCHED] <= (4 if name == "c6_saturated" else 0)
    learned = counts[table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED]
    assert learned > 0.97 * counts[table.DECODED_SUMMARIES, "columnar"] - 64 > 900
    assert pipeline.snapshot(0, 1).configs[0].targets["step_time"].models["portable"].rows == learned


@pytest.mark.parametrize("steps", ["steps", "sampled", "journeys"])
def test_the_quality_of_the_telemetry_is_told(steps):
    run = run_engine(many_jobs(80))
    keep = {"keep": lambda step: step % 10 == 0} if steps == "sampled" else {}
    pipeline = replayed(exports_of(pieces(run, steps=steps != "journeys", **keep)))
    (config,) = pipeline.snapshot(0, 1).configs
    assert config.telemetry == steps
    found = step_coefficients(pipeline)
    assert found["prefill_tokens"] == pytest.approx(45, rel=5e-3)
    assert found["intercept"] == pytest.approx(7000, rel=2e-2)


class OneConfiguration(Config, frozen=True, kw_only=True):
    """A second configuration has no place; a second engine has."""

    configs_max = 1


def test_configurations_beyond_the_bound_are_counted_and_those_that_were_silent_for_an_hour_are_forgotten_once():
    pipeline = make_pipeline(OneConfiguration(learners=("rls",)))
    for number, instance in enumerate(("first", "newcomer", "first")):
        request = make_export(steps_per_span=200, first_step=1 + 1000 * number, instance=instance)
        pipeline.process([Export(request.SerializeToString(), "peer", "grpc", 1)])
    pipeline.flush()
    counts = pipeline.take_counts()
    assert counts[table.NO_PLACE, "configs"] == 1
    assert counts[table.ROWS, Target.STEP_TIME, RowOutcome.NO_PLACE] > 100
    learned = counts[table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED]
    request = make_export(steps_per_span=200, first_step=10**6, instance="newcomer")
    pipeline.process([Export(request.SerializeToString(), "peer", "grpc", 1)])
    pipeline.flush()
    counts = pipeline.take_counts()
    assert learned > 0
    assert counts[table.NO_PLACE, "configs"] == 0
    assert counts[table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED] > 100
