"""Rows of several engines of one configuration leave in one order: wall clock, then instance."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from collector.config.schema import Config
from collector.join.emitter import TargetRows
from collector.join.events import HeldRows, watermark_of
from online.rows import STEP_FEATURES, RowBlock, Target
from tests.support.pipelines import coefficients, replayed
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import exports_of, pieces

S = 10**9


def rows(*ends: int, engine: int = 0) -> RowBlock:
    raw = np.arange(len(ends) * len(STEP_FEATURES), dtype=float).reshape(len(ends), -1)
    return RowBlock.of_lines(raw, np.array(ends, float), end_ns=np.array(ends, np.int64), engine=engine)


@pytest.mark.parametrize(
    ("event_s", "safe_s", "until_s"),
    [([1000], [990], 980), ([1000, 950], [990, 930], 930), ([1000, 819], [990, 10], 980)],
)
def test_the_slowest_engine_holds_the_others_until_it_is_silent_for_the_window(event_s, safe_s, until_s):
    emitters = [
        SimpleNamespace(event_unix_ns=event * S, safe_unix_ns=safe * S)
        for event, safe in zip(event_s, safe_s, strict=True)
    ]
    assert watermark_of(emitters, Config(join_timeout_s=180, allowed_lateness_s=20)) == until_s * S


def test_rows_leave_in_the_order_of_their_end_then_of_their_instances_and_the_rest_is_kept():
    held = HeldRows()
    held.add("c", "b", [TargetRows(Target.STEP_TIME, rows(1, 3, 5, engine=0))])
    held.add("c", "a", [TargetRows(Target.STEP_TIME, rows(2, 3, engine=1))])
    held.add("c", "a", [TargetRows(Target.QUEUE_WAIT, rows(9, engine=1))])
    held.add("another", "a", [TargetRows(Target.QUEUE_WAIT, rows(9, engine=2))])
    (first,) = held.take("c", 3)
    assert (first.rows.end_ns.tolist(), first.rows.engine.tolist()) == ([1, 2, 3, 3], [0, 1, 1, 0])
    assert first.engines == {0: "b", 1: "a"}
    assert held.by_emitter() == {0: 1, 1: 1, 2: 1}
    held.rename("c", "d")
    assert [one.rows.end_ns.tolist() for one in held.take("d", None)] == [[9], [5]]
    assert held.config_ids() == ["another"]


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
