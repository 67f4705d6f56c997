"""The client's names of shapes are the learner's partition: what one publishes the other finds."""

import numpy as np
import pytest

from online.blocks import CELLS, cell_name, strata_of
from online.blocks import stratum_name as published_stratum
from online.rows import STEP_FEATURES, RowBlock, Target
from tests.tracefit.example_snapshot import cell_of, config_of, step_time_of, tree
from tracefit.shapes import smallest_step, stratum_name

REQUESTS = [*range(1, 700), 1000, 1535, 2047, 2048, 4095, 4096, 20_000, 35_733, 35_734, 60_000]
TOKENS = [*range(1, 400), *(2**k + d for k in range(9, 20) for d in (-1, 0, 1)), 46_340, 46_341, 10**6]
EVERY = [*map(cell_name, range(1, CELLS))]


def steps():
    for requests in REQUESTS:
        yield 0, requests
    for requests in (1, 2, 3, 5, 8, 30, 64, 200, 1000, 3000, 70_000):
        for tokens in TOKENS:
            yield tokens, requests


def test_strata_have_the_names_that_intervals_are_published_by():
    given = list(steps())
    raw = np.zeros((len(given), len(STEP_FEATURES)))
    raw[:, [STEP_FEATURES.index(name) for name in ("prefill_tokens", "requests")]] = given
    strata, _ = strata_of(Target.STEP_TIME, RowBlock.of_lines(raw, np.ones(len(given))))
    for stratum, step in zip(strata.tolist(), given, strict=True):
        assert published_stratum(stratum) == stratum_name(*step)


def test_the_smallest_step_of_a_shape_is_read_from_the_name_that_its_factor_is_published_by():
    for name in EVERY:
        assert cell_of(*smallest_step(name)) == name
    assert smallest_step("prefill:x") is None


def with_factor(factor, *names, among=(), rows=100.0):
    document = tree()
    factors = dict.fromkeys(among, 1.0) | dict.fromkeys(names, factor)
    step_time_of(document)["shape_factors"] = {name: {"factor": each, "rows": rows} for name, each in factors.items()}
    return config_of(document)


PLAIN = with_factor(1.0)


def test_the_factor_of_every_shape_is_found_by_its_name():
    doubled = with_factor(2.0, *EVERY)
    for prefill, requests in steps():
        twice, once = (each.step_time(prefill_tokens=prefill, requests=requests).us for each in (doubled, PLAIN))
        assert twice == pytest.approx(2.0 * once)


@pytest.mark.parametrize(
    "step", [(0, 3), (0, 20), (0, 44), (2**6.25, 12), (2**0.25, 1), (2**15.75, 3071), (2**8.25, 48), (0, 1345)]
)
def test_a_factor_is_that_of_the_steps_in_the_middle_of_its_shape(step):
    asked, factor = {"prefill_tokens": step[0], "requests": step[1]}, with_factor(1.1, cell_of(*step))
    alone = with_factor(1.1, cell_of(*step), among=EVERY, rows=1e6)
    for config in (factor, alone):
        assert config.step_time(**asked).us == pytest.approx(1.1 * PLAIN.step_time(**asked).us, rel=0.01)


def test_factors_that_are_not_applied_say_nothing():
    document = tree()
    step_time_of(document)["shape_factors"] = {"decode:8": {"factor": 2.0, "rows": 1e6}}
    applied = config_of(document).step_time(requests=8).us
    step_time_of(document)["shape_factors_applied"] = False
    assert applied == pytest.approx(2.0 * config_of(document).step_time(requests=8).us)
