"""Batches rebuilt from journeys alone equal what the engine did, step by step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.join.inferred import StepView, lay_journey, runs_of, split_chunks
from collector.join.window import StepWindow
from tests.support.toy_engine import Job, Run, many_jobs, run_engine
from tests.support.toy_spans import columns_of, core_of


class Batches:
    """Journeys of a run laid over a window, chunks split at ``pieces`` step boundaries."""

    def __init__(
        self,
        run: Run,
        *,
        budget: float | None = 512,
        asynchronous: bool = False,
        summaries: bool = False,
        pieces: int = 1,
        order: list[int] | None = None,
    ) -> None:
        self.run, count = run, len(run.summaries)
        self.window = StepWindow()
        self.window.reach(1, count)
        steps = columns_of(run)
        if summaries:
            self.window.add_summaries(steps)
        spans = [core_of(run, job) for job in run.jobs if job.marks]
        chunks = []
        for span in map(spans.__getitem__, order or range(len(spans))):
            chunks += lay_journey(span, self.window, [*runs_of(span.marks)])
        for stop in np.linspace(1, count + 1, pieces + 1).astype(int)[1:]:
            chunks = split_chunks(chunks, self.window, int(stop), budget, asynchronous=asynchronous)
        assert chunks == []
        if not summaries:
            self.window.add_summaries(steps)
        self.counts = StepView(*self.window.columns(1, count + 1), asynchronous=asynchronous)
        self.cells = self.counts.cells

    def assert_exact(self) -> None:
        busy = self.run.truth("batch.scheduled_tokens") > 0
        assert self.counts.matched[busy].all()
        np.testing.assert_array_equal(self.counts.prefill_tokens, self.run.prefill_tokens)
        np.testing.assert_array_equal(self.counts.context_tokens, self.run.context_tokens)
        np.testing.assert_array_equal(self.cells["recomputed_tokens"], self.run.recomputed_tokens)


def test_a_prefill_in_one_step_then_one_token_a_step():
    run = run_engine([Job("a", 100, 5, 1)])
    batches = Batches(run)
    batches.assert_exact()
    assert batches.counts.prefill_tokens[:5].tolist() == [100, 0, 0, 0, 0]
    assert batches.counts.context_tokens.tolist() == [0, 101, 102, 103, 104]
    assert batches.cells["prefill_attention"][0] == 100**2 / 2


def test_a_long_prefill_takes_the_budget_step_by_step():
    run = run_engine([Job("a", 1300, 3, 1)])
    batches = Batches(run)
    batches.assert_exact()
    assert batches.counts.prefill_tokens[:3].tolist() == [512, 512, 276]
    expected = [512 * 256, 512 * (512 + 256), 276 * (1024 + 138)]
    assert batches.cells["prefill_attention"][:3].tolist() == expected


def test_a_preempted_request_comes_back_with_its_recomputation_as_prefill_work():
    jobs = [Job("a", 100, 30, 1), Job("b", 80, 30, 2, preempted_step=10, resumed_step=14)]
    batches = Batches(run_engine(jobs))
    batches.assert_exact()
    # b had made 8 tokens: 88 are computed again in step 14, one of them is its next decode token
    assert batches.cells["recomputed_tokens"][13] == 87
    assert batches.counts.decode_requests[9:14].tolist() == [1, 1, 1, 1, 2]


def test_an_aborted_request_counts_until_its_last_step_and_stamps_no_end():
    jobs = [Job("a", 100, 50, 1), Job("b", 40, 50, 2, aborted_step=9)]
    run = run_engine(jobs)
    batches = Batches(run)
    batches.assert_exact()
    # b's abort names step 9 and is no step boundary; a makes no stamp there either
    assert batches.cells["completed_ns"][8] == 0
    assert batches.counts.decode_requests[8:10].tolist() == [2, 1]


def test_asynchronous_summaries_count_the_first_decode_step_as_a_one_token_prefill():
    jobs = [Job("a", 100, 6, 1), Job("b", 60, 6, 3)]
    batches = Batches(run_engine(jobs, asynchronous=True), asynchronous=True)
    batches.assert_exact()
    assert batches.counts.prefill_tokens[:5].tolist() == [100, 1, 60, 1, 0]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    asynchronous=st.booleans(),
    pieces=st.integers(1, 9),
    budget=st.sampled_from([64, 333, 2048]),
)
def test_any_load_is_rebuilt_exactly_in_any_order_and_any_pieces(seed, asynchronous, pieces, budget):
    run = run_engine(many_jobs(25, seed=seed, spacing=4), asynchronous=asynchronous, budget=budget)
    order = np.random.default_rng(seed).permutation(len(run.jobs)).tolist()
    batches = Batches(run, asynchronous=asynchronous, budget=budget, pieces=pieces, order=order)
    batches.assert_exact()
