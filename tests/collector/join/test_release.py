"""Rows of several engines of one configuration leave in one order: wall clock, then instance."""

from __future__ import annotations

import pytest

from tests.support.pipelines import coefficients, replayed
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import exports_of, pieces

S = 10**9


@pytest.mark.parametrize("size", [3, 1000])
def test_two_engines_of_one_configuration_share_coefficients_in_any_pieces(size):
    facts = (("vllm.model", "toy"),)
    first = pieces(run_engine(many_jobs(80)), instance="dp0", facts=facts)
    second = pieces(run_engine(many_jobs(80, seed=4), start_ns=10**12 + 777), instance="dp1", facts=facts)
    both = sorted(first + second, key=lambda piece: piece.span.end_time_unix_nano)
    pipeline = replayed(exports_of(both, size))
    (config,) = pipeline.snapshot(0, 1).configs
    assert [e.instance for e in config.engines] == ["dp0", "dp1"]
    expected = coefficients(replayed(exports_of(both, 50)))
    for key, value in coefficients(pipeline).items():
        assert value == pytest.approx(expected[key], rel=1e-9)
    assert next(v for k, v in expected.items() if k[1:] == ("step_time", "prefill_tokens")) == pytest.approx(
        45, rel=1e-3
    )
