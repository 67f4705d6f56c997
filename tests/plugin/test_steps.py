"""Each step is told as it was, in every version's shape, in both scheduling modes and on both wires."""

from types import SimpleNamespace

import pytest
import tracefit_vllm.tap
from hypothesis import given, settings
from hypothesis import strategies as st
from tracefit_vllm.otlp import STEP_KEYS, step_numbers
from tracefit_vllm.publisher import Step

from tests.plugin.conftest import kept_scheduler
from tests.plugin.fakes import AsyncScheduler, Request, Scheduler, Status, drive, vllm_config

REQUESTS = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 12), st.integers(0, 100)),  # prompt, outputs, cached
    min_size=1,
    max_size=12,
)


def rows(kept):
    return [dict(zip(STEP_KEYS, step_numbers(item), strict=True)) for item in kept.items if isinstance(item, Step)]


def journeys(kept):
    return dict(item for item in kept.items if not isinstance(item, Step))


def kinds(events):
    return [event.name.removeprefix("journey.") for event in events]


@pytest.mark.parametrize("resumed_are_new", [False, True])
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
@settings(max_examples=10)
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
            assert [item[1:] for item in kept.items] == scheduler.passes
        else:
            got = rows(kept)
            assert len(got) == len(scheduler.truth)
            for row, truth in zip(got, scheduler.truth, strict=True):
                assert {key: row[key] for key in truth} == truth
            assert len(journeys(kept)) == len(requests)


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
    assert [round(item[0] * 1e3) for item in run("fpm").items] == 2 * [first, 13, 13, 13]


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
    assert len(kept.items) == (wire == "otlp")  # the second was empty
    drive(scheduler, 200)
    assert not kept.lost


def test_a_request_is_queued_scheduled_given_its_first_token_and_finished():
    scheduler, kept = kept_scheduler("otlp")
    drive(scheduler, 3)
    scheduler.add_request(Request("a", 100, 3, cached=20))
    drive(scheduler, 5)
    events = journeys(kept)["a"]
    assert kinds(events) == ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]
    assert [event.attributes["scheduler.step"] for event in events] == [3, 4, 5, 7]  # 84 tokens in chunks of 64
    assert [event.attributes["decode.done_tokens"] for event in events] == [0, 0, 1, 3]
    assert {event.attributes["prefill.total_tokens"] for event in events} == {100}
    assert events[-1].attributes["finish.status"] == "length"
    done = {row["step.id"]: row["step.ts_done_ns"] for row in rows(kept)}
    times = [event.attributes["ts.monotonic_ns"] for event in events]
    assert times == sorted(times)
    assert times[2:] == [done[5], done[7]]


@pytest.mark.parametrize("resumed_are_new", [False, True])
def test_preempted_requests_resume_and_all_of_them_end(resumed_are_new):
    scheduler, kept = kept_scheduler("otlp", resumed_are_new=resumed_are_new, blocks=20)
    for number in range(4):
        scheduler.add_request(Request(f"r{number}", 60, 40))
    drive(scheduler, 250)
    found = [kinds(events) for events in journeys(kept).values()]
    assert len(found) == 4
    for events in found:
        assert (events[0], events[-1], events.count("FIRST_TOKEN")) == ("QUEUED", "FINISHED", 1)
        assert events.count("SCHEDULED") == 1 + events.count("PREEMPTED")
    assert sum(events.count("PREEMPTED") for events in found) > 0


def test_the_fork_that_traces_journeys_itself_is_not_doubled():
    config = vllm_config()
    config.observability_config.enable_journey_tracing = True
    scheduler, kept = kept_scheduler("otlp", config=config)
    scheduler.add_request(Request("a", 10, 2))
    drive(scheduler, 4)
    assert not journeys(kept)
    assert len(rows(kept)) == 4
