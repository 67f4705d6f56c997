"""Facts of a configuration in a state file."""

from __future__ import annotations

import math

import pytest

from collector.config import Config
from online import Bank
from online.state import StateError


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_fact_that_is_not_finite_is_refused_and_the_bank_stays_as_it_was(value):
    bank = Bank(Config())
    before = bank.to_state()
    with pytest.raises(StateError, match="not finite"):
        bank.from_state({"learned_rows": 0, "configs": {"0f3c": {"facts": {"kv_usage_ratio": value}}}})
    assert bank.to_state() == before
