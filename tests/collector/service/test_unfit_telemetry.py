"""Telemetry that no line can be learned from surely: what is published of it says so."""

import re

import pytest

import tracefit
from collector.decode import Export
from tests.support.clocks import T0_NS
from tests.support.paced_engine import PacedEngine, in_turns
from tests.support.pipelines import replayed

MS = 1_000_000


def published(payloads):
    """The configuration that was learned from these exports, as a client reads it, and how sure its step time is."""
    pipeline = replayed(Export(payload, "peer", 1) for payload in payloads)
    config = tracefit.load(pipeline.snapshot(T0_NS, 1).to_json()).config()
    return config, {coefficient.status for coefficient in config.coefficients("step_time")}


def engine(name="engine-0", seed=1):
    """One of a model."""
    return PacedEngine(name, T0_NS, seed, **{"vllm.model": "tiny"})


TOO_COARSE = r"the clock of its telemetry is too coarse: .*% of its steps seem to take no time"


@pytest.mark.parametrize(("pace", "unit_ns", "doubt"), [((0.05,), 1, None), ((), MS, None), ((0.05,), MS, TOO_COARSE)])
def test_a_clock_of_milliseconds_will_do_for_steps_of_many_and_else_nothing_may_be_used(pace, unit_ns, doubt):
    config, statuses = published(engine().exports(1600, *pace, unit_ns=unit_ns))
    assert config.usable is (doubt is None) is ("identified" in statuses)
    assert doubt is None or re.fullmatch(doubt, config.reasons[0])


def test_of_two_machines_under_one_name_no_coefficient_is_identified():
    fast, slow = engine("a", 1).exports(1200), engine("b", 2).exports(1200, 2.0)
    config, statuses = published(in_turns(fast, slow))
    assert not config.usable
    assert "identified" not in statuses
