"""The simulated vLLM keeps the rules of its scheduler, and what it sends is what happened."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gpu_server import work_us
from tests.support.vllm_scheduler import BLOCK_SIZE, Engine, Host, Limits, Traffic, Work

SECONDS = 12.0
QUIET = Host(noise=0.0, stall_share=0.0)


def table_us(work: Work) -> float:
    """Llama-3.1-8B on an H100, by the small table of kernel times."""
    return work_us("llama8b-h100", work)


def served(limits: Limits, clients: int = 12, prompt: int = 400, output: int = 60, host: Host = QUIET) -> Engine:
    traffic = Traffic(3)
    traffic.closed(0, int(SECONDS * 1e9), clients, prompt, output, 0.4, 0.01)
    traffic.poisson(0, int(SECONDS * 5e8), 5.0, 2 * prompt, output)
    return Engine(table_us, traffic, limits, host).run(int(SECONDS * 1e9))


@settings(max_examples=20)
@given(
    asynchronous=st.booleans(),
    slots=st.integers(1, 40),
    budget=st.integers(64, 4096),
    blocks=st.integers(600, 5000),
    prompt=st.integers(1, 2000),
    output=st.integers(2, 200),
)
def test_no_step_breaks_a_limit_and_every_answer_is_whole(asynchronous, slots, budget, blocks, prompt, output):
    engine = served(Limits(slots, budget, blocks, asynchronous), 20, prompt, output)
    for step in engine.steps:
        assert step.work.prefill_tokens + step.work.decodes <= budget
        assert step.work.prefill_requests + step.work.decodes <= step.running <= slots
        assert 0 <= step.free_blocks <= blocks
    for request in engine.requests:
        assert request.made == request.output
        assert request.sent < request.received <= request.queued <= request.scheduled < request.first <= request.last


def test_a_cache_that_is_too_small_preempts_and_recomputes():
    engine = served(Limits(64, 2048, 400, asynchronous=False), clients=40)
    assert sum(step.preempted for step in engine.steps) > 0
    computed = sum(step.work.prefill_tokens for step in engine.steps)
    assert computed > sum(request.prompt for request in engine.requests) + 400 * BLOCK_SIZE


def test_an_arrival_waits_for_the_running_step_and_asynchronously_for_the_next_one_too():
    waits = []
    for asynchronous in (False, True):
        engine = served(Limits(asynchronous=asynchronous))
        ended = [step.done for step in engine.steps]
        steps = [np.searchsorted(ended, r.first) - np.searchsorted(ended, r.received) for r in engine.requests[20:]]
        waits.append(float(np.mean(steps)))
    assert waits[1] == pytest.approx(waits[0] + 1.0, abs=0.3)
