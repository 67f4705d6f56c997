"""What the hooks may cost, in CPU time of the engine's thread: the limits the documents state."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("hook_cost", ROOT / "deploy" / "vllm-plugin" / "bench" / "hook_cost.py")
hook_cost = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hook_cost)


@pytest.mark.parametrize(("requests", "limit_us"), [(16, 15.0), (256, 100.0)])
@pytest.mark.parametrize("mix", list(hook_cost.MIXES))
def test_a_step_costs_the_engines_thread_no_more_than_the_limit(mix, requests, limit_us):
    best_us = min(hook_cost.measure(requests, hook_cost.MIXES[mix], 1000)[0] for _ in range(3))
    assert 0.5 < best_us < limit_us  # below 0.5 nothing would have been measured
