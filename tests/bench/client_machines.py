"""Plans beside simulated GPU servers: what a plan says that fits is served, in a closed loop of just so many clients.

Coefficients are learned from four minutes of other traffic (bench_gpus.py). The truth is the mean ITL of the requests
of the loop, beside the target that the plan was asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.bench import bench_gpus
from tests.bench.bench_systems import TEN
from tests.support.gpu_kernels import step_times

MIXES = ((600, 230), (1800, 60), (200, 400))
TARGETS = (1.5, 2.0)
"""In ITLs of a request that is alone."""
LEARN_S, SERVE_S = 240.0, 40.0
LEAST = 4
"""Requests: of fewer no whole number is near the target."""


class Plan(NamedTuple):
    """One question and what a server makes of the answer; ITLs relative to the target."""

    server: str
    prompt: int
    output: int
    target_ms: float
    planned: int
    safe: int
    usable: bool
    itl: float
    safe_itl: float


def plans() -> Iterator[Plan]:
    """Every server, mix and target at which the plan is a few requests and it is the ITL that limits it."""
    for case in bench_gpus.all_cases():
        if case.name not in TEN:
            continue
        times = step_times(case.machine, case.gpu)
        traffic = bench_gpus.learned_traffic(times, LEARN_S / 60)
        engine = bench_gpus.served(case, times, traffic, LEARN_S, bench_gpus.LEARN_SEED)
        with tempfile.TemporaryDirectory() as directory:
            config = bench_gpus.learned(bench_gpus.sent(case, engine, "steps", Path(directory))).config()

        def itl_us(clients: int, prompt: int, output: int, case=case, times=times) -> float:
            return bench_gpus.exam_truth(case, times, (clients, prompt, output), SERVE_S).engine.itl

        for prompt, output in MIXES:
            alone_us = itl_us(1, prompt, output)
            for times_alone in TARGETS:
                target_us = times_alone * alone_us
                asked = {"prompt_tokens": prompt, "output_tokens": output, "itl_ms": target_us / 1e3}
                plan, safe = config.plan(**asked), config.plan(**asked, safe=True).concurrency
                if plan.limit == "itl" and plan.concurrency >= LEAST:
                    told = case.name, prompt, output, target_us / 1e3, plan.concurrency, safe, plan.at.usable
                    at = (itl_us(clients, prompt, output) / target_us for clients in (plan.concurrency, max(safe, 1)))
                    yield Plan(*told, *at)
