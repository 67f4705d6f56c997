"""The load generator sends what it says: the same bytes for the same seed, steps with known coefficients, no loss."""

from __future__ import annotations

import numpy as np
import pytest

from collector.decode.columnar import Decoder
from collector.receive.export_request import Export
from collector.telemetry import Counts, table
from tests.support.otlp_load import BETA_US, FIRST_STEP, Stream, run_engine
from tests.support.pipelines import assert_accounted, coefficients, replayed


def decoded(stream, numbers):
    counts = Counts()
    calls = [(stream.export(number).payload, "peer") for number in numbers]
    return [one for call in Decoder().decode(calls, lambda *_: None, counts) for one in call], counts


def exports(stream, count):
    calls = map(stream.export, range(count))
    return [Export(call.payload, "peer", "test", call.spans) for call in calls]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    streams = [Stream(seed, spans_per_rpc=1, pool_rpcs=2, requests=True) for seed in (3, 3, 4)]
    first, again, other = ([stream.export(number) for number in range(5)] for stream in streams)
    assert first == again
    assert first[0].payload != other[0].payload


def test_three_laps_are_one_stream_without_repeats_holes_or_jumps():
    stream = Stream(spans_per_rpc=2, pool_rpcs=3, requests=True)
    telemetry, counts = decoded(stream, range(9))
    assert_accounted(counts)
    assert counts[table.DECODED_SUMMARIES, "plain"] == 0
    assert counts.total(table.SKIPPED_SPANS) == counts.total(table.SKIPPED_EVENTS) == 0
    steps = np.concatenate([one.steps for one in telemetry])
    steps = steps[np.argsort(steps["step_id"])]
    assert (steps["step_id"] == FIRST_STEP + np.arange(1800)).all()
    cycles = np.diff(steps["ts_start_ns"])
    assert (cycles[:-1] == np.tile(stream.lap.cycle_ns, 3)[: len(cycles) - 1]).all()
    spans = [span.span_id for one in telemetry for span in (*one.core, *one.api)]
    assert len(set(spans)) == len(spans) > 0


def test_an_export_says_how_many_steps_and_spans_it_holds():
    stream = Stream(spans_per_rpc=3, pool_rpcs=2, sample_rate=0.3, requests=True)
    for number in range(4):
        call = stream.export(number)
        telemetry, counts = decoded(stream, [number])
        assert sum(len(one.steps) for one in telemetry) == call.steps
        assert counts[table.DECODED_SPANS] == call.spans


def test_summaries_and_journeys_of_the_engine_agree():
    """Requests in flight by their journeys are the requests of the summaries, in every step."""
    lap = run_engine(4000, 5)
    running, prefilling = np.zeros(4000, int), np.zeros(4000, int)
    context = np.zeros(4000, int)
    for one in lap.served:
        prefilling[one.first] += 1
        running[one.first + 1 : one.last + 1] += 1
        context[one.first + 1 : one.last + 1] += one.prompt + np.arange(1, one.outputs)
    assert (running == lap.columns["decodes"]).all()
    assert (prefilling == lap.columns["prefill_requests"]).all()
    assert (context == lap.columns["context"]).all()
    assert running[-1] == prefilling[-1] == 0


@pytest.mark.parametrize("requests", [False, True], ids=["steps alone", "with journeys"])
def test_the_coefficients_it_names_are_what_is_learned(requests):
    pipeline = replayed(exports(Stream(2, pool_rpcs=10, requests=requests), 20))
    learned = {name: value for (_, target, name), value in coefficients(pipeline).items() if target == "step_time"}
    for name, truth in BETA_US.items():
        assert learned[name] == pytest.approx(truth, rel=0.03), name
