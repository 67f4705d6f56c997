"""Request targets: which requests give which row, and what it measures."""

import dataclasses

import numpy as np
import pytest

from collector.config.schema import Config
from collector.decode import Telemetry
from collector.join import Joiner, Rows
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent, RowDrop
from online.rows import REQUEST_FEATURES, Target
from tests.support.pipelines import only_config, replayed, step_coefficients
from tests.support.toy_engine import Job, many_jobs, run_engine
from tests.support.toy_spans import api_of, columns_of, core_of, exports_of, pieces

REQUEST_TARGETS = {Target.QUEUE_WAIT, Target.API_QUEUEING, Target.FIRST_RESPONSE, Target.POST_DECODE}
JOBS = {
    "first": Job("first", 100, 20, 1),
    "meets a step": Job("meets a step", 50, 20, 5),
    "preempted": Job("preempted", 60, 20, 6, preempted_step=12, resumed_step=15),
    "aborted": Job("aborted", 40, 99, 7, aborted_step=18),
    "idle": Job("idle", 31, 10, 90),
    "one token": Job("one token", 30, 1, 200),
}


@pytest.fixture(scope="module")
def run():
    return run_engine([*JOBS.values()], idle_us=3e6)


def rows_of(run, name, *, steps=True, api=True, finish=None, **changes):
    """By target, what a request gives that differs from the run's in these: (features by name, us)."""
    joiner, told = Joiner(Config()), []
    for job in run.jobs:
        shown = dataclasses.replace(job, **(changes if job.name == name else {}))
        core = [core_of(run, dataclasses.replace(shown, status=finish or job.status))]
        told.append(Telemetry("e", {}, core=core, api=[api_of(run, shown)] if api else []))
    for one in [Telemetry("e", {}, steps=columns_of(run)), *told][not steps :]:
        joiner.add(one)
    found = {}
    for event in joiner.drain(flush=True):
        if isinstance(event, Rows) and event.target in {*REQUEST_TARGETS, Target.PREEMPTION_GAP}:
            of_request = event.rows.raw[:, 0] == JOBS[name].prompt
            for raw, elapsed_us in zip(event.rows.raw[of_request], event.rows.elapsed_us[of_request], strict=True):
                found[event.target] = dict(zip(REQUEST_FEATURES, raw, strict=True)), elapsed_us
    return found


def test_a_request_on_a_fresh_engine_gives_all_rows_but_a_preemption(run):
    expected_us = {
        Target.QUEUE_WAIT: 150.0,
        Target.API_QUEUEING: 1500.0,
        Target.FIRST_RESPONSE: 2500.0,
        Target.POST_DECODE: 900.0,
    }
    found_us = {target: elapsed_us for target, (_, elapsed_us) in rows_of(run, "first").items()}
    assert found_us == pytest.approx(expected_us, abs=1)


ONLY_THE_QUEUE = REQUEST_TARGETS - {Target.QUEUE_WAIT}


@pytest.mark.parametrize(
    ("name", "differs", "untold"),
    [
        ("meets a step", {}, {Target.API_QUEUEING}),
        ("idle", {}, set()),
        ("idle", {"arrived_before_us": 3.5e6}, {Target.API_QUEUEING}),  # before the engine went idle
        ("idle", {"steps": False}, set()),  # the stamp of the last end tells it
        ("idle", {"steps": False, "arrived_before_us": 3.5e6}, {Target.API_QUEUEING}),
        ("meets a step", {"steps": False}, {Target.API_QUEUEING}),
        ("first", {"streams": False}, {Target.FIRST_RESPONSE}),
        ("one token", {}, {Target.FIRST_RESPONSE}),
        ("aborted", {}, ONLY_THE_QUEUE),
        ("first", {"samples": 2}, ONLY_THE_QUEUE),
        ("first", {"api": False}, ONLY_THE_QUEUE),
        *(
            ("first", {"finish": finish}, {Target.FIRST_RESPONSE, Target.POST_DECODE})
            for finish in ("ignored", "error")
        ),
    ],
)
def test_a_request_gives_no_row_of_what_it_cannot_tell(run, name, differs, untold):
    assert set(rows_of(run, name, **differs)) == REQUEST_TARGETS - untold


def test_a_preemption_gives_its_gap(run):
    job = next(job for job in run.jobs if job.name == "preempted")
    gap_ns = [ns for kind, _, ns, _ in job.marks if kind == "SCHEDULED"][1] - job.ns_of("PREEMPTED")
    found = rows_of(run, "preempted")
    assert found[Target.PREEMPTION_GAP][1] == gap_ns / 1e3
    assert found[Target.QUEUE_WAIT][1] == 150.0


def test_raw_features_are_the_request_and_the_queue_it_met(run):
    """What a summary says of a queue holds for a second; how full the cache is, only summaries tell."""
    met, old = (rows_of(run, name)[Target.QUEUE_WAIT][0] for name in ("meets a step", "idle"))
    summary = run.summaries[3]
    assert met == {
        "prompt_tokens": 50,
        "output_tokens": 20,
        "queued_tokens": 0,
        "waiting": summary["queue.waiting_depth"],
        "running": summary["queue.running_depth"],
        "kv_usage_ratio": summary["kv.usage_gpu_ratio"],
    }
    assert np.isnan(old["kv_usage_ratio"])


def test_requests_whose_api_half_never_comes_are_counted():
    alone = replayed(exports_of(pieces(run_engine(many_jobs(60)), apis=False)))
    assert alone.take_counts()[table.JOIN_EVENTS, JoinEvent.UNMATCHED] == 60


def test_a_request_that_spans_the_compilation_is_left_out():
    run = run_engine(many_jobs(60))
    shift = 12 * 10**9  # the first step with tokens took 12 s
    for summary in run.summaries[2:]:
        summary["step.ts_start_ns"] += shift
        summary["step.ts_end_ns"] += shift
    for job in run.jobs:
        job.marks = [
            (kind, step, ns + (shift if step > 2 or kind in ("FIRST_TOKEN", "FINISHED") else 0), done)
            for kind, step, ns, done in job.marks
        ]
    pipeline = replayed(exports_of(pieces(run)))
    assert step_coefficients(pipeline)["intercept"] == pytest.approx(7000, rel=5e-3)
    assert pipeline.take_counts()[table.DROPPED_ROWS, RowDrop.WARM_UP] >= 2
    config = only_config(pipeline)
    assert config.targets["step_time"].mean_us < 20_000, "the 12 s are in no row"
