"""What people see of a step beside the snapshot: the last rows as they were predicted, and the course of a day."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from online.target.history import DAY_NS, POINTS_MAX, ROWS_MAX, SPACING_NS, StepHistory
from tests.support.banks import STEP, learned, of_columns, restarted
from tests.support.linear_steps import repeated, steps

S = 1_000_000_000


@pytest.mark.parametrize("steps_of_a_row", [1, 4])
def test_the_last_rows_stand_per_step_beside_what_was_predicted_of_them(steps_of_a_row):
    simulated = steps(1024, 1)
    rows = learned(repeated(simulated.rows, steps_of_a_row)).history("c")
    assert rows.observed_us == pytest.approx(simulated.rows.elapsed_us[-ROWS_MAX:], rel=1e-6)
    assert rows.predicted_us == pytest.approx(simulated.truth_us[-ROWS_MAX:], rel=0.05)


def test_a_view_stays_as_it_was_while_learning_goes_on():
    bank = learned(steps(1000, 2).rows)
    view = bank.history("c")
    before = copy.deepcopy(view)
    bank.learn("c", STEP, steps(500, 3).rows)
    assert view == before
    assert bank.history("c").observed_us != before.observed_us


def test_the_course_survives_a_restart():
    bank = learned(steps(1500, 2, drift_at=900, gain=1.5).rows)
    before, after = (each.history("c") for each in (bank, restarted(bank)))
    assert after[:4] == before[:4]
    assert after.features == ("intercept", "prefill_tokens", "decode_context_tokens", "requests")
    assert after.coefficients[0][-1] == pytest.approx(9000 * 1.5, rel=0.2)
    assert all(bars[-1] > 0 for bars in after.stderrs)
    assert after.observed_us == []


def test_after_a_restart_with_other_feature_sets_the_history_is_of_the_new_ones():
    bank = learned(steps(1500, 2).rows)
    again = restarted(bank, of_columns("prefill_tokens", "requests"))
    again.learn("c", STEP, steps(600, 3).rows)
    view = again.history("c")
    assert view.features == ("prefill_tokens", "requests")
    assert len(view.coefficients) == len(view.stderrs) == len(view.features)


LEARNER = SimpleNamespace(started=True, beta=np.ones(2), infer=lambda: SimpleNamespace(stderr=np.full(2, np.nan)))
"""A learner whose error bars are not known."""


@given(st.integers(1, 3000), st.integers(S, 2 * SPACING_NS))
@example(717, 126_315_789_474)  # where points came too seldom for the distance of the day's beginning
def test_the_course_is_bounded_grows_and_reaches_back_a_day(n, apart_ns):
    times, course = [DAY_NS + i * apart_ns for i in range(n)], StepHistory(("a", "b"))
    for each in times:
        course.record(each, LEARNER)
    at_ns = course.at_ns
    assert 1 <= len(at_ns) == len(course.values) <= POINTS_MAX
    assert (np.diff(at_ns) > 0).all()
    assert times[-1] - at_ns[-1] < SPACING_NS
    assert at_ns[0] <= max(times[0], times[-1] - DAY_NS + 4 * SPACING_NS)
