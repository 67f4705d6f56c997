"""Rows leave in step order, once nothing that could still arrive would change them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from collector.config.schema import Config
from collector.decode import Telemetry
from collector.identity import FactSource
from collector.join import Engine
from collector.join.rows import WarmUp
from collector.telemetry import Counts, table
from collector.telemetry.reasons import JoinEvent, RowDrop
from online.rows import STEP_FEATURES, Quality, RowBlock, Target
from tests.support.toy_engine import BETA_US, Job, Run, many_jobs, run_engine
from tests.support.toy_spans import columns_of, core_of

COLUMN = {name: index for index, name in enumerate(STEP_FEATURES)}


class Feed:
    """An engine that is told of a run, and every row of a step that it has given so far."""

    def __init__(self, run: Run, facts: dict[str, object] | None = None, **settings: float) -> None:
        self.run, self.steps = run, columns_of(run)
        self.engine = Engine("a", "", 0, Config(**settings))
        self.engine.facts.learn(facts or {}, FactSource.RESOURCE)
        self.rows: list[RowBlock] = []

    def summaries(self, keep) -> Feed:
        self.engine.add(Telemetry("a", {}, steps=self.steps[np.isin(self.steps["step_id"], list(keep))]))
        return self

    def journeys(self, jobs=None) -> Feed:
        jobs = self.run.jobs if jobs is None else jobs
        self.engine.add(Telemetry("a", {}, core=[core_of(self.run, job) for job in jobs if job.marks]))
        return self

    def advance(self, *, flush: bool = False) -> Feed:
        self.rows += [block for target, block in self.engine.advance(flush=flush) if target is Target.STEP_TIME]
        return self

    @property
    def drops(self) -> Counter[str]:
        return Counter(self.engine.counts.by_label(table.DROPPED_ROWS))

    @property
    def events(self) -> Counter[str]:
        return Counter(self.engine.counts.by_label(table.JOIN_EVENTS))

    @property
    def block(self) -> RowBlock:
        return RowBlock.concatenate(self.rows) if self.rows else RowBlock.empty(STEP_FEATURES)

    @property
    def scheduling(self) -> str:
        return self.engine.snapshot().scheduling

    @property
    def next_step(self) -> int:
        """The step that begins where the newest row ends."""
        return self.engine.newest_process.emitted_to

    def predicted_us(self) -> np.ndarray:
        """Σ x . beta of each row with the engine's true coefficients."""
        raw, block = self.block.raw, self.block
        work = BETA_US[0] + BETA_US[1] * raw[:, COLUMN["prefill_tokens"]]
        work = work + BETA_US[2] * raw[:, COLUMN["decode_context_tokens"]] + BETA_US[3] * raw[:, COLUMN["requests"]]
        return np.add.reduceat(work, block.offsets[:-1])


@pytest.fixture(scope="module")
def run():
    return run_engine(many_jobs(80))


def ids(run, every: int = 1):
    return range(1, len(run.summaries) + 1, every)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_step_gives_one_exact_row_when_everything_is_sent(asynchronous):
    run = run_engine(many_jobs(80), asynchronous=asynchronous)
    feed = Feed(run).journeys().summaries(ids(run)).advance(flush=True)
    busy = np.count_nonzero(run.truth("batch.scheduled_tokens"))
    # An asynchronous last step has no start after it: it ends by its requests' stamps.
    assert busy - 1 <= len(feed.block) <= busy
    assert (feed.block.steps[:-1] == 1).all()
    np.testing.assert_allclose(feed.predicted_us(), feed.block.elapsed_us, rtol=1e-3, atol=250)
    assert np.median(np.abs(feed.predicted_us() - feed.block.elapsed_us)) < 1.0


def test_rows_over_holes_sum_the_rebuilt_steps_and_interpolate_nothing(run):
    feed = Feed(run).journeys().summaries(ids(run, 7)).advance(flush=True)
    block = feed.block
    assert block.steps.max() <= 7
    assert feed.drops[RowDrop.INCOMPLETE] <= 10
    np.testing.assert_allclose(feed.predicted_us(), block.elapsed_us, rtol=2e-3, atol=450)
    assert set(block.quality[block.steps > 1].tolist()) == {int(Quality.SAMPLED)}


