"""Rows of several engines of one configuration leave in one order: wall clock, then instance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.config.learning_config import JoinConfig
from collector.identity import EngineFacts
from collector.join.census import horizon, rows_are_here_until
from collector.join.emitter import TargetRows
from collector.join.release import Release
from online.rows import STEP_FEATURES, Quality, RowBlock, Target
from tests.support.pipelines import coefficients, replayed
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import exports_of, pieces

S = 10**9


def rows(*ends: int, engine: int = 0) -> RowBlock:
    raw = np.arange(len(ends) * len(STEP_FEATURES), dtype=float).reshape(len(ends), -1)
    return RowBlock.of_lines(raw, np.array(ends, float), end_ns=np.array(ends, np.int64), engine=engine)


def taken(release: Release, until: int | None) -> list[int]:
    return [end for _, block, _ in release.take(until) for end in block.end_ns.tolist()]


def test_rows_leave_until_the_given_time_and_the_rest_stays():
    release = Release()
    release.add("a", [TargetRows(Target.STEP_TIME, rows(1, 3, 5))])
    assert taken(release, 3) == [1, 3]
    assert taken(release, 4) == []
    assert taken(release, None) == [5]
    assert taken(release, None) == []


def test_several_engines_are_merged_and_equal_ends_keep_the_order_of_the_instances():
    release = Release()
    release.add("b", [TargetRows(Target.STEP_TIME, rows(2, 4, engine=1))])
    release.add("a", [TargetRows(Target.STEP_TIME, rows(1, 4, 6, engine=0))])
    ((_, block, engines),) = release.take(5)
    assert block.end_ns.tolist() == [1, 2, 4, 4]
    assert block.engine.tolist() == [0, 1, 0, 1]
    assert engines == {0: "a", 1: "b"}


def test_targets_are_kept_apart():
    release = Release()
    release.add("a", [TargetRows(Target.STEP_TIME, rows(1)), TargetRows(Target.SCHEDULE_TIME, rows(2))])
    assert {target: block.end_ns.tolist() for target, block, _ in release.take(None)} == {
        Target.STEP_TIME: [1],
        Target.SCHEDULE_TIME: [2],
    }


class Told(NamedTuple):
    """An emitter of which this was heard."""

    instance: str
    event_unix_ns: int
    safe_unix_ns: int
    recording: str = ""
    open_requests: int = 0
    quality: Quality = Quality.STEPS_PLUS
    facts: EngineFacts = EngineFacts()


@pytest.mark.parametrize(("engines", "until_ns"), [(1, 107 * S + 5), (2, 107 * S), (99, 107 * S), (100, 104 * S)])
def test_rows_of_several_engines_leave_by_the_second_and_of_many_by_four(engines, until_ns):
    emitters = [Told(str(number), 200 * S + 5, 107 * S + 5) for number in range(engines)]
    assert rows_are_here_until(emitters, JoinConfig(grace_s=93, window_s=180)) == until_ns


@given(
    ends=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_the_order_does_not_depend_on_the_pieces(ends, cuts):
    by_instance = {name: sorted(end for n, end in ends if n == name) for name in "abc"}
    expected = sorted((end, name) for name, found in by_instance.items() for end in found)
    release, out = Release(), []
    for low, high in zip([0, *sorted(cuts)], [*sorted(cuts), 61], strict=True):
        for name in "cab":
            here = [end for end in by_instance[name] if low <= end < high]
            if here:
                release.add(name, [TargetRows(Target.STEP_TIME, rows(*here, engine=ord(name)))])
        out += [
            (end, chr(engine))
            for _, block, _ in release.take(high - 1)
            for end, engine in zip(block.end_ns.tolist(), block.engine.tolist(), strict=True)
        ]
    assert out == expected


@pytest.mark.parametrize(
    ("event_s", "safe_s", "until_s"),
    [([1000], [990], 980), ([1000, 950], [990, 930], 930), ([1000, 819], [990, 10], 980)],
)
def test_the_slowest_engine_holds_the_others_until_it_is_silent_for_the_window(event_s, safe_s, until_s):
    settings = JoinConfig(window_s=180, grace_s=20)
    assert horizon(np.array(event_s) * S, np.array(safe_s) * S, settings) == until_s * S


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


def test_rows_held_under_an_earlier_identity_leave_with_those_of_the_new_one():
    old, new = Release(), Release()
    old.add("a", [TargetRows(Target.STEP_TIME, rows(1, 5))])
    old.add("b", [TargetRows(Target.SCHEDULE_TIME, rows(2))])
    new.add("b", [TargetRows(Target.STEP_TIME, rows(3))])
    new.take_over(old)
    assert {target: block.end_ns.tolist() for target, block, _ in new.take(None)} == {
        Target.STEP_TIME: [1, 3, 5],
        Target.SCHEDULE_TIME: [2],
    }
