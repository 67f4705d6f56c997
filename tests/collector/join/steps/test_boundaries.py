"""The best stamp of every step boundary, and which of them may be compared."""

from __future__ import annotations

import numpy as np

from collector.decode.records import STEP_DTYPE
from collector.join.steps.boundaries import (
    COMPLETED,
    SCHEDULED,
    START,
    done_stamps,
    empty_steps,
    phase_columns,
    stamps,
)
from collector.join.window import REBUILT_DTYPE

UNIX = 10**18


def columns(count: int, *, seen=(), tokens=4, start_us=100):
    """Steps 0..count-1; those in ``seen`` have a summary, step i starts at 1 s + i x start_us."""
    steps, cells = np.zeros(count, STEP_DTYPE), np.zeros(count, REBUILT_DTYPE)
    steps["ts_start_ns"] = 10**9 + np.arange(count) * start_us * 1000
    steps["ts_end_ns"] = steps["ts_start_ns"] + 10_000
    steps["unix_ns"] = steps["ts_end_ns"] + UNIX
    steps["ts_done_ns"] = -1
    steps["scheduled_tokens"] = tokens
    cells["seen"][list(seen)] = True
    return steps, cells


def none_empty(count):
    return np.zeros(count, bool)


def test_a_summary_is_the_start_of_its_own_step_when_synchronous():
    steps, cells = columns(6, seen=range(6))
    found = stamps(steps, cells, none_empty(6), asynchronous=False)
    assert found.step.tolist() == [1, 2, 3, 4]
    assert found.ns.tolist() == steps["ts_start_ns"][1:5].tolist()
    assert found.unix_ns.tolist() == (steps["ts_start_ns"][1:5] + UNIX).tolist()
    assert (found.kind == START).all()


def test_a_summary_is_the_start_of_the_step_before_when_asynchronous():
    steps, cells = columns(6, seen=range(6))
    found = stamps(steps, cells, none_empty(6), asynchronous=True)
    assert found.step.tolist() == [1, 2, 3, 4]
    assert found.ns.tolist() == steps["ts_start_ns"][2:6].tolist()


def test_an_asynchronous_step_without_tokens_starts_nothing():
    steps, cells = columns(6, seen=range(6))
    empty = np.array([False, False, True, False, False, False])
    assert stamps(steps, cells, empty, asynchronous=True).step.tolist() == [1, 3, 4]
    assert stamps(steps, cells, empty, asynchronous=False).step.tolist() == [1, 2, 3, 4]


def test_without_a_summary_the_end_of_the_step_before_is_the_boundary():
    steps, cells = columns(6, seen=[1, 4])
    cells["completed_ns"][2], cells["completed_unix_ns"][2] = 5_000, 6_000
    found = stamps(steps, cells, none_empty(6), asynchronous=False)
    assert found.step.tolist() == [1, 3, 4]
    assert found.kind.tolist() == [START, COMPLETED, START]
    assert (found.ns[1], found.unix_ns[1]) == (5_000, 6_000)


def test_a_scheduled_stamp_serves_where_there_is_nothing_better():
    steps, cells = columns(6, seen=[1])
    cells["scheduled_ns"][3], cells["scheduled_unix_ns"][3] = 7_000, 8_000
    cells["scheduled_ns"][2] = cells["completed_ns"][1] = 4_000
    found = stamps(steps, cells, none_empty(6), asynchronous=False)
    assert found.step.tolist() == [1, 2, 3]
    assert found.kind.tolist() == [START, COMPLETED, SCHEDULED]
    shifted = stamps(steps, cells, none_empty(6), asynchronous=True)
    assert shifted.kind[shifted.step == 2].tolist() == [COMPLETED]


def test_boundaries_without_any_stamp_are_left_out():
    steps, cells = columns(8, seen=[])
    found = stamps(steps, cells, none_empty(8), asynchronous=False)
    assert len(found.step) == 0


def test_a_plugin_stamps_the_end_of_a_step_itself_in_either_mode():
    steps, cells = columns(6, seen=range(6))
    steps["ts_done_ns"] = steps["ts_start_ns"] + 90_000
    found = done_stamps(steps, cells, none_empty(6))
    assert found.step.tolist() == [1, 2, 3, 4]
    assert found.ns.tolist() == steps["ts_done_ns"][:4].tolist()
    assert (found.kind == START).all()


def test_after_an_idle_step_of_a_plugin_the_next_one_starts_at_its_own_stamp():
    steps, cells = columns(6, seen=range(6))
    steps["ts_done_ns"] = steps["ts_start_ns"] + 90_000
    empty = np.array([False, False, True, False, False, False])
    found = done_stamps(steps, cells, empty)
    assert found.ns.tolist() == [
        steps["ts_done_ns"][0],
        steps["ts_done_ns"][1],
        steps["ts_start_ns"][3],
        steps["ts_done_ns"][3],
    ]


def test_a_plugin_step_without_its_end_stamps_no_boundary():
    steps, cells = columns(6, seen=range(6))
    steps["ts_done_ns"] = steps["ts_start_ns"] + 90_000
    steps["ts_done_ns"][2] = -1
    assert done_stamps(steps, cells, none_empty(6)).step.tolist() == [1, 2, 4]


def test_empty_is_told_by_the_summary_else_by_the_journeys():
    steps, cells = columns(4, seen=[0, 1], tokens=0)
    steps["scheduled_tokens"][1] = 3
    cells["prefill_requests"][[0, 3]] = 5, 1
    cells["decode_requests"][3] = 1
    assert empty_steps(steps, cells, asynchronous=False).tolist() == [True, False, True, False]


def test_phases_are_differences_and_completed_is_the_reference_without_start_stamps():
    kind = np.array([START, COMPLETED, SCHEDULED, START])
    with_start = phase_columns(kind, has_start=True)
    assert with_start[:, COMPLETED].tolist() == [1.0, -1.0, 0.0]
    assert with_start[:, SCHEDULED].tolist() == [0.0, 1.0, -1.0]
    without = phase_columns(np.array([COMPLETED, SCHEDULED, COMPLETED]), has_start=False)
    assert (without[:, COMPLETED] == 0).all()
    assert without[:, SCHEDULED].tolist() == [1.0, -1.0]
