"""What people see of a step beside the snapshot: the last rows as they were predicted, and the course of a day."""

import copy

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from online.state import decode, encode
from online.target.history import DAY_NS, POINTS_MAX, ROWS_MAX, SPACING_NS, CoefficientHistory
from tests.support.banks import STEP, learned, of_columns, restarted
from tests.support.linear_steps import repeated, steps

S = 1_000_000_000


@pytest.mark.parametrize("steps_of_a_row", [1, 4])
def test_the_last_rows_stand_per_step_beside_what_was_predicted_of_them(steps_of_a_row):
    simulated = steps(1024, 1)
    rows = learned(repeated(simulated.rows, steps_of_a_row)).history("c").view()
    assert rows.observed_us == pytest.approx(simulated.rows.elapsed_us[-ROWS_MAX:], rel=1e-6)
    assert rows.predicted_us == pytest.approx(simulated.truth_us[-ROWS_MAX:], rel=0.05)


def test_a_view_stays_as_it_was_while_learning_goes_on():
    bank = learned(steps(1000, 2).rows)
    view = bank.history("c").view()
    before = copy.deepcopy(view)
    bank.learn("c", STEP, steps(500, 3).rows)
    assert view == before
    assert bank.history("c").view().observed_us != before.observed_us


def test_the_course_survives_a_restart():
    bank = learned(steps(1500, 2, drift_at=900, gain=1.5).rows)
    before, after = (each.history("c").view() for each in (bank, restarted(bank)))
    assert after.points == before.points
    assert after.features == before.features == ("intercept", "prefill_tokens", "decode_context_tokens", "requests")
    point = after.points[-1]
    assert point.coefficient[0] == pytest.approx(9000 * 1.5, rel=0.2)
    assert all(bar > 0 for bar in point.stderr)
    assert after.observed_us == []


def test_after_a_restart_with_other_feature_sets_the_history_is_of_the_new_ones():
    bank = learned(steps(1500, 2).rows)
    again = restarted(bank, of_columns("prefill_tokens", "requests"))
    course = bank.history("c").view().points
    again.learn("c", STEP, steps(600, 3, start_ns=course[-1].at_ns + 1).rows)
    again.learn("c", STEP, steps(3000, 3, start_ns=course[-1].at_ns + 60 * S).rows)
    view = again.history("c").view()
    assert view.features == ("prefill_tokens", "requests")
    assert len(view.points[-1].coefficient) == len(view.features)


def times_of(course):
    return [point.at_ns for point in course.points]


def filled(times_ns, p=2):
    course = CoefficientHistory()
    for at_ns in times_ns:
        course.record(at_ns, [f"f{i}" for i in range(p)], lambda: (np.arange(1.0 * p), np.ones(p)))
    return course


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(S, 2 * SPACING_NS))
@example(717, 126_315_789_474)  # where points came too seldom for the distance of the day's beginning
def test_the_course_is_bounded_grows_and_reaches_back_a_day(n, apart_ns):
    times = [DAY_NS + i * apart_ns for i in range(n)]
    at_ns = np.array(times_of(filled(times)))
    assert 1 <= len(at_ns) <= POINTS_MAX + 1
    assert (np.diff(at_ns) > 0).all()
    assert times[-1] - at_ns[-1] < SPACING_NS
    assert at_ns[0] <= max(times[0], times[-1] - DAY_NS + 4 * SPACING_NS)


def test_a_point_of_a_wrong_year_and_other_columns_begin_anew_and_clocks_that_differ_do_not():
    course = filled([100 * S, 200 * S, 3 * DAY_NS])
    course.record(2 * DAY_NS + 1, ["f0", "f1"], lambda: 1 / 0)
    course.record(300 * S, ["f0", "f1"], lambda: (np.zeros(2), np.zeros(2)))
    assert times_of(course) == [300 * S], "what lies a day before the wrong one had gone"
    course.record(900 * S, ["g"], lambda: (np.zeros(1), np.zeros(1)))
    assert (times_of(course), course.names) == ([900 * S], ("g",))


def test_what_no_point_can_hold_is_unknown_and_the_state_reads_back():
    course = CoefficientHistory()
    course.record(S, ["a", "b"], lambda: (np.array([1.0, np.inf]), np.array([1e300, np.nan])))
    assert course.points == [(S, (1.0, None), (1e300, None))]
    state = decode(encode({"course": msgspec.to_builtins(course)}))["course"]
    assert CoefficientHistory.of_state(state) == course
