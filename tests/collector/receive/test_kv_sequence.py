"""Numbers of a publisher: gaps, replays, restarts; a missing number is recovered, unrecoverable or still missing."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from collector.receive.kv.kv_sequence import MISSING_MAX, EndpointSequence
from collector.telemetry import table


def endpoint(can_replay=True):
    return EndpointSequence(can_replay, timeout_s=10.0, pause_max_s=60.0)


def number(sequence, event):
    return sequence.counts[table.KV_SEQUENCE, event]


def test_numbers_in_order_from_zero_miss_nothing():
    one = endpoint()
    for seq in range(5):
        one.live(0, seq)
    assert one.request(0.0) is None
    assert (
        number(one, "gaps"),
        number(one, "missing"),
        number(one, "restarts"),
    ) == (0, 0, 0)


def test_a_late_start_and_a_gap_are_asked_for_from_their_first_number():
    late = endpoint()
    late.live(0, 40)
    assert late.request(0.0) == 0
    gap = endpoint()
    for seq in (0, 1, 5, 6):
        gap.live(0, seq)
    assert gap.request(0.0) == 2
    assert gap.request(0.0) is None  # one at a time
    assert [gap.replayed(0, seq) for seq in range(2, 8)] == [True, True, True, False, False, False]
    gap.finished()
    assert (number(gap, "missing"), number(gap, "recovered"), number(gap, "unrecoverable")) == (3, 3, 0)
    assert gap.request(0.0) is None


def test_what_a_finished_replay_did_not_bring_is_gone_and_not_asked_for_again():
    one = endpoint()
    one.live(0, 10)
    assert one.request(0.0) == 0
    assert one.replayed(0, 7)
    one.live(0, 13)  # a second gap while the replay runs
    one.finished()
    assert (number(one, "recovered"), number(one, "unrecoverable")) == (1, 9)
    assert one.request(0.0) == 11


def test_a_request_nobody_answers_is_repeated_after_growing_pauses():
    one = endpoint()
    one.live(0, 3)
    asked = []
    for now_s in range(400):
        one.overdue(now_s)
        if one.request(now_s) is not None:
            asked.append(now_s)
    assert asked[:5] == [0, 11, 23, 37, 55]
    assert all(b - a <= 71 for a, b in itertools.pairwise(asked))
    assert number(one, "replays_unanswered") == len(asked) - 1 or number(one, "replays_unanswered") == len(asked)


def test_without_a_replay_socket_gaps_are_only_counted():
    one = endpoint(can_replay=False)
    one.live(0, 5)
    assert one.request(0.0) is None
    assert (number(one, "gaps"), number(one, "missing")) == (1, 5)


def test_a_number_going_back_is_a_restart_whose_gaps_are_gone():
    one = endpoint()
    for seq in (0, 9, 0, 1):
        one.live(0, seq)
    assert (number(one, "restarts"), number(one, "missing"), number(one, "unrecoverable")) == (1, 8, 8)


def test_ranks_on_one_endpoint_count_for_themselves():
    one = endpoint()
    for seq in range(3):
        one.live(0, seq)
        one.live(1, seq)
    assert number(one, "gaps") == 0
    one.live(1, 7)
    assert one.request(0.0) == 3
    assert not one.replayed(0, 4)
    assert one.replayed(1, 4)


def test_a_jump_by_a_billion_is_remembered_only_as_far_as_it_can_be_replayed():
    one = endpoint()
    one.live(0, 0)
    one.live(0, 10**9)
    assert one.request(0.0) == 10**9 - MISSING_MAX
    assert number(one, "unrecoverable") == 10**9 - 1 - MISSING_MAX


actions = st.one_of(
    st.tuples(st.just("live"), st.integers(0, 1), st.integers(0, 60)),
    st.tuples(st.just("replayed"), st.integers(0, 1), st.integers(0, 60)),
    st.tuples(st.sampled_from(["request", "finished", "answered", "overdue"]), st.integers(0, 50), st.none()),
)


@given(st.lists(actions, max_size=60))
def test_missing_is_recovered_or_unrecoverable_once_replays_are_over_whatever_happens(steps):
    one = endpoint()
    now_s = 0.0
    for action, first, second in steps:
        if action in ("live", "replayed"):
            getattr(one, action)(first, second)
        elif action == "finished":
            one.finished()
        else:
            now_s += first
            getattr(one, action)(now_s)
        assert number(one, "missing") >= number(one, "recovered") + number(one, "unrecoverable")
    one.finished()
    if one.request(math.inf) is not None:
        one.finished()
    assert one.request(math.inf) is None
    assert number(one, "missing") == number(one, "recovered") + number(one, "unrecoverable")
