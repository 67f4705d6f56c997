"""Two scrapes make an interval equation: checked on a simulated engine whose coefficients are known."""

import gzip
import math
import random

import numpy as np
import pytest

from collector.decode.pages import ESTIMATES, EngineReading, Flavour, Meaning, PageParser, read_page_line
from collector.join.pages import PageEngine
from collector.telemetry import RowDrop, table
from online import Quality, Target
from online.features import build
from online.features.columns import FeatureSet, raw_column
from tests.support.page_server import RECORDED

FEATURES = build("portable", Target.STEP_TIME, {})
TRUE = np.array([10_000.0, 200.0, 1.5, 300.0])  # us: step, prefill token, context token, request
FACTS = {"block_size": 32, "num_gpu_blocks": 4096}
OF_SGLANG = (Meaning.DECODE_STEPS, Meaning.GPU_SECONDS)


class SimulatedEngine:
    """Runs steps by known coefficients and keeps vLLM's counters."""

    flavour, facts = Flavour.VLLM, FACTS

    def __init__(self, seed=0, budget=512, frontends=1, abort=0.0, preempt=0.0, cached=0.0, counting="computed"):
        self.chance = random.Random(seed)
        self.budget, self.frontends, self.abort, self.preempt = budget, frontends, abort, preempt
        self.cached, self.counting = cached, counting
        self.now_us, self.values = 0.0, [0.0] * len(Meaning)
        for absent in (Meaning.KV_USED_TOKENS, Meaning.PREFILL_TOKENS, *OF_SGLANG, *ESTIMATES):
            self.values[absent] = math.nan
        self.running = []  # [prompt, computed, output so far, output wanted]

    def count(self, meaning, amount=1.0):
        self.values[meaning] += amount

    def step(self):
        left, prefill, context, decoding = self.budget, 0, 0, 0
        first, done = [], []
        for request in self.running:
            if request[1] < request[0]:
                chunk = min(left, request[0] - request[1])
                left -= chunk
                prefill += chunk
                self.count(Meaning.STEP_TOKENS, chunk * (self.counting == "each step"))
                request[1] += chunk
                if chunk and request[1] == request[0]:
                    first.append(request)
            else:
                decoding += 1
                context += request[0] + request[2]
                request[2] += 1
        requests = decoding + sum(1 for r in self.running if r[2] == 0)
        took_us = float(TRUE @ [1, prefill, context, requests])
        self.now_us += took_us
        for request in first:
            request[2] = 1
            self.count(Meaning.FIRST_TOKENS)
            hits = int(self.cached * request[0])
            self.count(Meaning.PROMPT_TOKENS, request[0])
            self.count(Meaning.PREFIX_HIT_TOKENS, hits)
            credited = {"whole": request[0] + 1, "computed": request[0] - hits + 1, "each step": 0}
            self.count(Meaning.STEP_TOKENS, credited[self.counting])
        for request in list(self.running):
            if request[2] >= request[3]:
                self.running.remove(request)
                done.append(request)
                self.count(Meaning.FINISHED)
                self.count(Meaning.FINISHED_PROMPT_TOKENS, request[0])
                self.count(Meaning.FINISHED_GENERATED_TOKENS, request[2])
            elif request[2] and self.chance.random() < self.abort:
                self.running.remove(request)
        output = decoding + len(first)
        self.count(Meaning.GENERATED_TOKENS, output)
        self.count(Meaning.STEP_TOKENS, decoding)
        self.count(Meaning.ITL_COUNT, decoding)
        self.count(Meaning.ITL_SECONDS, decoding * took_us / 1e6)
        self.count(Meaning.STEPS, min(self.frontends, output))
        if self.chance.random() < self.preempt:
            self.count(Meaning.PREEMPTIONS)
        self.values[Meaning.RUNNING] = float(len(self.running))
        used = sum(r[1] + r[2] for r in self.running)
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
                self.running.append([prompt, int(self.cached * prompt), 0, self.chance.randint(2, 120)])
            self.step()

    def reading(self, **other):
        values = list(self.values)
        for name, value in other.items():
            values[Meaning[name.upper()]] = value
        return EngineReading("0", "m", self.flavour, tuple(values), self.facts)


def scraped(engine, every_s=0.5, seconds=120, rates=(3, 8, 1, 5), without=()):
    page = PageEngine("server", "", 0)
    for number in range(int(seconds / every_s)):
        engine.run(every_s, rates[int(number * every_s / 10) % len(rates)])
        gone = dict.fromkeys(without, math.nan)
        page.add(10**18 + int(engine.now_us * 1e3), int(engine.now_us * 1e3), engine.reading(**gone))
    return page


def rows_of(page):
    (found,) = page.advance()
    assert found.target is Target.STEP_TIME
    return found.rows


