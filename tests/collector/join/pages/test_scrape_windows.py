"""Two scrapes make an interval equation: checked on a simulated engine whose coefficients are known."""

import gzip
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from collector.config import Config
from collector.decode.pages import ESTIMATES, EngineReading, Flavour, Meaning, read_page_line
from collector.join.pages import PageEngine
from collector.telemetry import RowDrop, table
from online import Quality, Target
from online.features import build
from online.features.columns import FeatureSet, raw_column
from tests.support.page_server import RECORDED
from tests.support.pipelines import by_label

FEATURES = build("portable", Target.STEP_TIME, {})
TRUE = np.array([10_000.0, 200.0, 1.5, 300.0])  # us: step, prefill token, context token, request
FACTS = {"block_size": 32, "num_gpu_blocks": 4096}
OF_SGLANG = (Meaning.DECODE_STEPS, Meaning.GPU_SECONDS)


class SimulatedEngine:
    """Runs steps by known coefficients and keeps vLLM's counters."""

    flavour, facts, ranks, budget = Flavour.VLLM, FACTS, 1, 512
    absent = (Meaning.KV_USED_TOKENS, Meaning.PREFILL_TOKENS, *OF_SGLANG, *ESTIMATES)

    def __init__(self, seed=0, abort=0.0, preempt=0.0, cached=0.0, counting="computed"):
        self.chance = random.Random(seed)
        self.abort, self.preempt, self.cached, self.counting = abort, preempt, cached, counting
        self.now_us, self.running = 0.0, []
        self.values = dict.fromkeys(Meaning, 0.0) | dict.fromkeys(self.absent, math.nan)

    def count(self, **amounts):
        for name, amount in amounts.items():
            self.values[Meaning[name.upper()]] += amount

    def step(self):
        decoding, left, first = [r for r in self.running if r.output], self.budget, []
        for request in self.running:
            chunk = 0 if request.output else min(left, request.prompt - request.computed)
            left -= chunk
            request.computed += chunk
            first += [request] * (chunk > 0 and request.computed == request.prompt)
        prefill, context = self.budget - left, sum(r.prompt + r.output for r in decoding)
        took_us = float(TRUE @ [1, prefill, context, len(self.running)])
        self.now_us += took_us
        prompts, hits = (sum(int(share * r.prompt) for r in first) for share in (1, self.cached))
        whole, output = prompts + len(first), len(decoding) + len(first)
        credited = {"whole": whole, "computed": whole - hits, "each step": prefill}[self.counting]
        self.count(first_tokens=len(first), prompt_tokens=prompts, prefix_hit_tokens=hits, generated_tokens=output)
        self.count(itl_count=len(decoding), itl_seconds=len(decoding) * took_us / 1e6, steps=output > 0)
        self.count(step_tokens=credited + len(decoding), preemptions=self.chance.random() < self.preempt)
        for request in (*decoding, *first):
            request.output += 1
        for request in list(self.running):
            if request.output >= request.wanted:
                self.running.remove(request)
                self.count(finished=1, finished_prompt_tokens=request.prompt, finished_generated_tokens=request.output)
            elif request.output and self.chance.random() < self.abort:
                self.running.remove(request)
        self.values[Meaning.RUNNING] = float(len(self.running))
        used = sum(r.computed + r.output for r in self.running)
        self.values[Meaning.KV_USAGE_RATIO] = used / (FACTS["block_size"] * FACTS["num_gpu_blocks"])

    def run(self, seconds, rate):
        """Steps until the clock has moved on so far; requests come at ``rate`` per second."""
        end_us = self.now_us + seconds * 1e6
        while self.now_us < end_us:
            if not self.running and self.chance.random() > rate * 0.05:
                self.now_us += 20_000  # idle
                continue
            while len(self.running) < 24 and self.chance.random() < rate * 0.02 + (not self.running):
                prompt = self.chance.randint(8, 900)
                computed, wanted = int(self.cached * prompt), self.chance.randint(2, 120)
                self.running.append(SimpleNamespace(prompt=prompt, computed=computed, output=0, wanted=wanted))
            self.step()

    def reading(self, **other):
        values = self.values | {Meaning[name.upper()]: value for name, value in other.items()}
        return EngineReading("0", "m", self.flavour, tuple(self.ranks * values[each] for each in Meaning), self.facts)


def new_page():
    return PageEngine("server", "", 0, Config())


def scrape(page, engine, *, later_ns=0, wall_ns=10**18, **other):
    """Take the page of the engine's moment, as if it were so much later."""
    at_ns = int(engine.now_us * 1e3) + later_ns
    page.add(wall_ns + at_ns, at_ns, engine.reading(**other))


