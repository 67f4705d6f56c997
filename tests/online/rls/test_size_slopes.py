"""What is published beside the factor of a shape: the usual work of its steps, and the cost of context at one size."""

import numpy as np
import pytest

from online.bank import Bank
from online.rows import Target
from online.shapes import ShapeFactors
from tests.support.banks import PORTABLE
from tests.support.linear_steps import repeated
from tests.support.uneven_steps import of_columns

CONTEXT_US = 0.08
ROWS = 4_000


def published(context_per_request, steps=1):
    """Of a machine whose batches are padded to eights and hardly dearer up to 32; larger ones have longer contexts."""
    draw = np.random.default_rng(3)
    requests = draw.integers(4, 100, ROWS).astype(float)
    context = requests * context_per_request(requests, draw)
    elapsed_us = 5_000.0 + 40.0 * np.maximum(8.0 * np.ceil(requests / 8.0), 32.0) + CONTEXT_US * context
    elapsed_us *= np.exp(0.01 * draw.standard_normal(ROWS))
    columns = {"requests": requests, "decode_requests": requests, "decode_context_tokens": context}
    bank = Bank(PORTABLE)
    bank.learn("c0", Target.STEP_TIME, repeated(of_columns(columns, elapsed_us), steps))
    return bank.targets("c0")["step_time"]


def longer_in_larger(requests, draw):
    """What a machine sees whose long answers pile up; scattered by a fifth."""
    return (200.0 + 8.0 * requests) * draw.uniform(0.8, 1.2, len(requests))


@pytest.mark.parametrize("steps", [1, 3])
def test_context_costs_what_it_costs_among_steps_of_one_size(steps):
    target = published(longer_in_larger, steps)
    assert target.context_us_per_token == pytest.approx(CONTEXT_US, rel=0.1)
    shape = target.shape_factors["decode:17-24"]
    prefill, requests, context, us = shape.usual
    assert (prefill, requests) == (0.0, pytest.approx(20.5, abs=0.5))
    assert context == pytest.approx(requests * (200.0 + 8.0 * requests), rel=0.05)
    assert us == pytest.approx(5_000.0 + 40.0 * 32.0 + CONTEXT_US * context, rel=0.01)


def test_a_context_that_comes_with_the_batch_alone_tells_nothing():
    assert published(lambda requests, _draw: 300.0 + 0.0 * requests).context_us_per_token is None


def test_a_set_without_these_columns_says_nothing_of_the_usual_work():
    cells = ShapeFactors(2)
    cells.rows[3], cells.x[3] = 5.0, (1.0, 7.0)
    assert [each.usual for each in cells.snapshot(np.ones(2), ("intercept", "requests")).values()] == [None]
