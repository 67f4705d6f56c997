"""Requests leave as the fork's llm_core spans, with the fork's rules for steps, phases and counts."""

from __future__ import annotations

import pytest
from tracefit_vllm.items import StepRow
from tracefit_vllm.journeys import Finished, Journeys

from tests.plugin.fakes import AsyncScheduler, Request, Scheduler, Shape, Status, drive
from tests.plugin.test_batch import tapped

KIND, TS, STEP, PHASE, DONE, PROMPT, OUTPUTS, MAX, PREEMPTIONS, EXTRA = range(10)


def journeys(sink):
    return {item.request_id: item.events for item in sink.items if isinstance(item, Finished)}


def test_a_request_is_queued_scheduled_given_its_first_token_and_finished(sink):
    scheduler = Scheduler()
    tapped(scheduler, sink)
    drive(scheduler, 3)
    scheduler.add_request(Request("a", 100, 3, cached=20))
    drive(scheduler, 5)
    queued, scheduled, first, finished = journeys(sink)["a"]
    assert queued[KIND] == "QUEUED"
    assert (queued[STEP], queued[PHASE], queued[DONE]) == (3, "WAITING", 0)
    assert (scheduled[KIND], scheduled[STEP], scheduled[PHASE], scheduled[EXTRA]) == (
        "SCHEDULED",
        4,
        "PREFILL",
        "FIRST",
    )
    assert scheduled[DONE] == 0  # even with cached tokens: no schedule() had been completed
    assert (first[KIND], first[STEP], first[PHASE]) == ("FIRST_TOKEN", 5, "DECODE")  # 84 tokens in chunks of 64
    assert (first[DONE], first[OUTPUTS], first[MAX]) == (100, 1, 3)
    assert (finished[KIND], finished[STEP], finished[OUTPUTS], finished[EXTRA]) == ("FINISHED", 7, 3, "length")
    times = [event[TS] for event in (queued, scheduled, first, finished)]
    assert times == sorted(times)


@pytest.mark.parametrize("shape", list(Shape))
def test_a_preempted_request_resumes_and_keeps_its_counts(sink, shape):
    scheduler = Scheduler(shape, blocks=20)
    tapped(scheduler, sink)
    for number in range(4):
        scheduler.add_request(Request(f"r{number}", 60, 40))
    drive(scheduler, 250)
    found = journeys(sink)
    assert len(found) == 4
    preempted = 0
    for events in found.values():
        kinds = [event[KIND] for event in events]
        assert kinds[0] == "QUEUED"
        assert kinds[-1] == "FINISHED"
        assert kinds.count("FIRST_TOKEN") == 1
        assert [e[EXTRA] for e in events if e[KIND] == "SCHEDULED"] == ["FIRST"] + ["RESUME"] * kinds.count("PREEMPTED")
        for number, event in enumerate((e for e in events if e[KIND] == "PREEMPTED"), 1):
            preempted += 1
            assert event[PREEMPTIONS] == number
        done = [event[DONE] for event in events]
        assert done == sorted(done)  # a high-water mark
    assert preempted > 0


def test_the_step_of_a_summary_is_the_step_of_its_journey_events(sink):
    scheduler = Scheduler(blocks=20)
    tapped(scheduler, sink)
    for number in range(4):
        scheduler.add_request(Request(f"r{number}", 60, 40))
    drive(scheduler, 250)
    times = {item.values[0]: (item.values[1], item.done_ns) for item in sink.items if isinstance(item, StepRow)}
    for events in journeys(sink).values():
        for event in events:
            start_ns, done_ns = times.get(event[STEP], (0, 0))
            if event[KIND] != "QUEUED":
                assert start_ns <= event[TS] <= done_ns


