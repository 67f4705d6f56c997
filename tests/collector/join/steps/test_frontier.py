"""Three step numbers of a sequence keep their order, however its telemetry comes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.config.learning_config import JoinConfig
from collector.decode.records import SNAPSHOT_DTYPE
from collector.join.block_ratio import BlockRatio
from collector.join.steps.frontier import Frontier
from collector.join.steps.sequence import StepSequence
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import columns_of, core_of

NO_SNAPSHOTS = np.empty(0, SNAPSHOT_DTYPE)


def assert_in_order(sequence: StepSequence) -> None:
    frontier, base = sequence.frontier, sequence.window.base
    assert frontier.emitted_to == 0 or base <= frontier.emitted_to < frontier.learned_to
    assert frontier.learned_to <= frontier.next_step(base)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_stay_behind_the_blocks_that_were_passed(asynchronous, seed):
    chance = random.Random(seed)
    run = run_engine(many_jobs(160), asynchronous=asynchronous)
    steps, journeys = columns_of(run), chance.random() < 0.7
    sequence = StepSequence(JoinConfig(window_s=5.0, grace_s=1.0, steps_max=900), 0, BlockRatio())
    arrivals = [
        (run.unix(run.summaries[n]["step.ts_end_ns"]), n) for n in range(0, len(steps), chance.choice([1, 1, 4]))
    ]
    arrivals += [(run.unix(job.marks[-1][2]), job) for job in run.jobs if journeys and chance.random() < 0.9]
    arrivals.sort(key=lambda arrival: arrival[0] + chance.uniform(0, 3e9))
    moved = 0
    for number, (_, what) in enumerate(arrivals):
        if isinstance(what, int):
            sequence.add_summaries(steps[what : what + 1], NO_SNAPSHOTS)
        else:
            sequence.add_request(core_of(run, what))
        if number % 23 == 0:
            before = sequence.frontier.emitted_to
            sequence.advance()
            assert_in_order(sequence)
            assert sequence.frontier.emitted_to >= before
            moved += sequence.frontier.emitted_to > before
            sequence.forget_steps(sequence.event_unix_ns - 10**9)
            assert_in_order(sequence)
    sequence.advance(flush=True)
    assert_in_order(sequence)
    assert moved > 2


def test_step_ids_that_jump_beyond_the_window_begin_anew_and_lose_the_open_row():
    run = run_engine(many_jobs(80))
    steps = columns_of(run)
    sequence = StepSequence(JoinConfig(window_s=5.0, grace_s=1.0, steps_max=2048), 0, BlockRatio())
    sequence.add_summaries(steps, NO_SNAPSHOTS)
    sequence.advance()
    assert sequence.frontier.emitted_to > 0
    ahead = steps[-8:].copy()
    ahead["step_id"] += 100_000
    for name in ("unix_ns", "ts_start_ns", "ts_end_ns"):
        ahead[name] += 60 * 10**9
    sequence.add_summaries(ahead, NO_SNAPSHOTS)
    sequence.advance(flush=True)
    assert_in_order(sequence)
    assert sequence.frontier.emitted_to > 100_000


def test_what_a_moved_window_has_left_behind_is_lost_once():
    frontier = Frontier(emitted_to=500, learned_to=512)
    assert frontier.first_boundary(100) == 500
    assert frontier.next_step(100) == 512
    assert not frontier.give_up_before(500)
    assert frontier.give_up_before(501)
    assert frontier == Frontier(learned_to=501), "what lies before the window is not missed a second time"
    assert (frontier.first_boundary(501), frontier.next_step(501)) == (501, 501)
    assert not frontier.give_up_before(501)