def drops_of(page):
    """Windows without a row since the last call, by reason."""
    return page.take_counts().by_label(table.DROPPED_ROWS)


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
    assert np.abs(FEATURES.evaluate(rows) @ TRUE / rows.elapsed_us - 1).mean() < 0.05
    assert beta[0] == pytest.approx(TRUE[0], rel=0.15)
    assert beta[1] == pytest.approx(TRUE[1], rel=0.15)
    assert beta[2] == pytest.approx(TRUE[2], rel=0.25)


@pytest.mark.parametrize(
    ("without", "rates", "of_prompts"),
    [(("itl_count", "itl_seconds"), (8,), 0.3), (("steps", "step_tokens"), (3, 8, 1, 5), 0.5)],
)
def test_a_page_without_latencies_or_without_a_counter_of_steps_gives_rows_too(without, rates, of_prompts):
    """By the clock of busy windows, and by the mean batch."""
    beta = fitted(rows_of(scraped(SimulatedEngine(), rates=rates, without=without)))
    assert beta[0] == pytest.approx(TRUE[0], rel=0.35)
    assert beta[1] == pytest.approx(TRUE[1], rel=of_prompts)


def test_aborted_requests_are_left_out_and_the_context_is_exact_again_after_idle_time():
    engine = SimulatedEngine(abort=0.002)
    page = scraped(engine, seconds=60)
    assert page.windows.newest.left > 0
    engine.running.clear()
    engine.values[Meaning.RUNNING] = 0.0
    at_ns = int(engine.now_us * 1e3) + 10**9
    page.add(10**18 + at_ns, at_ns, engine.reading())
    assert page.windows.newest.context_tokens == 0.0
    assert page.windows.newest.decoding == 0.0
    beta = fitted(rows_of(page))
    assert beta[0] == pytest.approx(TRUE[0], rel=0.2)


def test_windows_with_a_preemption_give_no_rows():
    page = scraped(SimulatedEngine(preempt=0.01), seconds=30)
    rows = rows_of(page)
    drops = drops_of(page)
    assert drops[RowDrop.INCOMPLETE] > 0
    assert len(rows) > 0
    assert drops_of(page) == {}


class FrontEnds(SimulatedEngine):
    """Every request is at one of several front ends, which counts the steps in which one of its requests had output."""

    def __init__(self, front_ends, seed=0):
        super().__init__(seed)
        self.front_ends, self.choice = front_ends, random.Random(seed)

    def step(self):
        for request in self.running:
            request.extend([self.choice.randrange(self.front_ends)] if len(request) == 4 else [])
        before, steps = [(request, request[2]) for request in self.running], self.values[Meaning.STEPS]
        super().step()
        counting = {request[4] for request, output in before if request[2] > output}
        self.values[Meaning.STEPS] = steps + len(counting)


@pytest.mark.parametrize("front_ends", [2, 8])
def test_several_front_ends_count_a_step_several_times_and_are_found_out(front_ends):
    page = scraped(FrontEnds(front_ends), seconds=150)
    assert page.windows.copies > 1
    rows = rows_of(page)
    beta = fitted(rows)
    assert np.abs(FEATURES.evaluate(rows) @ TRUE / rows.elapsed_us - 1).mean() < 0.08
    assert beta[0] == pytest.approx(TRUE[0], rel=0.1)
    assert beta[1] == pytest.approx(TRUE[1], rel=0.2)
    assert drops_of(page)[RowDrop.INCOMPLETE] > 0  # before it was known


def test_a_server_of_bursts_that_is_asked_every_15_seconds_gives_a_row_each_time():
    """What is held at both ends of so long a window tells of no front ends."""
    parser, page = PageParser(), PageEngine("m1", "", 0)
    lines = gzip.decompress(RECORDED.read_bytes()).splitlines()[::30]
    for each in (read_page_line(line, parser, "m1") for line in lines):
        page.add(each.unix_ns, each.mono_ns, each.engines[0])
    assert len(rows_of(page)) >= len(lines) - 3
    assert RowDrop.INCOMPLETE not in drops_of(page)


def test_a_restart_begins_anew():
    engine = SimulatedEngine()
    page = scraped(engine, seconds=20)
    rows_of(page)
    fresh = SimulatedEngine(seed=1)
    for n in range(1, 41):
        fresh.run(0.5, 5)
        at_ns = int((engine.now_us + fresh.now_us) * 1e3) + n
        page.add(10**18 + at_ns, at_ns, fresh.reading())
    rows = rows_of(page)
    drops = drops_of(page)
    assert drops[RowDrop.RESTART] == 1
    assert RowDrop.AMBIGUOUS not in drops, "one server after the other"
    assert np.abs(FEATURES.evaluate(rows) @ TRUE / rows.elapsed_us - 1).mean() < 0.1


