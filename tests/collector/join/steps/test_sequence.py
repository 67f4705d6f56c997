"""Rows leave in step order, once nothing that could still arrive would change them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.config.schema import Config
from collector.decode import Telemetry
from collector.identity import FactSource
from collector.join import Engine, Scheduling
from collector.join.emitter import Liveness
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent, RowDrop
from online.rows import STEP_FEATURES, Quality, RowBlock, Target
from tests.support.pipelines import by_label
from tests.support.toy_engine import BETA_US, Job, Run, many_jobs, run_engine
from tests.support.toy_spans import STEP_SCOPE, Piece, columns_of, core_of, decoded, step_span

COLUMN = {name: index for index, name in enumerate(STEP_FEATURES)}


class Feed:
    """An engine that is told of a run, and every row of a step that it has given so far."""

    def __init__(self, run: Run, facts: dict[str, object] | None = None, **settings: float) -> None:
        self.run, self.steps = run, columns_of(run)
        self.engine = Engine("a", "", 0, Config(**settings))
        self.engine.facts.learn(facts or {}, FactSource.RESOURCE)
        self.rows: list[RowBlock] = []

    def summaries(self, keep=None) -> Feed:
        kept = slice(None) if keep is None else np.isin(self.steps["step_id"], list(keep))
        self.engine.add(Telemetry("a", {}, steps=self.steps[kept]))
        return self

    def journeys(self, jobs=None) -> Feed:
        jobs = self.run.jobs if jobs is None else jobs
        self.engine.add(Telemetry("a", {}, core=[core_of(self.run, job) for job in jobs if job.marks]))
        return self

    def everything(self) -> Feed:
        return self.journeys().summaries().advance(flush=True)

    def advance(self, *, flush: bool = False) -> Feed:
        self.engine.liveness = Liveness.OVER if flush else Liveness.LIVE
        self.rows += [block for target, block in self.engine.advance() if target is Target.STEP_TIME]
        return self

    @property
    def drops(self) -> Counter[str]:
        return Counter(by_label(self.engine.counts, table.DROPPED_ROWS))

    @property
    def events(self) -> Counter[str]:
        return Counter(by_label(self.engine.counts, table.JOIN_EVENTS))

    @property
    def block(self) -> RowBlock:
        return RowBlock.concatenate(self.rows) if self.rows else RowBlock.empty(STEP_FEATURES)

    @property
    def next_step(self) -> int:
        """The step that begins where the newest row ends."""
        return self.engine.process.emitted_step

    def column(self, name: str) -> np.ndarray:
        return self.block.raw[:, COLUMN[name]]

    def assert_true(self, rtol: float, atol_us: float) -> float:
        """Each row takes Σ x . beta with the engine's true coefficients; the median of how far it is off."""
        of_work = (self.column(name) for name in ("prefill_tokens", "decode_context_tokens", "requests"))
        work_us = BETA_US[0] + sum(beta * column for beta, column in zip(BETA_US[1:], of_work, strict=True))
        predicted_us = np.add.reduceat(work_us, self.block.offsets[:-1])
        np.testing.assert_allclose(predicted_us, self.block.elapsed_us, rtol=rtol, atol=atol_us)
        return float(np.median(np.abs(predicted_us - self.block.elapsed_us)))


@pytest.fixture(scope="module")
def run():
    return run_engine(many_jobs(80))


def ids(run, every: int = 1):
    return range(1, len(run.summaries) + 1, every)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_step_gives_one_exact_row_when_everything_is_sent(asynchronous):
    run = run_engine(many_jobs(80), asynchronous=asynchronous)
    feed = Feed(run).everything()
    busy = np.count_nonzero(run.truth("batch.scheduled_tokens"))
    assert feed.engine.process.scheduling is (Scheduling.ASYNC if asynchronous else Scheduling.SYNC)
    # An asynchronous last step has no start after it: it ends by its requests' stamps.
    assert busy - 1 <= len(feed.block) <= busy
    assert (feed.block.steps[:-1] == 1).all()
    assert feed.assert_true(rtol=1e-3, atol_us=250) < 1.0


