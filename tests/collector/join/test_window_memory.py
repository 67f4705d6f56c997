"""What a held step takes, and that states from when it took more go on."""

from __future__ import annotations

import copy

import numpy as np

from collector.decode.records import STEP_DTYPE
from collector.join.window import REBUILT_DTYPE, SUMMARY_DTYPE, StepWindow


def steps(first, count):
    out = np.zeros(count, STEP_DTYPE)
    out["step_id"] = np.arange(first, first + count)
    out["ts_start_ns"] = 10**15 + out["step_id"]
    out["prefill_tokens"] = (1 << 31) - 1
    out["ts_done_ns"] = out["multi_requests"] = -1
    return out


def test_a_held_step_takes_less_than_300_bytes_however_many_there_are():
    window = StepWindow(1)
    for first in range(1, 40_001, 250):
        window.reach_within(first, first + 249, 1 << 16, keep_from=0)
        window.add_summaries(steps(first, 250))
        held = window.steps.nbytes + window.rebuilt.nbytes
        assert first < 8000 or held <= 300 * window.size
    assert window.size == 40_000
    kept = window.steps[window.size - 1]
    assert (kept["prefill_tokens"], kept["ts_done_ns"], kept["multi_requests"]) == ((1 << 31) - 1, -1, -1)


def test_giving_up_gives_the_memory_back():
    window = StepWindow(1)
    window.reach(1, 40_000)
    window.add_summaries(steps(1, 40_000))
    window.give_up_before(39_001)
    assert (window.base, window.size) == (39_001, 1000)
    assert window.steps.nbytes + window.rebuilt.nbytes <= 300 * 1024
    assert window.steps["ts_start_ns"][0] == 10**15 + 39_001


def test_a_copy_of_a_window_goes_its_own_way():
    window = StepWindow(1)
    window.reach(1, 200)
    window.add_summaries(steps(1, 100))
    twin = copy.deepcopy(window)
    for one, added in ((window, steps(101, 50)), (twin, steps(151, 50))):
        one.add_summaries(added)
    twin.reach(201, 3000)
    assert np.flatnonzero(window.rebuilt["seen"][: window.size]).tolist() == [*range(150)]
    assert np.flatnonzero(twin.rebuilt["seen"][: twin.size]).tolist() == [*range(100), *range(150, 200)]
    assert (window.steps["ts_start_ns"][:100] == twin.steps["ts_start_ns"][:100]).all()
    assert (window.size, twin.size) == (200, 3000)


def test_every_field_that_can_be_read_from_memory_is_aligned():
    for dtype in (SUMMARY_DTYPE, REBUILT_DTYPE):
        assert dtype.itemsize % 8 == 0
        assert all(offset % field.alignment == 0 for field, offset, *_ in dtype.fields.values())
