"""Rows that no step can have given are left out, each by its reason."""

import dataclasses
import math
from collections import Counter

from collector.config import Config
from online import Bank, RowOutcome, Target
from tests.support.linear_steps import steps


def test_rows_with_values_that_no_step_has_are_left_out_by_reason():
    rows = steps(40, 1).rows
    elapsed_us, raw = rows.elapsed_us.copy(), rows.raw.copy()
    elapsed_us[:3] = math.nan, -1.0, 1e300
    raw[rows.offsets[3] : rows.offsets[4]] = math.nan
    odd = dataclasses.replace(rows, elapsed_us=elapsed_us, raw=raw)
    left_out = (RowOutcome.NOT_FINITE, RowOutcome.NOT_POSITIVE, RowOutcome.OUT_OF_RANGE, RowOutcome.UNKNOWN_FEATURE)
    outcomes = Bank(Config(learners=("rls",))).learn("config", Target.STEP_TIME, odd)
    assert outcomes == Counter({RowOutcome.LEARNED: 36} | dict.fromkeys(left_out, 1))