def rebuilt_exactly(run, order, *, budget=512, asynchronous=False):
    """The steps behind which rows end, which are made of journeys alone, told in these pieces."""
    feed = Feed(run, {"max_num_batched_tokens": budget, "async_scheduling": asynchronous})
    for part in order:
        feed.journeys([run.jobs[number] for number in part]).advance()
    block = feed.advance(flush=True).block
    begin_ns = np.array([run.unix(summary["step.ts_start_ns"]) for summary in run.summaries])
    stops = np.searchsorted(begin_ns, block.end_ns - 200_000) - asynchronous
    steps = np.concatenate([np.arange(stop - n, stop) for stop, n in zip(stops, block.steps, strict=True)])
    work = np.add(run.prefill_tokens, run.recomputed_tokens)
    assert len(steps) > 20
    assert set(block.quality.tolist()) == {int(Quality.JOURNEYS)}
    np.testing.assert_array_equal(feed.column("prefill_tokens"), work[steps])
    np.testing.assert_array_equal(feed.column("decode_context_tokens"), np.array(run.context_tokens)[steps])
    return stops.tolist()


@settings(max_examples=settings.default.max_examples // 3)
@given(
    seed=st.integers(0, 10_000),
    asynchronous=st.booleans(),
    pieces=st.integers(1, 9),
    budget=st.sampled_from([64, 333, 2048]),
)
def test_any_load_is_rebuilt_exactly_from_journeys_in_any_order_and_any_pieces(seed, asynchronous, pieces, budget):
    run = run_engine(many_jobs(25, seed=seed, spacing=4), asynchronous=asynchronous, budget=budget)
    order = np.array_split(np.random.default_rng(seed).permutation(len(run.jobs)), pieces)
    rebuilt_exactly(run, order, budget=budget, asynchronous=asynchronous)


def test_requests_that_were_preempted_or_aborted_are_rebuilt_exactly():
    odd = [Job("a", 80, 30, 2, preempted_step=10, resumed_step=14), Job("b", 40, 50, 3, aborted_step=6)]
    usual = [Job(f"c{n}", 100, 30, 1 + 8 * n) for n in range(20)]
    assert 6 not in rebuilt_exactly(run_engine([*odd, *usual]), [range(22)]), "an abort is no end of a step"


def test_the_pieces_of_a_long_prompt_attend_to_those_before():
    run = run_engine([Job("a", 1300, 3, 1), Job("b", 100, 3, 4)])
    attention = Feed(run).everything().column("prefill_attention")
    assert attention[attention > 0].tolist() == [512 * 256, 512 * (512 + 256), 276 * (1024 + 138), 100 * 50]


def test_rows_over_holes_sum_the_rebuilt_steps_and_interpolate_nothing(run):
    feed = Feed(run).journeys().summaries(ids(run, 7)).advance(flush=True)
    block = feed.block
    assert block.steps.max() <= 7
    assert feed.drops[RowDrop.INCOMPLETE] <= 10
    feed.assert_true(rtol=2e-3, atol_us=450)
    assert set(block.quality[block.steps > 1].tolist()) == {int(Quality.SAMPLED)}


def test_holes_without_journeys_give_no_row(run):
    feed = Feed(run).summaries(ids(run, 2)).advance(flush=True)
    assert len(feed.block) == 0
    assert feed.drops[RowDrop.INCOMPLETE] > 100


def test_summaries_alone_give_rows_with_context_from_blocks_or_none(run):
    feed = Feed(run).summaries().advance(flush=True)
    assert len(feed.block) > 500
    assert np.isnan(feed.column("decode_context_tokens")).any()
    context = Feed(run, {"block_size": 16}).summaries().advance(flush=True).column("decode_context_tokens")
    truth = np.array(run.context_tokens, float)[run.truth("batch.scheduled_tokens") > 0][: len(context)]
    assert np.median(np.abs(context - truth)[truth > 0] / truth[truth > 0]) < 0.05


def test_a_step_waits_for_its_journeys_and_leaves_when_they_are_complete(run):
    feed = Feed(run).summaries()
    early = [job for job in run.jobs if job.step_of("FINISHED") < 600]
    feed.journeys(early).advance()
    first_open = min(job.step_of("SCHEDULED") for job in run.jobs if job not in early)
    assert 0 < feed.next_step <= first_open
    feed.journeys([job for job in run.jobs if job not in early]).advance(flush=True)
    assert feed.events[JoinEvent.STEP_MISMATCHED] == 0
    feed.assert_true(rtol=1e-3, atol_us=250)


def test_a_step_whose_journeys_never_come_is_used_after_the_window():
    run = run_engine(many_jobs(300))
    feed = Feed(run, join_timeout_s=5.0, allowed_lateness_s=1.0).summaries()
    feed.journeys([job for index, job in enumerate(run.jobs) if index % 9]).advance()
    newest = run.summaries[-1]["step.ts_start_ns"]
    passed = run.summaries[feed.next_step - 1]["step.ts_start_ns"]
    assert newest - passed >= 5e9
    # whole blocks pass, so up to a block of steps more than the window is held
    assert newest - passed < 5e9 + 257 * 30e6
    assert feed.events[JoinEvent.STEP_MISMATCHED] > 0
    assert len(feed.block) > 100


def test_a_hole_is_final_only_after_the_grace_time():
    run = run_engine([Job("a", 50, 900, 1), *(Job(f"b{n}", 30, 2, 20 + 20 * n) for n in range(30))])
    keep = [step for step in ids(run) if not 400 <= step < 410]
    feed = Feed(run, allowed_lateness_s=20.0).journeys()
    feed.summaries([step for step in keep if step < 700]).advance()
    assert 256 <= feed.next_step <= 400
    feed = Feed(run, allowed_lateness_s=0.5).journeys().summaries(keep).advance()
    assert feed.next_step > 410


def test_idle_time_between_steps_or_inside_a_hole_gives_no_row():
    run = run_engine([Job("a", 50, 20, 1), Job("b", 50, 20, 60), Job("c", 50, 20, 120)], idle_us=5e6)
    told = Feed(run).everything()
    assert told.drops[RowDrop.IDLE] == 2
    hole = Feed(run).journeys().advance(flush=True)
    assert hole.drops[RowDrop.IDLE] + hole.drops[RowDrop.INCOMPLETE] >= 2
    for feed in (told, hole):
        assert (feed.block.elapsed_us / feed.block.steps).max() < 50_000


def test_an_interval_longer_than_allowed_gives_no_row(monkeypatch):
    monkeypatch.setattr(Config, "row_steps_max", 64)
    run = run_engine([Job("a", 50, 900, 1), Job("b", 10, 4, 1)])
    feed = Feed(run).journeys().advance(flush=True)
    assert feed.drops[RowDrop.TOO_LONG] + feed.drops[RowDrop.INCOMPLETE] >= 1
    assert not len(feed.block) or feed.block.steps.max() <= 64


def test_without_journeys_the_mode_is_what_the_configuration_says():
    run = run_engine(many_jobs(80), asynchronous=True)
    told = Feed(run).everything()
    fact = Feed(run, {"async_scheduling": True}).summaries().advance(flush=True)
    np.testing.assert_allclose(fact.block.elapsed_us[5:50], told.block.elapsed_us[5:50])


def test_what_is_behind_the_window_is_forgotten_and_counted_late():
    run = run_engine([Job(f"j{n}", 20, 400, 1 + 200 * n) for n in range(40)])
    feed = Feed(run, join_timeout_s=2.0, allowed_lateness_s=0.5)
    for start in range(1, len(run.summaries), 500):
        last = start + 499
        feed.journeys([j for j in run.jobs if start <= j.step_of("FINISHED") <= last])
        feed.summaries(range(start, last + 1)).advance()
    before = feed.events[JoinEvent.JOURNEY_LATE]
    feed.summaries(range(1, 20)).journeys(run.jobs[:1])
    assert feed.events[JoinEvent.STEP_LATE] == 19
    assert feed.events[JoinEvent.JOURNEY_LATE] == before + 1
    assert feed.engine.process.window.size < 5000


def test_rows_are_held_until_the_pace_is_known_or_the_stream_ends(run):
    feed = Feed(run).journeys().summaries(range(1, 50)).advance()
    assert len(feed.block) == 0
    assert len(feed.advance(flush=True).block) > 20
    assert len(Feed(run).journeys().summaries().advance().block) > 64


def test_snapshots_of_an_export_count_once_where_stamps_of_two_steps_are_swapped():
    """Its steps are read in two parts then, both of one process."""
    run = run_engine(many_jobs(20))
    telemetry = decoded(Piece("a", STEP_SCOPE, step_span(run, 1, 40, snapshots=True)))
    telemetry.steps["unix_ns"][[10, 11]] = telemetry.steps["unix_ns"][[11, 10]]
    engine = Engine("a", "", 0, Config())
    engine.add(telemetry)
    scheduled = telemetry.steps["prefill_tokens"] + telemetry.steps["decode_tokens"]
    assert engine.process.window.rebuilt["snapshot_tokens"][:40].tolist() == scheduled.tolist()
