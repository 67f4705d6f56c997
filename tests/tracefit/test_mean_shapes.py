"""The factor of a mean step between the cells that mean steps were seen in."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracefit
from tests.tracefit.example_snapshot import encoded, tree

CELLS = {
    "prefill:32-63:64-90": (1.1, 1e9),
    "prefill:32-63:91-127": (1.0, 1e9),
    "prefill:64-127:64-90": (1.2, 1e9),
    "prefill:64-127:91-127": (0.9, 1e9),
}


def asked(cells, telemetry="requests", **sizes):
    """ITL of requests whose coefficients come from means, by the factors of these cells."""
    document = tree()
    config = document["configs"][0]
    config["telemetry"] = telemetry
    config["targets"]["step_time"]["shape_factors"] = {
        cell: {"factor": factor} | ({} if rows is None else {"rows": rows}) for cell, (factor, rows) in cells.items()
    }
    config = tracefit.load(encoded(document)).config().assuming(max_num_seqs=1000, kv_tokens=10**9)
    return config.request(**sizes).itl.us


def factor(cells, tokens, requests):
    """What the mean step takes with the factors, by what it takes without; 1,000 tokens an answer."""
    prompt = tokens * 1000.0 / (requests - 1.0)  # others prefill (n - 1) / 1000 of the time
    sizes = {"prompt_tokens": prompt, "output_tokens": 1000, "concurrency": requests}
    return asked(cells, **sizes) / asked({}, **sizes)


MIDDLE = {"prefill:32-63:64-90": (2**5.5, 2**6.25), "prefill:64-127:91-127": (2**6.5, 2**6.75)}


@pytest.mark.parametrize("cell", MIDDLE)
def test_in_the_middle_of_a_cell_it_is_the_cells_own(cell):
    requests, tokens = MIDDLE[cell]
    assert factor(CELLS, tokens, requests) == pytest.approx(CELLS[cell][0], rel=1e-3)


@given(st.floats(33, 126), st.floats(65, 126))
def test_it_has_no_jumps(requests, tokens):
    here, beside = factor(CELLS, tokens, requests), factor(CELLS, tokens * 1.001, requests * 1.001)
    assert here == pytest.approx(beside, rel=2e-3)
    assert 0.9 - 1e-6 <= here <= 1.2 + 1e-6


def test_a_cell_of_few_rows_bends_its_neighbours_little():
    few = CELLS | {"prefill:32-63:64-90": (1.1, 2.0)}
    requests, tokens = 2**5.5, 2**6.5
    assert factor(CELLS, tokens, requests) == pytest.approx(math.sqrt(1.1), rel=1e-3)
    assert factor(few, tokens, requests) == pytest.approx(1.0, abs=1e-3)


def test_a_batch_just_below_a_power_of_two_is_no_other_batch():
    """A server of 128 slots runs 127.8 in the mean: that is where its rows lie."""
    seen = {"prefill:64-127:91-127": (1.05, 500.0)}
    assert factor(seen, 96.0, 127.8) == pytest.approx(1.05, rel=1e-3)
    assert factor(seen, 96.0, 128.2) == pytest.approx(1.05, rel=1e-3)


def test_without_numbers_of_rows_all_cells_weigh_alike():
    untold = {cell: (factor, None) for cell, (factor, _) in CELLS.items()}
    assert factor(untold, 2**6.5, 2**5.5) == pytest.approx(math.sqrt(1.1), rel=1e-3)


def test_far_from_every_cell_it_is_one():
    assert factor(CELLS, 4.0, 5.0) == pytest.approx(1.0)
    assert factor(CELLS, 1e8, 700.0) == pytest.approx(1.0)


def test_coefficients_of_single_steps_keep_the_factor_of_each_shape():
    sizes = {"prompt_tokens": 700, "output_tokens": 300, "concurrency": 50}
    assert asked(CELLS, "steps", **sizes) == asked({c: (f, 3.0) for c, (f, _) in CELLS.items()}, "steps", **sizes)