def scraped(engine, every_s=0.5, seconds=120, rates=(3, 8, 1, 5)):
    page = new_page()
    for number in range(int(seconds / every_s)):
        engine.run(every_s, rates[int(number * every_s / 10) % len(rates)])
        scrape(page, engine)
    return page


def off(rows, share=1.0):
    """How far the true coefficients are off, in the mean over rows."""
    return np.abs(FEATURES.evaluate(rows) @ TRUE * share / rows.elapsed_us - 1).mean()


def rows_of(page):
    ((target, rows),) = page.advance()
    assert target is Target.STEP_TIME
    return rows


def drops_of(page):
    """Windows without a row since the last call, by reason."""
    drops = by_label(page.counts, table.DROPPED_ROWS)
    page.counts.clear()
    return drops


def fitted(rows):
    x = FEATURES.evaluate(rows) / rows.elapsed_us[:, None]
    beta, *_ = np.linalg.lstsq(x, np.ones(len(rows)), rcond=None)
    return beta


@pytest.mark.parametrize(
    ("cached", "counting"),
    [(0.0, "computed"), (0.6, "whole"), (0.6, "computed"), (0.6, "each step"), (0.0, "each step")],
)
def test_known_coefficients_are_found_from_counters_alone(cached, counting):
    """What a release counts as tokens of a step, its page tells: prompts whole, without their hits, or step by step."""
    engine = SimulatedEngine(cached=cached, counting=counting)
    rows = rows_of(scraped(engine))
    beta = fitted(rows)
    assert len(rows) > 100
    assert set(rows.quality.tolist()) == {Quality.METRICS}
    assert (np.diff(rows.end_ns) >= 0).all()
    assert 0.9 * engine.values[Meaning.STEPS] <= rows.steps.sum() <= engine.values[Meaning.STEPS]
    assert off(rows) < 0.05
    assert beta[:2] == pytest.approx(TRUE[:2], rel=0.15)
    assert beta[2] == pytest.approx(TRUE[2], rel=0.25)


def test_aborted_requests_are_left_out_and_the_context_is_exact_again_after_idle_time():
    engine = SimulatedEngine(abort=0.002)
    page = scraped(engine, seconds=60)
    assert page.windows.occupancy.left > 0
    engine.running.clear()
    engine.values[Meaning.RUNNING] = 0.0
    scrape(page, engine, later_ns=10**9)
    newest = page.windows.newest
    assert (newest.context_tokens, newest.decoding) == (0.0, 0.0)
    assert fitted(rows_of(page))[0] == pytest.approx(TRUE[0], rel=0.2)


def test_windows_with_a_preemption_give_no_rows():
    page = scraped(SimulatedEngine(preempt=0.01), seconds=30)
    assert len(rows_of(page)) > 0
    assert drops_of(page)[RowDrop.INCOMPLETE] > 0
    assert drops_of(page) == {}


class FrontEnds(SimulatedEngine):
    """Every request is at one of several front ends, which counts the steps in which one of its requests had output."""

    def __init__(self, front_ends):
        super().__init__()
        self.front_ends = front_ends

    def step(self):
        before, steps = [(request, request.output) for request in self.running], self.values[Meaning.STEPS]
        super().step()
        counting = {request.wanted % self.front_ends for request, output in before if request.output > output}
        self.values[Meaning.STEPS] = steps + len(counting)


@pytest.mark.parametrize("front_ends", [2, 8])
def test_several_front_ends_count_a_step_several_times_and_are_found_out(front_ends):
    page = scraped(FrontEnds(front_ends), seconds=150)
    assert page.windows.front_ends > 1
    rows = rows_of(page)
    beta = fitted(rows)
    assert off(rows) < 0.08
    assert beta[0] == pytest.approx(TRUE[0], rel=0.1)
    assert beta[1] == pytest.approx(TRUE[1], rel=0.2)
    assert drops_of(page)[RowDrop.INCOMPLETE] > 0  # before it was known


def test_a_server_of_bursts_that_is_asked_every_15_seconds_gives_a_row_each_time():
    """What is held at both ends of so long a window tells of no front ends."""
    page = new_page()
    lines = gzip.decompress(RECORDED.read_bytes()).splitlines()[::30]
    for each in (read_page_line(line, "m1") for line in lines):
        page.add(each.unix_ns, each.mono_ns, each.engines[0])
    assert len(rows_of(page)) >= len(lines) - 3
    assert RowDrop.INCOMPLETE not in drops_of(page)


