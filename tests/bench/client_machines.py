"""Plans beside simulated machines that are stepped request by request in a closed loop.

Coefficients are learned on noisy streams of other mixes, several of them: what one stream teaches of a batch that it
hardly has is luck. The machine itself, without noise, is stepped with the mix that is asked for; the truth is the
largest number of requests in flight whose mean ITL keeps the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import tracefit
from collector.config import Config
from online.bank import Bank
from online.blocks import cell_name, strata_of
from online.features.registry import portable
from online.rows import STEP_FEATURES, Target
from online.snapshot import ConfigSnapshot, Snapshot
from tests.bench import simulated
from tests.support.roofline_steps import MACHINES, Physics, simulate
from tests.tracefit.closed_engine import run

ROWS = 60_000
PLANNED = ("7b_h100", "70b_h100_tp4", "34b_h100_tp2", "8b_a100", "8b_h100_async")
MIXES = ((600, 230), (1800, 60), (200, 400), (700, 800))
STREAMS = ((77, 0), (91, 1), (5, 0), (6, 1), (15, 0), (16, 1))
"""Seed, and order of the segments, of what is learned from."""
TARGETS = (1.5, 2.0)
"""In steps of a request that is alone."""
TRUE_MIN = 4
WITHIN = 0.05


class Truth(NamedTuple):
    """What a machine says of one mix and target: the largest number that keeps it, and the ITL of any."""

    prompt: int
    output: int
    target_us: float
    largest: int
    itl_us: Callable[[int], float]


class Judged(NamedTuple):
    """One plan beside the truth: is it within 5 % or one request, and does the safe one keep the target."""

    truth: Truth
    planned: int
    safe: int
    close: bool
    kept: bool

    @property
    def error(self):
        """Relative, without sign."""
        return abs(self.planned - self.truth.largest) / self.truth.largest


def learned(name, seed, order):
    """What a sidecar publishes after one stream of the machine, as the client loads it.

    And mean errors over the steps of the stream: of x beta F by the sidecar's own columns and cells, of ``step_time``.
    """
    machine, rows = MACHINES[name], simulate(name, ROWS, seed, simulated.segments(order)).rows
    limits = {"max_num_seqs": machine.seats, "max_num_batched_tokens": machine.budget}
    own, config = _published(rows, {**limits, "block_size": 16, "num_gpu_blocks": machine.blocks})
    names = ("prefill_tokens", "requests", "decode_context_tokens")
    columns = {column: rows.raw[:, STEP_FEATURES.index(column)].tolist() for column in names}
    asked = np.array(config.step_time(**columns).us)
    return config, *(float(np.mean(np.abs(said / rows.elapsed_us - 1.0))) for said in (own, asked))


def truths_of(name):
    """Every mix and target at which the machine holds a few requests."""
    machine = MACHINES[name]
    for prompt, output in MIXES:
        step = _true_step(machine, prompt)
        alone_us = step(0, 1, prompt + output / 2)
        for times in TARGETS:
            largest, itl_us = _largest(step, machine, prompt, output, times * alone_us)
            if largest >= TRUE_MIN:
                yield Truth(prompt, output, times * alone_us, largest, itl_us)


def judge(config, truth):
    """A plan and a safe plan; None where it is not the target that ends it."""
    asked = {"prompt_tokens": truth.prompt, "output_tokens": truth.output, "itl_ms": truth.target_us / 1e3}
    plan, safe = config.plan(**asked), config.plan(**asked, safe=True).concurrency
    if plan.limit not in ("itl", "token_budget"):
        return None
    close = abs(plan.concurrency - truth.largest) <= max(1.0, WITHIN * truth.largest)  # no whole number is, of 4
    kept = safe <= truth.largest or truth.itl_us(safe) <= truth.target_us
    return Judged(truth, plan.concurrency, safe, close, kept)


def _published(rows, facts):
    """What the sidecar's own columns and cells make of these rows, and the same snapshot as the client loads it."""
    bank = Bank(Config(learners=("rls",), feature_sets=("portable",)))
    bank.learn("c0", Target.STEP_TIME, rows)
    published = ConfigSnapshot(config_id="c0", config=facts, engines=[], telemetry="steps", targets=bank.targets("c0"))
    snapshot = Snapshot(generation=1, created_unix_nano=1, tracefit_version="0", configs=[published])
    target = published.targets["step_time"]
    beta = np.array([each.coefficient for each in target.models["portable"].features])
    factors = {cell: each.factor for cell, each in target.shape_factors.items()}
    cells = strata_of(Target.STEP_TIME, rows)[1].tolist()
    shaped = np.array([factors.get(cell_name(cell), 1.0) for cell in cells])
    own = portable(Target.STEP_TIME).evaluate(rows) @ beta * shaped
    return own, tracefit.load(snapshot.to_json()).config()


def _true_step(machine, prompt):
    """The machine's physics as a function of what a step is made of; noise as its mean."""
    physics = Physics(machine)

    def step(prefill, requests, context):
        prefills = min(requests, -(-prefill // prompt))
        return physics.step_us(prefill, prefill * prompt / 2, requests - prefills, context, requests) + 90

    return step


def _largest(step, machine, prompt, output, itl_us):
    def itl(n):
        load = {"concurrency": n, "prompt": prompt, "output": output, "slots": machine.seats, "budget": machine.budget}
        return run(step, **load, finished=max(200, 5 * n)).itl_us

    low, high = 0, min(machine.seats, int(machine.blocks * 16 / (prompt + output))) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if itl(middle) <= itl_us else (low, middle)
    return low, itl
