"""Every number of the client beside its target: ``make bench WHAT=client``.

costs       what a caller pays: CPU time of this process, the best of several rounds
machines    what a plan says that fits, served on the simulated GPU servers of docs/accuracy.md
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

import tracefit
from tests.bench import bench_gpus
from tests.bench.bench_systems import TEN
from tests.bench.board import Board, run
from tests.support.gpu_kernels import step_times
from tests.support.paths import ROOT
from tests.tracefit.example_snapshot import encoded

MIXES = ((600, 230), (1800, 60), (200, 400))
TARGETS = (1.5, 2.0)
"""In ITLs of a request that is alone."""
LEARN_S, SERVE_S = 240.0, 40.0
LEAST = 4
"""Requests: of fewer no whole number is near the target."""


def _best_s(call, rounds, repeats=1):
    return min(timeit.repeat(call, timer=time.process_time, repeat=rounds, number=repeats)) / repeats


def costs(board):
    """What a caller pays."""
    config = tracefit.load(encoded()).config()
    one = _best_s(lambda: config.step_time(prefill_tokens=512, requests=20, decode_context_tokens=30_000), 20, 500)
    board.at_most("one prediction", 1e6 * one, 20, " µs")
    chat = {"prompt_tokens": 2000, "output_tokens": 300}
    board.keep("request", 1e6 * _best_s(lambda: config.request(**chat, concurrency=20), 20, 100), " µs")
    plan_s = _best_s(lambda: config.plan(**chat, itl_ms=30, ttft_ms=1000, rate=3), 10, 5)
    board.at_most("plan", 1e3 * plan_s, 20, " ms")
    code = "import time; t = time.process_time(); import tracefit; print(time.process_time() - t)"
    command = [sys.executable, "-c", code]
    imports = [subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout for _ in range(5)]
    board.at_most("import tracefit", 1e3 * min(map(float, imports)), 30, " ms")


def _planned(case: bench_gpus.Case) -> Iterator[tuple[str, tracefit.Plan, float, float]]:
    """Of one server what was asked, the plan of a few requests that its ITL limits, and its and the safe ITL / target.

    Coefficients are learned from four minutes of other traffic; the truth is the mean ITL of a closed loop of so many.
    """
    times = step_times(case.machine, case.gpu)
    traffic = bench_gpus.learned_traffic(case, times, LEARN_S / 60)
    engine = bench_gpus.served(case, times, traffic, LEARN_S, bench_gpus.LEARN_SEED)
    with tempfile.TemporaryDirectory() as directory:
        config = bench_gpus.learned(bench_gpus.sent(case, engine, "steps", Path(directory)), {}).config()

    def itl_us(clients: int, mix: tuple[int, int]) -> float:
        return bench_gpus.exam_truth(case, times, (max(clients, 1), *mix), SERVE_S).engine.itl

    for mix, times_alone in product(MIXES, TARGETS):
        target_us = times_alone * itl_us(1, mix)
        asked = {"prompt_tokens": mix[0], "output_tokens": mix[1], "itl_ms": target_us / 1e3}
        plan, safe = config.plan(**asked), config.plan(**asked, safe=True).concurrency
        if plan.limit == "itl" and plan.concurrency >= LEAST:
            what = f"{case.name} {mix[0]}/{mix[1]} ITL {target_us / 1e3:.1f} ms: plan {plan.concurrency}, safe {safe}"
            yield what, plan, itl_us(plan.concurrency, mix) / target_us, itl_us(safe, mix) / target_us


def machines(board: Board) -> None:
    """ITL at the planned concurrency, beside the target that was asked for."""
    ratios = {True: [], False: []}
    for case in bench_gpus.all_cases():
        for what, plan, itl, safe_itl in _planned(case) if case.name in TEN else ():
            ratios[plan.at.usable].append((itl, safe_itl))
            board.line(what, f"{itl - 1:+.1%}, {safe_itl - 1:+.1%}", note="" if plan.at.usable else "not usable")
    for usable, limit in ((True, 5), (False, np.inf)):
        kind, found = "usable" if usable else "not usable", np.array(ratios[usable])
        errors, broken = 100 * abs(found[:, 0] - 1), 100 * float((found[:, 1] > 1).mean())
        board.at_most(f"ITL of {len(found)} {kind} plans off its target, mean", float(errors.mean()), limit, " %")
        board.keep(f"ITL of {kind} plans off its target, worst", float(errors.max()), " %")
        board.at_most(f"safe {kind} plans that break the target", broken, 2 * limit, " %")


SECTIONS = {
    "costs": costs,
    "machines": machines,
}

if __name__ == "__main__":
    sys.exit(run(__doc__, SECTIONS))