def test_a_restart_begins_anew():
    before, fresh = SimulatedEngine(), SimulatedEngine(seed=1)
    page = scraped(before, seconds=20)
    rows_of(page)
    for _ in range(40):
        fresh.run(0.5, 5)
        scrape(page, fresh, later_ns=int(before.now_us * 1e3))
    assert drops_of(page)[RowDrop.RESTART] == 1
    assert off(rows_of(page)) < 0.1


def test_scrapes_out_of_order_are_counted_and_change_nothing():
    engine, page = SimulatedEngine(), new_page()
    for _ in range(20):
        engine.run(0.5, 5)
        scrape(page, engine)
        scrape(page, engine, later_ns=-5, steps=0.0)
    assert drops_of(page) == {RowDrop.TIME_ORDER: 20}


def test_a_wall_clock_set_back_keeps_rows_in_order():
    engine, page = SimulatedEngine(), new_page()
    for n in range(40):
        engine.run(0.5, 5)
        scrape(page, engine, wall_ns=10**18 - (3600 * 10**9 if n > 20 else 0))
    assert (np.diff(rows_of(page).end_ns) >= 0).all()
    assert drops_of(page) == {}


class Sglang(SimulatedEngine):
    """A pass computes prompts or decodes, never both; the GPU is busy for four fifths of it."""

    flavour, facts = Flavour.SGLANG, {}
    absent = {*Meaning} - {
        *(Meaning.STEPS, *OF_SGLANG, Meaning.FLOPS, Meaning.MEMORY_BYTES, Meaning.PREFILL_TOKENS),
        *(Meaning.PROMPT_TOKENS, Meaning.GENERATED_TOKENS, Meaning.FIRST_TOKENS, Meaning.FINISHED),
        *(Meaning.ITL_COUNT, Meaning.ITL_SECONDS, Meaning.RUNNING, Meaning.KV_USED_TOKENS),
    }

    def step(self):
        prompts, decoding = ([r for r in self.running if bool(r.output) == begun] for begun in (False, True))
        batch, computed = prompts or decoding, sum(request.prompt for request in prompts)
        context = 0 if prompts else sum(request.prompt + request.output for request in decoding)
        took_us = float(TRUE @ [1, computed, context, len(batch)])
        self.now_us += took_us
        self.count(steps=1, decode_steps=not prompts, gpu_seconds=0.8 * took_us / 1e6, memory_bytes=3e9)
        self.count(flops=1e12 * (computed or len(decoding)), itl_seconds=len(decoding) * took_us / 1e6)
        self.count(prefill_tokens=computed, first_tokens=len(prompts), generated_tokens=len(batch))
        self.count(itl_count=0 if prompts else len(decoding))
        for request in batch:
            request.output += 1
            if request.output >= request.wanted:
                self.running.remove(request)
                self.count(finished=1, prompt_tokens=request.prompt)
        self.values[Meaning.RUNNING] = float(len(self.running))
        self.values[Meaning.KV_USED_TOKENS] = float(sum(r.prompt + r.output for r in self.running))


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_of_prompts_and_of_answers_apart_and_the_gpus_share_are_told_by_sglangs_page(ranks):
    """Ranks of a server share its page: what their schedulers count, and the tokens that they hold, add up."""
    engine = Sglang()
    engine.ranks = ranks
    by_target = dict(scraped(engine).advance())
    assert set(by_target) == {Target.STEP_TIME, Target.GPU_TIME}
    for target, share, near in ((Target.STEP_TIME, 1.0, 0.07), (Target.GPU_TIME, 0.8, 0.01)):
        rows = by_target[target]
        assert len(rows) > 100
        assert off(rows, share) < near, target
        assert fitted(rows)[:2] == pytest.approx(share * TRUE[:2], rel=3 * near), target


def test_what_an_engine_estimates_of_its_work_are_columns_where_it_does():
    names = ("estimated_tflop", "estimated_gb")
    (rows,) = [rows for target, rows in scraped(Sglang()).advance() if target is Target.GPU_TIME]
    work = FeatureSet("custom", Target.GPU_TIME, tuple(map(raw_column, names))).evaluate(rows)
    assert work[:, 1] == pytest.approx(3.0 * rows.steps)
    assert (work[:, 0] >= rows.steps).all()
    custom = FeatureSet("custom", Target.STEP_TIME, tuple(map(raw_column, names)))
    assert np.isnan(custom.evaluate(rows_of(scraped(SimulatedEngine(), seconds=20)))).all()
