"""What a sender claims of time and of step ids stops nobody else: beside a bad sender an honest one is learned."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache

import pytest

from collector.decode import Export
from collector.join.events import Rows
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent, Skip
from online import RowOutcome, Target
from tests.support.clocks import T0_NS
from tests.support.pipelines import by_label, new_pipeline
from tests.support.step_exports import STEP_US, make_export
from tests.support.toy_spans import span_id

STEPS = 50
"""Of a second."""


@cache
def said(second: int, instance: str = "honest", *, steps=STEPS, ahead_s=0.0, later_ids=0, known=True) -> Export:
    """What an engine sends of one second, one second later; ``known``: whether it is known when it came in."""
    request = make_export(1, steps_per_span=steps, first_step=1 + second * STEPS, instance=instance)
    (span,) = request.resource_spans[0].scope_spans[0].spans
    ahead_ns = int(ahead_s * 1e9)
    span.start_time_unix_nano += ahead_ns
    span.end_time_unix_nano += ahead_ns
    span.span_id = span_id(f"{instance} {second} {ahead_ns} {later_ids}")
    for event in span.events:
        event.time_unix_nano += ahead_ns
        for attribute in event.attributes:
            if attribute.key == "step.id":
                attribute.value.int_value += later_ids
            elif attribute.key.startswith("step.ts_"):
                attribute.value.int_value += 7_000_000 * sum(instance.encode())
    arrived_unix_ns = T0_NS + (second + 2) * STEPS * STEP_US * 1000 if known else 0
    return Export(request.SerializeToString(), "peer", 1, arrived_unix_ns=arrived_unix_ns)


def counting(pipeline):
    """How many rows of each engine reach the learners."""
    rows = Counter()

    def count(event):
        if isinstance(event, Rows) and event.target is Target.STEP_TIME:
            for number, instance in event.engines.items():
                rows[instance] += int((event.rows.engine == number).sum())

    pipeline.on_event = count
    return rows


def happened(pipeline):
    return Counter(by_label(pipeline.take_counts(), table.JOIN_EVENTS))


def fed(exports, pipeline=None, **join):
    pipeline = pipeline or new_pipeline(**join)
    rows = counting(pipeline)
    for export in exports:
        pipeline.process([export])
    return pipeline, rows


@pytest.mark.parametrize("ahead_s", [0.0, 290.0, 3600.0])
def test_an_engine_whose_clock_is_ahead_evicts_nobody_when_all_places_are_taken(ahead_s):
    def everybody():
        for second in range(15):
            yield from (said(second, f"engine-{n}") for n in range(4))
            yield said(second, "ahead", ahead_s=ahead_s)

    pipeline, rows = fed(everybody(), engines_max=4)
    counts = pipeline.take_counts()
    assert counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] == 0
    assert counts[table.SIZE, "engines"] == 4
    assert "ahead" not in rows
    assert counts[table.DECODED_SPANS, Skip.OUT_OF_RANGE] == (15 if ahead_s > 300 else 0)


def test_an_engine_that_nothing_came_from_for_the_window_makes_room_whatever_times_it_had_claimed():
    gone = [said(second, "gone", ahead_s=290.0) for second in range(5)]
    pipeline, rows = fed([*gone, *(said(second) for second in range(190, 260))], engines_max=1)
    assert happened(pipeline)[JoinEvent.ENGINE_EVICTED] == 1
    assert rows["honest"] > 0


@pytest.fixture(scope="module")
def undisturbed_rows():
    """How many rows of the first 80 seconds reach the learners where nobody else sends, and some are learned."""
    pipeline, rows = fed(map(said, range(80)))
    assert pipeline.take_counts()[table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED] > 0
    return rows["honest"]


JUMPS = [(0.0, 60_000), (290.0, 10**12), (10.0, STEPS)]


def interrupted(until, **odd):
    """Two odd steps under the engine's name, between others."""
    return [*map(said, range(31)), said(30, steps=2, **odd), *map(said, range(31, until))]


@pytest.mark.parametrize(("ahead_s", "later_ids"), JUMPS)
def test_one_span_under_a_neighbours_name_does_not_stop_that_engine(ahead_s, later_ids, undisturbed_rows):
    pipeline, rows = fed(interrupted(80, ahead_s=ahead_s, later_ids=later_ids))
    (engine,) = pipeline.joiner.engines.values()
    assert sum(process.window.size for process in engine.processes) < 2 * 80 * STEPS, "no place for the steps between"
    assert rows["honest"] > 0.98 * undisturbed_rows
    events = happened(pipeline)
    assert events[JoinEvent.STEP_LATE] == events[JoinEvent.ENGINE_RESTART] == 0
    assert events[JoinEvent.MISSING] <= STEPS


def clock_set_back(before_s, after_s):
    parts = (range(90), before_s), (range(90, 180), after_s)
    return [said(second, ahead_s=ahead_s) for seconds, ahead_s in parts for second in seconds]


INTERRUPTIONS = {
    "the next steps, ahead of time": (lambda: interrupted(180, ahead_s=120.0, later_ids=STEPS), 155, {}),
    "like a restart": (lambda: interrupted(90, ahead_s=10.0, later_ids=-100), 70, {JoinEvent.STEP_LATE: 0}),
    "a neighbour now and then": (
        lambda: [*interrupted(61, later_ids=60_000), said(60, steps=2, later_ids=60_000), *map(said, range(61, 120))],
        *(95, {JoinEvent.ENGINE_RESTART: 0, JoinEvent.ENGINE_CONFLICT: 4}),
    ),
    "a clock set back by an hour": (lambda: clock_set_back(0.0, -3600.0), 140, {JoinEvent.ENGINE_RESTART: 0}),
    "a hundred thousand steps lost": (
        lambda: [*map(said, range(30)), *map(said, range(2_030, 2_120))],
        *(90, {JoinEvent.ENGINE_RESTART: 1, JoinEvent.ENGINE_CONFLICT: 0}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", INTERRUPTIONS)
def test_an_engine_goes_on_being_learned_behind_what_interrupts_it(which):
    stream, seconds, expected = INTERRUPTIONS[which]
    pipeline, rows = fed(stream())
    assert rows["honest"] > 0.95 * seconds * STEPS
    events = happened(pipeline)
    assert {event: events[event] for event in expected} == expected


def test_a_clock_that_is_ahead_is_said_once_in_an_hour_with_how_far(caplog):
    with caplog.at_level(logging.WARNING):
        fed([said(second, name, ahead_s=3600.0) for second in range(20) for name in ("one", "other")])
    said_of = [record.getMessage() for record in caplog.records if "ahead of the clock here" in record.getMessage()]
    assert len(said_of) == 2
    assert said_of[0].startswith("'one' tells of times that lie 3599 s ahead")
