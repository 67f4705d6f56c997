"""Changes of speed on machines that no linear form fits, and curves that are none."""

import numpy as np
import pytest

from collector.config.schema import Config
from online.features.registry import portable
from online.rows import STEP_FEATURES, RowBlock, Target
from online.target import TargetState

N = 20_000


def machine(seed, *, curved=False, prefill_gain=1.0, onset=N):
    """Steps in regimes of load and context; ``curved``: context costs C^1.15; prefill costs more from ``onset`` on."""
    rng = np.random.default_rng(seed)
    load, context = np.empty(N), np.empty(N)
    start = 0
    while start < N:
        stop = start + int(rng.integers(400, 2000))
        load[start:stop], context[start:stop] = rng.choice([2, 4, 8, 16, 40]), rng.choice([200, 800, 3000, 12000])
        start = stop
    requests = np.maximum(1, rng.poisson(load)).astype(float)
    prefill = (rng.random(N) < 0.2) * rng.integers(16, 1024, N).astype(float)
    context = requests * (context if curved else 600.0) * np.exp(rng.normal(0, 0.25, N))
    price = np.where(np.arange(N) >= onset, prefill_gain, 1.0) * 25.0
    y = 5000 + price * prefill + 0.05 * (context**1.15 * 5e3**-0.15 if curved else context) + 60 * requests
    raw = np.zeros((N, len(STEP_FEATURES)))
    columns = {"prefill_tokens": prefill, "decode_context_tokens": context, "requests": requests}
    for name, values in columns.items():
        raw[:, STEP_FEATURES.index(name)] = values
    return raw, y * np.exp(rng.normal(0, 0.03, N))


def state_of():
    state = TargetState(Target.STEP_TIME, Config(learners=("rls",)))
    state.offer(portable(Target.STEP_TIME), lambda _features: None)
    return state


@pytest.mark.parametrize("seed", range(3))
def test_a_curved_cost_of_context_is_no_change_of_speed(seed):
    state = state_of()
    state.learn(RowBlock.of_lines(*machine(seed, curved=True)))
    assert state.snapshot().drift.count == 0


@pytest.mark.parametrize("seed", range(3))
def test_prefill_that_costs_twice_as_much_is_learned(seed):
    state = state_of()
    raw, y = machine(seed, prefill_gain=2.0, onset=8000)
    state.learn(RowBlock.of_lines(raw[:14_000], y[:14_000]))
    prices = {feature.name: feature.coefficient for feature in state.snapshot().models["portable"].features}
    assert prices["prefill_tokens"] == pytest.approx(50.0, rel=0.05)
    assert prices["intercept"] == pytest.approx(5000.0, rel=0.05)
    assert state.snapshot().drift.count >= 1
