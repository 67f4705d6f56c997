"""Each step summary equals the truth of its batch, in every version's shape and in both scheduling modes."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracefit_vllm.encode import STEP_KEYS
from tracefit_vllm.items import SnapshotRows, StepRow
from tracefit_vllm.settings import Settings
from tracefit_vllm.tap import Tap

from tests.plugin.conftest import ListSink
from tests.plugin.fakes import AsyncScheduler, Request, Scheduler, Shape, Status, drive

REQUESTS = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 12), st.integers(0, 100)),  # prompt, outputs, cached
    min_size=1,
    max_size=12,
)


def tapped(scheduler, sink, **settings_):
    tap = Tap(scheduler, Settings(**settings_), sink, random.Random(1))
    assert tap.attach()
    return tap


def rows(sink):
    return [dict(zip(STEP_KEYS, item.values, strict=True)) for item in sink.items if isinstance(item, StepRow)]


@pytest.mark.parametrize("shape", list(Shape))
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, aborts=st.sets(st.integers(0, 11)), blocks=st.integers(20, 40))
def test_every_summary_equals_the_truth_of_its_batch(shape, kind, requests, aborts, blocks):
    sink = ListSink()
    scheduler = kind(shape, blocks=blocks)
    tapped(scheduler, sink)
    for number, (prompt, outputs, cached) in enumerate(requests):
        scheduler.add_request(Request(f"r{number}", prompt, outputs, cached))
        drive(scheduler, 2)
        if number in aborts:
            scheduler.finish_requests(f"r{number}", Status.FINISHED_ABORTED)
    drive(scheduler, 120)
    got = rows(sink)
    assert len(got) == len(scheduler.truth)
    for row, truth in zip(got, scheduler.truth, strict=True):
        assert {key: row[key] for key in truth if key in row} == {k: v for k, v in truth.items() if k in row}


def test_times_stand_in_their_order_and_the_duration_is_that_of_schedule(sink):
    scheduler = Scheduler()
    tapped(scheduler, sink)
    scheduler.add_request(Request("a", 30, 5))
    drive(scheduler, 8)
    got = rows(sink)
    for row in got:
        assert row["step.ts_start_ns"] <= row["step.ts_end_ns"] <= row["step.ts_output_ns"] <= row["step.ts_done_ns"]
        assert row["step.duration_us"] == (row["step.ts_end_ns"] - row["step.ts_start_ns"]) // 1000
        assert row["plugin.hook_ns"] > 0
    starts = [row["step.ts_start_ns"] for row in got]
    assert starts == sorted(starts)


def test_under_asynchronous_scheduling_each_step_gets_its_own_output_time(sink):
    scheduler = AsyncScheduler()
    tapped(scheduler, sink)
    scheduler.add_request(Request("a", 30, 6))
    drive(scheduler, 12)
    got = rows(sink)
    assert [row["step.id"] for row in got] == list(range(1, 13))
    for row, following in itertools.pairwise(got):
        assert following["step.ts_end_ns"] <= row["step.ts_output_ns"]  # the next batch was made before


def test_a_step_whose_output_never_comes_leaves_without_output_times(sink):
    scheduler = Scheduler()
    tapped(scheduler, sink)
    scheduler.add_request(Request("a", 30, 5))
    scheduler.schedule()
    drive(scheduler, 1)
    first, second = [item for item in sink.items if isinstance(item, StepRow)]
    assert first.done_ns == 0
    assert second.done_ns > 0


def test_sampling_keeps_whole_blocks_of_consecutive_steps(sink):
    scheduler = Scheduler()
    tapped(scheduler, sink, step_sample=0.25)
    drive(scheduler, 64 * 60)
    steps = [row["step.id"] for row in rows(sink)]
    blocks = {(step - 1) // 64 for step in steps}
    assert len(steps) == 64 * len(blocks)
    assert 5 <= len(blocks) <= 28  # binomial(60, 0.25): beyond one in 10^4 either way


def test_snapshots_sum_up_to_their_summary(sink):
    scheduler = Scheduler(blocks=30)
    tapped(scheduler, sink, snapshot_sample=1.0)
    for number in range(6):
        scheduler.add_request(Request(f"r{number}", 50, 20))
    drive(scheduler, 60)
    summaries = {row["step.id"]: row for row in rows(sink)}
    found = [item for item in sink.items if isinstance(item, SnapshotRows)]
    assert len(found) == 60
    for item in found:
        summary = summaries[item.step]
        assert len(item.rows) == summary["queue.running_depth"]
        assert sum(row[6] for row in item.rows) == summary["batch.scheduled_tokens"]
        assert sum(row[3] + row[6] for row in item.rows if row[6]) == summary["batch.context_tokens"]
