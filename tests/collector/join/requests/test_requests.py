"""Request targets: which requests give which row, and what it measures."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from collector.decode.records import Finish
from collector.join.inferred import lay_journey, runs_of
from collector.join.inferred.journeys import idle_at, queue_state, rows_of
from collector.join.window import StepWindow
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent, RowDrop
from online.rows import REQUEST_FEATURES, Target
from tests.support.pipelines import coefficients, replayed, step_coefficients
from tests.support.toy_engine import Job, many_jobs, run_engine
from tests.support.toy_spans import api_of, columns_of, core_of, exports_of, pieces


@pytest.fixture(scope="module")
def run():
    jobs = [
        Job("first", 100, 20, 1),
        Job("meets a step", 50, 20, 5),
        Job("preempted", 60, 20, 6, preempted_step=12, resumed_step=15),
        Job("aborted", 40, 99, 7, aborted_step=18),
        Job("idle", 30, 10, 90),
        Job("one token", 30, 1, 200),
    ]
    return run_engine(jobs, idle_us=3e6)


@pytest.fixture(scope="module")
def window(run):
    out = StepWindow()
    out.reach(1, len(run.summaries))
    out.add_summaries(columns_of(run))
    for job in run.jobs:
        lay(core_of(run, job), out)
    return out


def lay(span, window):
    lay_journey(span, window, [*runs_of(span.marks)])


def rows(run, window, name, **changes):
    job = next(j for j in run.jobs if j.name == name)
    shown = dataclasses.replace(job, **changes)
    found = {}
    for row in rows_of(core_of(run, job), api_of(run, shown), window):
        assert row.target not in found or row.target is Target.PREEMPTION_GAP
        found[row.target] = row
    return found


def test_a_request_on_a_fresh_engine_gives_all_rows_but_a_preemption(run, window):
    found = rows(run, window, "first")
    assert set(found) == REQUEST_TARGETS
    assert found[Target.QUEUE_WAIT].elapsed_us == 150.0
    assert found[Target.API_QUEUEING].elapsed_us == pytest.approx(1500, abs=1)
    assert found[Target.FIRST_RESPONSE].elapsed_us == pytest.approx(2500, abs=1)
    assert found[Target.POST_DECODE].elapsed_us == pytest.approx(900, abs=1)


def test_a_request_that_arrives_while_the_engine_idles_gives_api_queueing(run, window):
    assert rows(run, window, "idle")[Target.API_QUEUEING].elapsed_us == pytest.approx(1500, abs=1)


def test_idle_is_told_by_the_empty_step_or_by_the_last_end_stamp(run):
    idle = next(job for job in run.jobs if job.name == "idle")
    queued_step, queued_ns = idle.marks[0][1], idle.marks[0][2]
    bare = StepWindow()
    bare.reach(1, len(run.summaries))
    for job in run.jobs:
        lay(core_of(run, job), bare)
    assert idle_at(bare, queued_ns - 10**6, queued_step)
    assert not idle_at(bare, queued_ns - 4 * 10**9, queued_step)
    assert not idle_at(bare, queued_ns, len(run.summaries) + 5)
    assert not idle_at(bare, queued_ns, 8)


REQUEST_TARGETS = {Target.QUEUE_WAIT, Target.API_QUEUEING, Target.FIRST_RESPONSE, Target.POST_DECODE}


@pytest.mark.parametrize(
    ("name", "api", "untold"),
    [
        ("meets a step", {}, {Target.API_QUEUEING}),
        ("idle", {"arrived_before_us": 3.5e6}, {Target.API_QUEUEING}),  # before the engine went idle
        ("first", {"streams": False}, {Target.FIRST_RESPONSE}),
        ("one token", {}, {Target.FIRST_RESPONSE}),
        ("aborted", {}, REQUEST_TARGETS - {Target.QUEUE_WAIT}),
        ("first", {"samples": 2}, REQUEST_TARGETS - {Target.QUEUE_WAIT}),
        ("first", {"samples": 16}, REQUEST_TARGETS - {Target.QUEUE_WAIT}),
    ],
)
def test_a_request_gives_no_row_of_what_it_cannot_tell(run, window, name, api, untold):
    assert set(rows(run, window, name, **api)) == REQUEST_TARGETS - untold


def test_a_preemption_gives_its_gap(run, window):
    job = next(j for j in run.jobs if j.name == "preempted")
    gap_ns = [ns for kind, _, ns, _ in job.marks if kind == "SCHEDULED"][1] - job.ns_of("PREEMPTED")
    found = rows(run, window, "preempted")
    assert found[Target.PREEMPTION_GAP].elapsed_us == gap_ns / 1e3
    assert found[Target.QUEUE_WAIT].elapsed_us == 150.0


def test_a_request_without_an_api_half_gives_the_engines_own_targets(run, window):
    found = [row.target for row in rows_of(core_of(run, run.jobs[2]), None, window)]
    assert sorted(found) == [Target.PREEMPTION_GAP, Target.QUEUE_WAIT]


@pytest.mark.parametrize("finish", [Finish.ABORTED, Finish.IGNORED, Finish.ERROR, None])
def test_only_natural_ends_say_how_long_a_departure_takes(run, window, finish):
    core = msgspec.structs.replace(core_of(run, run.jobs[0]), finish=finish)
    found = [row.target for row in rows_of(core, api_of(run, run.jobs[0]), window)]
    assert Target.POST_DECODE not in found


def test_raw_features_are_the_request_and_the_queue_it_met(run, window):
    row = rows(run, window, "meets a step")[Target.QUEUE_WAIT]
    values = dict(zip(REQUEST_FEATURES, row.raw, strict=True))
    met = run.summaries[3]
    assert (values["prompt_tokens"], values["output_tokens"]) == (50, 20)
    assert values["waiting"] == met["queue.waiting_depth"]
    assert values["running"] == met["queue.running_depth"]
    assert values["kv_usage_ratio"] == met["kv.usage_gpu_ratio"]


def test_a_summary_older_than_a_second_says_nothing_about_the_queue(window, run):
    last_ns = run.summaries[-1]["step.ts_start_ns"]
    last = run.summaries[-1]["step.id"]
    assert queue_state(window, last, last_ns + 10**9) == queue_state(window, last, last_ns)
    assert math.isnan(queue_state(window, last, last_ns + 10**9 + 1)[2]), "the KV usage is in summaries only"
    assert all(math.isnan(value) for value in queue_state(window, 0, run.summaries[0]["step.ts_start_ns"] - 1))
    assert all(math.isnan(value) for value in queue_state(StepWindow(), last, last_ns))


def test_halves_meet_in_either_order_and_whoever_has_none_is_counted():
    run = run_engine(many_jobs(60))
    everything = pieces(run)
    last = sorted(everything, key=lambda piece: piece.scope == "vllm.api")
    expected = coefficients(replayed(exports_of(everything, 10**6)))
    assert coefficients(replayed(exports_of(last, 10**6))) == expected
    assert coefficients(replayed(exports_of(last[::-1], 10**6))) == expected
    assert expected[next(key for key in expected if key[1:] == ("post_decode", "intercept"))] == pytest.approx(
        900, rel=1e-3
    )
    alone = replayed(exports_of(pieces(run, apis=False)))
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
    (config,) = pipeline.snapshot(0, 1).configs
    assert config.targets["step_time"].mean_us < 20_000, "the 12 s are in no row"
