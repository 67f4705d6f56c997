"""What a request waits beside the queue, from the sums of a page: on counters whose truth is known."""

import math
from itertools import accumulate

import numpy as np
import pytest

from collector.decode.pages import EngineReading, Flavour, Meaning
from collector.join.api_queueing import with_fallbacks
from tests.collector.join.pages.test_scrape_windows import new_page

STEP_S, FRONT_END_S = 0.02, 0.005


def readings(pages, together, *, queue_s=0.0, without=()):
    """So many requests end between two pages; each waited for a part of a step, and prefilled in one."""
    waits_s = FRONT_END_S + STEP_S * np.random.default_rng(1).random((pages, together)).mean(axis=1)
    for number, wait_s in enumerate(accumulate(waits_s.tolist())):
        ended = together * number
        values = {
            Meaning.FINISHED: ended,
            Meaning.FINISHED_PROMPT_TOKENS: ended * 100,
            Meaning.FINISHED_GENERATED_TOKENS: ended * 11,
            Meaning.E2E_COUNT: ended,
            Meaning.E2E_SECONDS: together * wait_s + ended * (queue_s + 11 * STEP_S),
            Meaning.QUEUE_SECONDS: ended * queue_s,
            Meaning.INFERENCE_SECONDS: ended * 11 * STEP_S,
            Meaning.PREFILL_SECONDS: ended * STEP_S,
        }
        told = tuple(math.nan if meaning in without else float(values.get(meaning, 0.0)) for meaning in Meaning)
        yield int(number * 5e8), EngineReading("0", "m", Flavour.VLLM, told, {})


def alpha(pages=400, together=1, **other):
    page = new_page()
    for at_ns, reading in readings(pages, together, **other):
        page.add(10**18 + at_ns, at_ns, reading)
    return with_fallbacks(None, [page.api_queueing])


@pytest.mark.parametrize("queue_s", [0.0, 0.5])
@pytest.mark.parametrize("together", [1, 3, 20])
def test_the_wait_for_the_running_step_is_no_work_of_the_front_end(together, queue_s):
    """However many requests end between two pages, and whether they wait for a slot."""
    target = alpha(together=together, queue_s=queue_s)
    (intercept,) = target.models["portable"].features
    assert (target.vector, intercept.status, bool(target.step_ahead_us)) == ("alpha", "weak", False)
    assert intercept.coefficient == pytest.approx(1e6 * FRONT_END_S, abs=1_500)
    assert target.mean_us == pytest.approx(1e6 * (FRONT_END_S + STEP_S / 2), rel=0.05)


@pytest.mark.parametrize(
    "other", [{"without": (Meaning.QUEUE_SECONDS,)}, {"without": (Meaning.PREFILL_SECONDS,)}, {"pages": 20}]
)
def test_nothing_is_said_where_the_wait_cannot_be_told(other):
    assert alpha(**other) is None


def test_a_restart_counts_no_request_twice():
    page, (first, *others) = new_page(), readings(40, 2)
    for later_ns, (at_ns, reading) in [(0, first), (0, others[-1]), (10**11, others[1]), (10**11, others[2])]:
        page.add(10**18 + at_ns + later_ns, at_ns + later_ns, reading)
    assert sum(each.requests for each in page.api_queueing.arrivals) == 2 * 39
