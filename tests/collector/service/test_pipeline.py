"""Admitted bytes in, coefficients out: recordings of real engines, and the books that balance on each."""

import pytest

from collector.config import Config
from collector.decode import Export
from collector.service.pipeline import make_pipeline
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent
from online.rows import RowOutcome, Target
from tests.support.pipelines import replayed, total_of
from tests.support.recordings import otlp_file, recording
from tests.support.step_exports import make_export


@pytest.mark.parametrize("name", ["c3_preempt", "c5_offload", "c6_saturated", "c7_async_sim"])
def test_spans_of_a_recording_are_accounted_for_its_journeys_agree_and_every_step_is_learned(name):
    exports = recording(otlp_file(name))
    pipeline = replayed(exports)
    counts = pipeline.take_counts()
    assert total_of(counts, table.DECODED_SPANS) == sum(export.spans for export in exports)
    # c6: four steps of a call whose further prompts send no journeys
    assert counts[table.JOIN_EVENTS, JoinEvent.STEP_MISMATCHED] <= (4 if name == "c6_saturated" else 0)
    learned = counts[table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED]
    steps = sum(data.count(b"step.BATCH_SUMMARY") for data in (export.payload for export in exports))
    assert learned > 0.97 * steps - 64 > 900
    assert pipeline.snapshot(0, 1).configs[0].targets["step_time"].models["portable"].rows == learned


class OneConfiguration(Config, frozen=True, kw_only=True):
    """A second configuration has no place; a second engine has."""

    configs_max = 1


def test_configurations_beyond_the_bound_are_counted_and_those_that_were_silent_for_an_hour_are_forgotten_once():
    pipeline = make_pipeline(OneConfiguration(learners=("rls",)))

    def counted(*told):
        for first_step, instance in told:
            request = make_export(steps_per_span=200, first_step=first_step, instance=instance)
            pipeline.process([Export(request.SerializeToString(), "peer", 1)])
        pipeline.flush()
        counts = pipeline.take_counts()
        rows = [counts[table.ROWS, Target.STEP_TIME, each] for each in (RowOutcome.LEARNED, RowOutcome.LIMIT_EXCEEDED)]
        return (counts[table.LIMIT_EXCEEDED, "configs"], *(count > 100 for count in rows))

    assert counted((1, "first"), (1001, "newcomer"), (2001, "first")) == (1, True, True)
    assert counted((10**6, "newcomer")) == (0, True, False)
