"""What the hooks may cost, in CPU time of the engine's thread: the limits the documents state."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("hook_cost", ROOT / "deploy" / "vllm-plugin" / "bench" / "hook_cost.py")
hook_cost = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hook_cost)


@pytest.mark.parametrize(
    ("wire", "requests", "limit_us"), [("fpm", 16, 15.0), ("fpm", 256, 30.0), ("otlp", 16, 15.0), ("otlp", 256, 100.0)]
)
@pytest.mark.parametrize("mix", list(hook_cost.MIXES))
def test_a_step_costs_the_engines_thread_no_more_than_the_limit(mix, wire, requests, limit_us):
    best_us = min(hook_cost.measure(requests, hook_cost.MIXES[mix], 1000, wire)[0] for _ in range(3))
    assert 0.5 < best_us < limit_us  # below 0.5 nothing would have been measured


@pytest.mark.parametrize("mix", list(hook_cost.MIXES))
def test_a_record_costs_both_threads_together_no_more_than_30_us(mix):
    best_us = min(sum(hook_cost.measure(256, hook_cost.MIXES[mix], 1000, "fpm")[::3]) for _ in range(3))
    assert 1.0 < best_us < 30.0