def test_scrapes_out_of_order_are_counted_and_change_nothing():
    engine, page = SimulatedEngine(), PageEngine("server", "", 0)
    for _ in range(20):
        engine.run(0.5, 5)
        at_ns = int(engine.now_us * 1e3)
        page.add(10**18 + at_ns, at_ns, engine.reading())
        page.add(10**18 + at_ns - 5, at_ns - 5, engine.reading(steps=0.0))
    assert drops_of(page) == {RowDrop.TIME_ORDER: 20}


def test_a_wall_clock_set_back_keeps_rows_in_order_and_another_host_begins_a_new_window():
    engine, page = SimulatedEngine(), PageEngine("server", "", 0)
    for n in range(40):
        engine.run(0.5, 5)
        back_ns = 3600 * 10**9 if n > 20 else 0
        at_ns = int(engine.now_us * 1e3)
        page.add(10**18 + at_ns - back_ns, at_ns, engine.reading())
    assert (np.diff(rows_of(page).end_ns) >= 0).all()
    engine.run(0.5, 5)
    page.add(2 * 10**18, 5, engine.reading())  # a monotonic clock of another boot
    engine.run(0.5, 5)
    page.add(2 * 10**18 + 10**9, 10**9, engine.reading())
    assert drops_of(page) == {}


class Sglang(SimulatedEngine):
    """A pass computes prompts or decodes, never both; the GPU is busy for four fifths of it."""

    flavour, facts = Flavour.SGLANG, {}

    def __init__(self, seed=0):
        super().__init__(seed)
        self.values = [math.nan] * len(Meaning)
        for meaning in (
            *(Meaning.STEPS, Meaning.DECODE_STEPS, Meaning.GPU_SECONDS, Meaning.FLOPS, Meaning.MEMORY_BYTES),
            *(Meaning.PREFILL_TOKENS, Meaning.PROMPT_TOKENS, Meaning.GENERATED_TOKENS, Meaning.FIRST_TOKENS),
            *(Meaning.FINISHED, Meaning.ITL_COUNT, Meaning.ITL_SECONDS, Meaning.RUNNING, Meaning.KV_USED_TOKENS),
        ):
            self.values[meaning] = 0.0

    def step(self):
        prompts = [request for request in self.running if not request[2]]
        decoding = [request for request in self.running if request[2]]
        computed = sum(request[0] for request in prompts)
        context = 0 if prompts else sum(request[0] + request[2] for request in decoding)
        requests = len(prompts) or len(decoding)
        took_us = float(TRUE @ [1, computed, context, requests])
        self.now_us += took_us
        self.count(Meaning.STEPS)
        self.count(Meaning.GPU_SECONDS, 0.8 * took_us / 1e6)
        self.count(Meaning.FLOPS, 1e12 * (computed or len(decoding)))
        self.count(Meaning.MEMORY_BYTES, 3e9)
        self.count(Meaning.ITL_SECONDS, len(decoding) * took_us / 1e6)
        self.count(Meaning.PREFILL_TOKENS, computed)
        self.count(Meaning.FIRST_TOKENS, len(prompts))
        self.count(Meaning.GENERATED_TOKENS, requests)
        if not prompts:
            self.count(Meaning.DECODE_STEPS)
            self.count(Meaning.ITL_COUNT, len(decoding))
        for request in prompts or decoding:
            request[2] += 1
            if request[2] >= request[3]:
                self.running.remove(request)
                self.count(Meaning.FINISHED)
                self.count(Meaning.PROMPT_TOKENS, request[0])
        self.values[Meaning.RUNNING] = float(len(self.running))
        self.values[Meaning.KV_USED_TOKENS] = float(sum(request[0] + request[2] for request in self.running))


def test_passes_of_prompts_and_of_answers_apart_and_the_gpus_share_are_told_by_sglangs_page():
    by_target = {found.target: found.rows for found in scraped(Sglang()).advance()}
    assert set(by_target) == {Target.STEP_TIME, Target.GPU_TIME}
    for target, share, near in ((Target.STEP_TIME, 1.0, 0.07), (Target.GPU_TIME, 0.8, 0.03)):
        rows = by_target[target]
        assert len(rows) > 100
        assert np.abs(FEATURES.evaluate(rows) @ TRUE * share / rows.elapsed_us - 1).mean() < near, target
        assert fitted(rows)[:2] == pytest.approx(share * TRUE[:2], rel=2 * near), target


def test_what_an_engine_estimates_of_its_work_are_columns_where_it_does():
    names = ("estimated_tflop", "estimated_gb")
    (rows,) = [found.rows for found in scraped(Sglang()).advance() if found.target is Target.GPU_TIME]
    work = FeatureSet("custom", Target.GPU_TIME, tuple(map(raw_column, names))).evaluate(rows)
    assert work[:, 1] == pytest.approx(3.0 * rows.steps)
    assert (work[:, 0] >= rows.steps).all()
    custom = FeatureSet("custom", Target.STEP_TIME, tuple(map(raw_column, names)))
    assert np.isnan(custom.evaluate(rows_of(scraped(SimulatedEngine(), seconds=20)))).all()
