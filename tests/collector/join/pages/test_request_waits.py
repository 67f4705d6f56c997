"""What a request waits beside the queue, from the sums of a page: on counters whose truth is known."""

import math

import pytest

from collector.decode.pages import EngineReading, Flavour, Meaning
from collector.join.api_queueing import with_fallbacks
from tests.collector.join.pages.test_scrape_windows import new_page

STEP_S, LONG_S, FRONT_END_S = 0.02, 0.2, 0.005
WAIT_S = FRONT_END_S + (9 * STEP_S**2 + LONG_S**2) / (2 * (9 * STEP_S + LONG_S))


def second(number, *, without=(), busy=1.0, frontends=1, seconds=0.38, own_s=0.0):
    """Counters after ``number`` rounds: nine short steps and a long one, two requests end in each.

    ``own_s``: what the front end took of all of them together, where not the same of each.
    """
    steps, decoding = 10 * number, 4
    squares = decoding * number * (9 * STEP_S**2 + LONG_S**2)
    values = [0.0] * len(Meaning)
    counted = {
        Meaning.STEPS: steps * frontends,
        Meaning.ITL_COUNT: steps * decoding,
        Meaning.ITL_SECONDS: decoding * number * (9 * STEP_S + LONG_S),
        Meaning.ITL_SECONDS_SQUARED: squares,
        Meaning.E2E_COUNT: 2 * number,
        Meaning.E2E_SECONDS: 2 * number * (1.5 + busy * (WAIT_S - FRONT_END_S)) + (own_s or 2 * number * FRONT_END_S),
        Meaning.QUEUE_SECONDS: 2 * number * 0.5,
        Meaning.INFERENCE_SECONDS: 2 * number * 1.0,
        Meaning.FIRST_TOKENS: 2 * number + decoding,
        Meaning.FINISHED: 2 * number,
        Meaning.RUNNING: decoding,
        Meaning.GENERATED_TOKENS: steps * decoding,
    }
    for meaning, value in counted.items():
        values[meaning] = math.nan if meaning in without else float(value)
    at_ns = int(number * seconds / busy * 1e9)
    return 10**18 + at_ns, at_ns, EngineReading("0", "m", Flavour.VLLM, tuple(values), {})


def alpha(rounds=60, **other):
    page = new_page()
    page.windows.front_ends = other.get("frontends", 1)
    for number in range(1, rounds):
        page.add(*second(number, **other))
    return with_fallbacks(None, [page.api_queueing])


@pytest.mark.parametrize(("busy", "frontends"), [(1.0, 1), (0.5, 1), (1.0, 3)])
def test_the_wait_for_the_running_step_is_no_work_of_the_front_end(busy, frontends):
    """Several front ends that count a step make it no busier."""
    target = alpha(busy=busy, frontends=frontends)
    (intercept,) = target.models["portable"].features
    assert target.vector == "alpha"
    assert intercept.status == "weak"
    assert intercept.coefficient == pytest.approx(1e6 * FRONT_END_S, rel=1e-6)
    assert target.mean_us == pytest.approx(1e6 * (FRONT_END_S + busy * (WAIT_S - FRONT_END_S)), rel=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        {"without": (Meaning.ITL_SECONDS_SQUARED,)},  # no buckets: the wait cannot be told apart
        {"without": (Meaning.QUEUE_SECONDS,)},
        {"seconds": 15.0},  # pages too far apart
        {"rounds": 8},
    ],
)
def test_nothing_is_said_where_the_wait_cannot_be_told(other):
    assert alpha(**other) is None


def test_a_restart_counts_no_request_twice():
    page = new_page()
    for number, later in ((1, 0), (40, 0), (2, 10**11), (3, 10**11)):
        unix_ns, mono_ns, reading = second(number)
        page.add(unix_ns + later, mono_ns + later, reading)
    assert sum(piece.requests for piece in page.api_queueing.pieces) == 2 * 39


def test_what_was_long_ago_hardly_counts_and_what_scatters_is_a_band():
    """A front end of 140 ms that takes 40 ms since; its answers take now more and now less."""
    page, own_s = new_page(), 0.0
    for number in range(1, 4500):
        own_s += 2 * (0.14 if number < 1500 else 0.04) * (0.6, 1.3, 0.9, 1.2, 1.0)[number // 50 % 5]
        page.add(*second(number, own_s=own_s))
    target = with_fallbacks(None, [page.api_queueing])
    (intercept,) = target.models["portable"].features
    assert intercept.coefficient < 0.8 * 1e6 * own_s / (2 * number)
    assert intercept.coefficient == pytest.approx(40_000, rel=0.2)
    assert intercept.stderr > 0.0
    assert target.interval.p10 < 0.9
    assert target.interval.p90 > 1.1
