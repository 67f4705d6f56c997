"""The client's names of shapes are the learner's partition: what one publishes the other finds."""

import numpy as np
import pytest

from online.blocks import CELLS, strata_of
from online.blocks import stratum_name as published_stratum
from online.rows import STEP_FEATURES, RowBlock, Target
from tracefit.shapes import TOKEN_CLASSES, cell_name, stratum_name, stratum_of_cell, token_class

REQUESTS = [*range(1, 700), 1000, 1535, 2047, 2048, 4095, 4096, 20_000, 35_733, 35_734, 60_000]
TOKENS = [*range(1, 400), *(2**k + d for k in range(9, 20) for d in (-1, 0, 1)), 46_340, 46_341, 10**6]


def learned(prefill, requests):
    """Stratum and cell of one-step rows as the learner has them."""
    raw = np.zeros((len(prefill), len(STEP_FEATURES)))
    raw[:, STEP_FEATURES.index("prefill_tokens")] = prefill
    raw[:, STEP_FEATURES.index("requests")] = requests
    n = len(raw)
    ones = np.ones(n)
    rows = RowBlock(
        raw=raw,
        offsets=np.arange(n + 1),
        elapsed_us=ones,
        phase=np.zeros((n, 2)),
        weight=ones,
        end_ns=np.arange(n),
        engine=np.zeros(n, np.int64),
        quality=np.zeros(n, np.int64),
    )
    return strata_of(Target.STEP_TIME, rows)


def steps():
    for requests in REQUESTS:
        yield 0, requests
    for requests in (1, 2, 3, 5, 8, 30, 64, 200, 1000, 3000, 70_000):
        for tokens in TOKENS:
            yield tokens, requests


def test_cells_and_names_are_one_to_one():
    prefill, requests = map(np.array, zip(*steps(), strict=True))
    _, cells = learned(prefill, requests)
    named = {}
    for cell, step in zip(cells.tolist(), zip(prefill.tolist(), requests.tolist(), strict=True), strict=True):
        assert named.setdefault(cell, cell_name(*step)) == cell_name(*step), step
    assert len(set(named.values())) == len(named)
    assert max(named) < CELLS


def test_strata_have_the_names_that_intervals_are_published_by():
    prefill, requests = map(np.array, zip(*steps(), strict=True))
    strata, _ = learned(prefill, requests)
    for stratum, step in zip(strata.tolist(), zip(prefill.tolist(), requests.tolist(), strict=True), strict=True):
        assert published_stratum(stratum) == stratum_name(*step)


@pytest.mark.parametrize("step", [(0, 3), (0, 20), (0, 200), (70, 20), (1, 1), (3000, 100)])
def test_the_stratum_of_a_cell_is_that_of_its_steps(step):
    assert stratum_of_cell(cell_name(*step)) == stratum_name(*step)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ((0, 1), "decode:1"),
        ((0, 16), "decode:16"),
        ((0, 17), "decode:17-24"),
        ((0, 504), "decode:497-504"),
        ((0, 505), "decode:505-558"),
        ((0, 559), "decode:559-608"),
        ((0, 10**6), "decode:35734+"),
        ((1, 1), "prefill:1:1"),
        ((64, 8), "prefill:8-15:64-90"),
        ((10**6, 10**5), "prefill:2048+:46341+"),
    ],
)
def test_names_say_what_they_hold(step, name):
    assert cell_name(*step) == name


def test_token_classes_are_bounded():
    assert token_class(0) == 0
    assert max(map(token_class, (1, 0.5, 10**9))) < TOKEN_CLASSES