def test_an_abort_ends_the_journey_at_once_with_the_last_scheduled_step(sink):
    scheduler = Scheduler()
    tapped(scheduler, sink)
    scheduler.add_request(Request("a", 500, 50))
    drive(scheduler, 2)
    scheduler.add_request(Request("b", 10, 5))
    scheduler.finish_requests(["a", "b"], Status.FINISHED_ABORTED)
    found = journeys(sink)
    assert [e[KIND] for e in found["a"]] == ["QUEUED", "SCHEDULED", "FINISHED"]
    assert [e[KIND] for e in found["b"]] == ["QUEUED", "FINISHED"]
    assert found["a"][-1][STEP] == 2
    assert found["a"][-1][EXTRA] == "aborted"
    assert found["a"][-1][DONE] == 128  # two chunks of 64
    drive(scheduler, 2)
    assert len(journeys(sink)) == 2


def test_under_asynchronous_scheduling_the_step_is_the_one_that_made_the_token(sink):
    scheduler = AsyncScheduler()
    tapped(scheduler, sink)
    scheduler.add_request(Request("a", 30, 4))
    drive(scheduler, 10)
    events = journeys(sink)["a"]
    assert [(e[KIND], e[STEP]) for e in events] == [
        ("QUEUED", 0),
        ("SCHEDULED", 1),
        ("FIRST_TOKEN", 1),
        ("FINISHED", 4),
    ]


def test_nothing_of_a_finished_request_is_kept(sink):
    scheduler = Scheduler()
    tap = tapped(scheduler, sink)
    for number in range(50):
        scheduler.add_request(Request(f"r{number}", 40, 3))
        drive(scheduler, 4)
    drive(scheduler, 100)
    assert len(scheduler.finished) == 50
    assert not tap._journeys.open
    assert not tap._prefilling
    assert not tap._pending


def test_nothing_of_a_request_aborted_in_its_prefill_is_kept(sink):
    scheduler = Scheduler()
    tap = tapped(scheduler, sink)
    scheduler.add_request(Request("a", 500, 3))
    drive(scheduler, 2)
    assert set(tap._prefilling) == {"a"}
    scheduler.finish_requests("a", Status.FINISHED_ABORTED)
    drive(scheduler, 1)
    assert not tap._prefilling


def test_prompt_tokens_done_are_a_high_water_mark_over_preemptions():
    followed = Journeys()
    request = Request("a", 100, 5)
    followed.queued(request, 0, 0)
    for computed in (64, 0, 30, 90, 120):
        request.num_computed_tokens = computed
        followed.computed("a")
        followed.open["a"].add("PREEMPTED", 1, 1)
    assert [event[DONE] for event in followed.open["a"].events] == [0, 64, 64, 64, 90, 100]


def test_requests_beyond_the_bound_are_not_followed_but_counted(sink, monkeypatch):
    monkeypatch.setattr("tracefit_vllm.journeys.OPEN_MAX", 2)
    scheduler = Scheduler()
    tapped(scheduler, sink)
    for number in range(5):
        scheduler.add_request(Request(f"r{number}", 5, 1))
    drive(scheduler, 10)
    assert sorted(journeys(sink)) == ["r0", "r1"]
    assert sink.counts == ["open_requests"] * 3


def test_a_journey_keeps_a_bounded_number_of_events_and_always_its_end():
    scheduler = Scheduler()
    followed = Journeys()
    request = Request("a", 5, 5)
    followed.queued(request, 0, 0)
    for step in range(1000):
        followed.first_token("a", step, step)
    request.status = Status.FINISHED_STOPPED
    (done,) = followed.finished({"a"}, 1000, 1000, 0)
    assert len(done.events) == 257
    assert done.dropped == 1001 - 256
    assert done.events[-1][KIND] == "FINISHED"
    assert done.events[-1][EXTRA] == "stopped"
    assert scheduler.truth == []


def test_the_fork_that_traces_journeys_itself_is_not_doubled(sink):
    scheduler = Scheduler()
    scheduler.vllm_config.observability_config.enable_journey_tracing = True
    tapped(scheduler, sink)
    scheduler.add_request(Request("a", 10, 2))
    drive(scheduler, 4)
    assert not journeys(sink)
    assert sum(isinstance(item, StepRow) for item in sink.items) == 4
