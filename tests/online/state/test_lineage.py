"""Whose rows were learned, and when: what tells that a state is merged with itself."""

from contextlib import nullcontext
from itertools import permutations

import numpy as np
import pytest

from online import state as bounds
from online.state import Lineage, LineageLedger, StateError
from tests.support.state_files import through_bytes

MINUTE = 60_000_000_000
TIME = "1970-01-01T00:..:00Z"
SENTENCE = (
    r"tuesday\.bin: engine '.+' of configuration c is in monday\.bin too, both with its rows of "
    rf"{TIME} to {TIME}, which would count twice"
)


def lineage(**engines):
    """Of engines and their spans, each as (first, last) in minutes."""
    out = Lineage()
    for engine, spans in engines.items():
        for first, last in spans:
            out.record(engine.replace("_", ":"), np.array([first, last]) * MINUTE)
    return out


def test_rows_of_one_engine_are_one_span_until_it_is_silent_for_ten_minutes():
    seen = Lineage()
    seen.record("a", np.array([0, 5, 15, 16, 27]) * MINUTE)
    assert seen.engines == {"a": [(0, 16 * MINUTE, 4), (27 * MINUTE, 27 * MINUTE, 1)]}
    seen.record("a", np.array([20]) * MINUTE)
    assert seen.engines == {"a": [(0, 27 * MINUTE, 6)]}


@pytest.mark.parametrize(
    ("mine", "theirs", "common"),
    [
        ({"a": [(0, 9)]}, {"a": [(0, 9)]}, True),
        ({"a": [(0, 9)]}, {"a": [(0, 4)]}, True),
        ({"a": [(0, 9)]}, {"a": [(9, 12)]}, True),
        ({"a": [(0, 9)]}, {"a": [(10, 12)]}, False),
        ({"a": [(0, 9)]}, {"b": [(0, 9)]}, False),
        ({"a": [(0, 9), (40, 50)]}, {"a": [(15, 30)]}, False),
        ({"a": [(0, 9), (40, 50)], "b": [(0, 5)]}, {"c": [(0, 1)], "a": [(49, 60)]}, True),
        ({"ipv4:127.0.0.1:4001": [(0, 9)]}, {"ipv4:127.0.0.1:4001": [(2, 12)]}, False),
        ({"ipv4:127.0.0.1:4001": [(0, 9)]}, {"ipv4:127.0.0.1:4001": [(0, 12)]}, True),
        ({"localhost:8000#1": [(0, 9)]}, {"localhost:8000#1": [(1, 12)]}, False),
    ],
)
def test_states_share_rows_where_spans_of_one_engine_overlap(mine, theirs, common):
    for one, other in ((mine, theirs), (theirs, mine)):
        ledger = LineageLedger()
        ledger.accept("monday.bin", {"c": lineage(**one)})
        ledger.accept("elsewhere.bin", {"d": lineage(**other)})
        with pytest.raises(StateError, match=SENTENCE) if common else nullcontext():
            ledger.accept("tuesday.bin", {"c": lineage(**other)})


def test_what_was_merged_before_is_known_afterwards_in_any_order():
    parts = [lineage(a=[(0, 9)]), lineage(a=[(20, 30)], b=[(0, 1)]), lineage(c=[(0, 5)])]
    sums = []
    for order in permutations(parts):
        whole = Lineage()
        for part in order:
            whole.add(part)
        sums.append(whole.engines)
    assert all(each == sums[0] for each in sums)
    ledger = LineageLedger()
    ledger.accept("merged.bin", {"c": whole})
    for part in parts:
        with pytest.raises(StateError, match=r"merged\.bin"):
            ledger.accept("part.bin", {"c": part})


def test_it_is_bounded_in_engines_and_in_spans(monkeypatch):
    monkeypatch.setattr(bounds, "ENGINES_MAX", 3)
    seen = lineage(a=[(0, 1), (20, 21), (40, 41), (60, 61), (72, 73)], b=[(5, 6)], c=[(4, 5)], d=[(7, 8)])
    assert set(seen.engines) == {"a", "b", "d"}
    assert [(first // MINUTE, last // MINUTE, rows) for first, last, rows in seen.engines["a"]] == [
        (0, 1, 2),
        (20, 21, 2),
        (40, 41, 2),
        (60, 73, 4),
    ]


def test_it_is_saved():
    seen = lineage(a=[(0, 1), (20, 21)], b=[(5, 6)])
    assert through_bytes(seen, Lineage()).engines == seen.engines
