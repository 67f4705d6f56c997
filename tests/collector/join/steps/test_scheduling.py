"""Synchronous or asynchronous, from where end stamps lie; decided once there is enough, then re-checked."""

from __future__ import annotations

import numpy as np
import pytest

from collector.decode.records import STEP_DTYPE
from collector.join.steps.scheduling import Scheduling, SchedulingVotes, votes
from collector.join.window import REBUILT_DTYPE
from tests.support.paths import DATA
from tests.support.pipelines import replayed
from tests.support.recordings import recording
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import exports_of as exports
from tests.support.toy_spans import pieces


def columns(before: int, after: int, *, seen: bool = True):
    """``before`` steps whose end stamp precedes the next start, then ``after`` whose end follows it."""
    count = before + after + 1
    steps, cells = np.zeros(count, STEP_DTYPE), np.zeros(count, REBUILT_DTYPE)
    starts = 1000 + 1000 * np.arange(count)
    steps["ts_start_ns"], cells["seen"] = starts, seen
    if not seen:
        cells["scheduled_ns"] = starts
    cells["completed_ns"][:-1] = starts[1:] + np.where(np.arange(count - 1) < before, -100, 100)
    return steps, cells


@pytest.mark.parametrize("seen", [True, False])
def test_an_end_before_the_next_start_is_synchronous_an_end_after_it_is_not(seen):
    assert votes(*columns(5, 0, seen=seen)) == (5, 0)
    assert votes(*columns(0, 7, seen=seen)) == (0, 7)


def test_steps_without_an_end_or_a_next_start_do_not_vote():
    steps, cells = columns(5, 0)
    cells["completed_ns"][1] = 0
    cells["seen"][4] = False
    assert votes(steps, cells) == (3, 0)


def test_too_few_votes_decide_nothing():
    told = SchedulingVotes()
    told.add(*columns(7, 0))
    assert told.decided is Scheduling.UNKNOWN
    assert told.provisional(*columns(7, 0)) is Scheduling.UNKNOWN
    told.add(*columns(1, 0))
    assert told.decided is Scheduling.SYNC


def test_few_votes_a_block_still_decide_in_time():
    told = SchedulingVotes()
    for _ in range(8):
        told.add(*columns(0, 1))
        told.settle_block()
    assert told.decided is Scheduling.ASYNC


def test_a_decision_changes_only_against_a_clear_majority():
    told = SchedulingVotes()
    told.add(*columns(0, 20))
    told.settle_block()
    told.add(*columns(15, 5))
    told.settle_block()
    assert told.decided is Scheduling.ASYNC
    for _ in range(6):
        told.add(*columns(30, 0))
        told.settle_block()
    assert told.decided is Scheduling.SYNC


def test_looking_does_not_count():
    told = SchedulingVotes()
    for _ in range(5):
        assert told.provisional(*columns(0, 9)) is Scheduling.ASYNC
    assert (told.sync, told.asynchronous) == (0, 0)


def test_the_end_of_a_stream_decides_with_what_there_is_else_synchronous():
    assert SchedulingVotes().settle(*columns(0, 2)) is Scheduling.ASYNC
    assert SchedulingVotes().settle(*columns(0, 0)) is Scheduling.SYNC


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_the_mode_of_an_engine_is_found_and_published(asynchronous, steps):
    run = run_engine(many_jobs(200), asynchronous=asynchronous)
    pipeline = replayed(exports(pieces(run, steps=steps)))
    (engine,) = pipeline.snapshot(0, 1).configs[0].engines
    assert engine.scheduling == ("async" if asynchronous else "sync")


@pytest.mark.parametrize(("name", "mode"), [("c3_preempt", "sync"), ("c7_async_sim", "async")])
def test_the_mode_of_a_recorded_engine_is_found(name, mode):
    pipeline = replayed(recording(DATA / name / "otlp.pb.gz"))
    assert [engine.scheduling for engine in pipeline.snapshot(0, 1).configs[0].engines] == [mode]
