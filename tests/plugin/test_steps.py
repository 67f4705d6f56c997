"""Each step is told as it was, in every version's shape, in both scheduling modes and on both wires."""

from types import SimpleNamespace

import pytest
import tracefit_vllm.tap
from hypothesis import given, settings
from hypothesis import strategies as st
from tracefit_vllm.otlp import STEP_KEYS, step_numbers

from tests.plugin.conftest import kept_scheduler
from tests.plugin.fakes import AsyncScheduler, Request, Scheduler, Status, drive

REQUESTS = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 12), st.integers(0, 100)),  # prompt, outputs, cached
    min_size=1,
    max_size=12,
)


def rows(kept):
    return [dict(zip(STEP_KEYS, step_numbers(step), strict=True)) for step in kept.steps]


def passes(kept):
    return [step for step in kept.steps if step.batch[0] + step.batch[3]]


@pytest.mark.parametrize("resumed_are_new", [False, True])
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
@settings(max_examples=settings.default.max_examples // 3)
@given(requests=REQUESTS, aborts=st.sets(st.integers(0, 11)), blocks=st.integers(20, 40))
def test_every_step_is_told_as_it_was_on_both_wires(resumed_are_new, kind, requests, aborts, blocks):
    for wire in ("fpm", "otlp"):
        scheduler, kept = kept_scheduler(wire, kind, resumed_are_new=resumed_are_new, blocks=blocks)
        for number, (prompt, outputs, cached) in enumerate(requests):
            scheduler.add_request(Request(f"r{number}", prompt, outputs, cached))
            drive(scheduler, 2)
            if number in aborts:
                scheduler.finish_requests(f"r{number}", Status.FINISHED_ABORTED)
        drive(scheduler, 120)
        assert not kept.lost
        if wire == "fpm":
            assert [step.batch for step in passes(kept)] == scheduler.passes
        else:
            got = rows(kept)
            assert len(got) == len(scheduler.truth)
            for row, truth in zip(got, scheduler.truth, strict=True):
                assert {key: row[key] for key in truth} == truth


@pytest.fixture(params=[Scheduler, AsyncScheduler])
def timed(request, monkeypatch):
    """Two requests after each other on an engine that takes 1 ms to schedule, 10 for the model, 2 for its output."""
    now = SimpleNamespace(ns=10**15)
    monkeypatch.setattr(tracefit_vllm.tap, "time", SimpleNamespace(monotonic_ns=lambda: now.ns, time_ns=lambda: 1))

    class Timed(request.param):
        def schedule(self, *args):
            now.ns += 1_000_000
            return super().schedule(*args)

        def update_from_output(self, *args):
            now.ns += 2_000_000
            return super().update_from_output(*args)

    def run(wire):
        scheduler, kept = kept_scheduler(wire, Timed)
        for _ in range(2):
            scheduler.add_request(Request(f"r{now.ns}", 30, 4))
            in_flight = []
            while scheduler.requests or in_flight:
                if scheduler.requests:
                    in_flight.append(scheduler.schedule())
                if len(in_flight) > scheduler.asynchronous or not scheduler.requests:
                    now.ns += 10_000_000
                    scheduler.update_from_output(in_flight.pop(0), "outputs")
            now.ns += 5_000_000_000
        return kept

    return run, request.param is AsyncScheduler


def test_a_pass_takes_from_output_to_output_and_an_idle_time_is_of_none(timed):
    run, overlapped = timed
    first = 14 if overlapped else 13  # the second step is scheduled while the first one runs
    assert [(step.done_ns - step.since_ns) // 10**6 for step in passes(run("fpm"))] == 2 * [first, 13, 13, 13]


def test_a_step_has_its_four_times_and_its_duration_is_that_of_schedule(timed):
    run, overlapped = timed
    got = [row for row in rows(run("otlp")) if row["batch.scheduled_tokens"]]
    assert len(got) == 8
    for row in got:
        assert row["step.duration_us"] == 1000
        assert row["step.ts_end_ns"] - row["step.ts_start_ns"] == 1_000_000
        assert row["step.ts_done_ns"] - row["step.ts_output_ns"] == 2_000_000
        waits_ms = (row["step.ts_output_ns"] - row["step.ts_end_ns"]) // 10**6
        assert waits_ms in ((11, 23) if overlapped else (10,))


@pytest.mark.parametrize("wire", ["fpm", "otlp"])
def test_a_step_whose_output_never_comes_is_left_out_and_harms_no_other(wire):
    scheduler, kept = kept_scheduler(wire)
    scheduler.add_request(Request("a", 30, 5))
    scheduler.schedule()
    scheduler.update_from_output(scheduler.schedule(), "outputs")
    assert [step.number for step in kept.steps] == [2]
    drive(scheduler, 200)
    assert not kept.lost
