"""A span id is admitted once within the window; what is older than everything remembered is late."""

from hypothesis import given
from hypothesis import strategies as st

from collector.join.spans import SpanWindow
from collector.telemetry.reasons import Skip

S = 10**9


def test_a_span_older_than_the_window_is_late_once_something_was_forgotten():
    spans = SpanWindow(2)
    assert spans.accept("a", b"1", 1000 * S) is None
    assert spans.accept("a", b"2", 1601 * S) is None
    assert len(spans) == 1
    assert spans.accept("a", b"1", 1000 * S) is Skip.LATE
    assert spans.accept("a", b"3", 999 * S) is Skip.LATE
    assert spans.accept("a", b"4", 1001 * S) is None


def test_emitters_are_bounded_and_the_one_silent_longest_is_forgotten():
    spans = SpanWindow(1)
    for number, sender in enumerate(("old", "new", "third", "fourth", "fifth")):
        spans.accept(sender, b"1", (60 - 10 * number) * S)
    assert len(spans) == 4
    assert spans.accept("new", b"1", 20 * S) is Skip.DUPLICATE
    assert spans.accept("old", b"1", 10 * S) is None


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 10_000)), max_size=300))
def test_memory_is_bounded_and_nothing_is_admitted_twice_whatever_comes(arrivals):
    spans, admitted = SpanWindow(1, 5_000 * S, 4), set()
    ends = dict(arrivals)
    for id_, _ in arrivals:
        end = ends[id_]
        if spans.accept("a", bytes([id_]), end * S) is None:
            assert id_ not in admitted
            admitted.add(id_)
        assert len(spans) <= 4