def test_journeys_alone_give_rows_between_their_stamps(run):
    feed = Feed(run).journeys().advance(flush=True)
    np.testing.assert_allclose(feed.predicted_us(), feed.block.elapsed_us, rtol=2e-2, atol=450)
    assert set(feed.block.quality.tolist()) == {int(Quality.JOURNEYS)}
    assert len(feed.block) > 100


def test_holes_without_journeys_give_no_row(run):
    feed = Feed(run).summaries(ids(run, 2)).advance(flush=True)
    assert len(feed.block) == 0
    assert feed.drops[RowDrop.INCOMPLETE] > 100


def test_summaries_alone_give_rows_with_context_from_blocks_or_none(run):
    feed = Feed(run).summaries(ids(run)).advance(flush=True)
    assert len(feed.block) > 500
    assert np.isnan(feed.block.raw[:, COLUMN["decode_context_tokens"]]).any()
    feed = Feed(run, {"block_size": 16})
    feed.summaries(ids(run)).advance(flush=True)
    context = feed.block.raw[:, COLUMN["decode_context_tokens"]]
    truth = np.array(run.context_tokens, float)[run.truth("batch.scheduled_tokens") > 0][: len(context)]
    assert np.median(np.abs(context - truth)[truth > 0] / truth[truth > 0]) < 0.05


def test_a_step_waits_for_its_journeys_and_leaves_when_they_are_complete(run):
    feed = Feed(run).summaries(ids(run))
    early = [job for job in run.jobs if job.step_of("FINISHED") < 600]
    feed.journeys(early).advance()
    first_open = min(job.step_of("SCHEDULED") for job in run.jobs if job not in early)
    assert 0 < feed.next_step <= first_open
    feed.journeys([job for job in run.jobs if job not in early]).advance(flush=True)
    assert feed.events[JoinEvent.STEP_MISMATCHED] == 0
    np.testing.assert_allclose(feed.predicted_us(), feed.block.elapsed_us, rtol=1e-3, atol=250)


def test_a_step_whose_journeys_never_come_is_used_after_the_window():
    run = run_engine(many_jobs(300))
    feed = Feed(run, join_timeout_s=5.0, allowed_lateness_s=1.0).summaries(ids(run))
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
    told = Feed(run).journeys().summaries(ids(run)).advance(flush=True)
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


def test_recomputed_tokens_are_prefill_work(run):
    jobs = [Job("a", 300, 60, 1), Job("b", 200, 60, 2, preempted_step=20, resumed_step=30)]
    for every in (1, 9):
        run = run_engine(jobs)
        feed = Feed(run).journeys().summaries(ids(run, every)).advance(flush=True)
        np.testing.assert_allclose(feed.predicted_us(), feed.block.elapsed_us, rtol=5e-3, atol=450)
        prefilled = feed.block.raw[:, COLUMN["prefill_tokens"]].sum()
        assert prefilled == pytest.approx(sum(run.prefill_tokens) + sum(run.recomputed_tokens), abs=350)


def test_mode_is_told_by_stamps_else_by_the_fact_else_synchronous(run):
    assert Feed(run).summaries(ids(run)).advance(flush=True).scheduling != "async"
    late = run_engine(many_jobs(80), asynchronous=True)
    told = Feed(late).journeys().summaries(ids(late)).advance(flush=True)
    assert told.scheduling == "async"
    fact = Feed(late, {"async_scheduling": True}).summaries(ids(late)).advance(flush=True)
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
    assert feed.engine.newest_process.window.size < 5000


# --- warm-up ------------------------------------------------------------------------------------------------------


def rows(*elapsed_us: float) -> RowBlock:
    raw = np.ones((len(elapsed_us), len(STEP_FEATURES)))
    ends = 10**18 + np.cumsum(np.array(elapsed_us) * 1000).astype(np.int64)
    return RowBlock.of_lines(raw, np.array(elapsed_us), end_ns=ends)


def test_rows_are_held_until_the_pace_is_known_or_the_stream_ends_and_then_everything_passes():
    counts, warm_up = Counts(), WarmUp(64)
    assert len(warm_up.pass_through([rows(*[25e3] * 63)], counts, flush=False)) == 0
    assert not warm_up.over
    assert len(warm_up.pass_through([rows(25e3)], counts, flush=False)) == 64
    assert warm_up.over
    assert len(warm_up.pass_through([rows(12e6)], counts, flush=False)) == 1
    assert len(WarmUp(64).pass_through([rows(25e3, 30e3)], counts, flush=True)) == 2
