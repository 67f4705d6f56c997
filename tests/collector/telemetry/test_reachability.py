"""Every reason that the page shows is asserted by a test of what raises it: a row of a counter that no input can raise
says "never" where it means "nobody looks".
"""

import dataclasses
import enum
import math
import re
from collections import Counter
from pathlib import Path

from collector.config import Config
from collector.telemetry import reasons, table
from online import Bank, RowOutcome, Target
from tests.support.linear_steps import steps
from tests.support.paths import ROOT


def counted():
    """Members of closed sets by which the table counts."""
    metrics = (*table.TABLE, *table.FLEET_TABLE)
    values = {(type(value), value) for metric in metrics for _, closed in metric.labels for value in closed}
    return {(closed, value) for closed, value in values if issubclass(closed, enum.Enum)}


def test_every_member_of_every_closed_set_is_named_by_a_test():
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    texts = [path.read_text(encoding="utf-8") for path in files]

    text = "\n".join(texts)
    members, walked = set(re.findall(r"\b\w+\.[A-Z]\w*\b", text)), set(re.findall(r"for \w+ in (\w+)\b", text))
    quoted = set(re.findall(r'(?<=[" ])\w+(?=[":])', text))

    def is_named(closed, member):
        return f"{closed.__name__}.{member.name}" in members or closed.__name__ in walked or member.value in quoted

    assert [member for closed, member in counted() if not is_named(closed, member)] == []


def test_every_reason_on_the_page_of_reasons_is_counted():
    enums = {each for each in vars(reasons).values() if isinstance(each, type) and issubclass(each, enum.Enum)}
    assert {each for each in enums if each.__module__ == reasons.__name__} <= {closed for closed, _ in counted()}


def test_rows_with_values_that_no_step_has_are_left_out_by_reason():
    rows = steps(40, 1).rows
    elapsed_us, raw = rows.elapsed_us.copy(), rows.raw.copy()
    elapsed_us[:3] = math.nan, -1.0, 1e300
    raw[rows.offsets[3] : rows.offsets[4]] = math.nan
    odd = dataclasses.replace(rows, elapsed_us=elapsed_us, raw=raw)
    left_out = (RowOutcome.NOT_FINITE, RowOutcome.NOT_POSITIVE, RowOutcome.OUT_OF_RANGE, RowOutcome.UNKNOWN_FEATURE)
    outcomes = Bank(Config(learners=("rls",))).learn("config", Target.STEP_TIME, odd)
    assert outcomes == Counter({RowOutcome.LEARNED: 36} | dict.fromkeys(left_out, 1))
