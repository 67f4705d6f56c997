"""Every number of the client beside its target: ``make bench WHAT=client``.

costs       what a caller pays: CPU time of this process, the best of several rounds
recordings  requests against recordings with client-side truth (``--captures``)
machines    what a plan says that fits, served on the simulated GPU servers of docs/accuracy.md
tables      mean ITL and E2E of H100 runs at their own mix (``--tables``, ``--tools``)
requests    single requests of these runs, beside what routers learn
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import tracefit
from collector.evaluate.baselines import BASELINES
from tests.bench import client_machines, client_minutes, client_tables
from tests.bench.board import Board, run
from tests.support.paths import ROOT
from tests.tracefit.example_snapshot import encoded

MANY = 10_000
WITHIN = 0.1
FIGURES = ("ttft_median", "tpot_median")


def _best_s(call, rounds, repeats=1):
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, (time.process_time() - start) / repeats)
    return best


def costs(board):
    """What a caller pays."""
    config = tracefit.load(encoded()).config()
    draw = random.Random(1)
    prefill = [draw.choice((0, 0, 0, draw.randrange(2000))) for _ in range(MANY)]
    requests = [draw.randrange(1, 256) for _ in range(MANY)]
    context = [draw.randrange(500_000) for _ in range(MANY)]
    one = _best_s(lambda: config.step_time(prefill_tokens=512, requests=20, decode_context_tokens=30_000), 20, 500)
    board.at_most("one prediction", 1e6 * one, 20, " µs")
    columns = {"prefill_tokens": prefill, "requests": requests, "decode_context_tokens": context}
    fresh = tracefit.load(encoded()).config()
    board.keep("10,000 in columns, the first time", 1e3 * _best_s(lambda: fresh.step_time(**columns), 1), " ms")
    board.at_most("10,000 in columns", 1e3 * _best_s(lambda: config.step_time(**columns), 20), 5, " ms")
    chat = {"prompt_tokens": 2000, "output_tokens": 300}
    board.keep("request", 1e6 * _best_s(lambda: config.request(**chat, concurrency=20), 20, 100), " µs")
    plan_s = _best_s(lambda: config.plan(**chat, itl_ms=30, ttft_ms=1000, rate=3), 10, 5)
    board.at_most("plan", 1e3 * plan_s, 20, " ms")
    code = "import time; t = time.process_time(); import tracefit; print(time.process_time() - t)"
    command = [sys.executable, "-c", code]
    imports = [subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout for _ in range(5)]
    board.at_most("import tracefit", 1e3 * min(map(float, imports)), 30, " ms")


def machines(board: Board) -> None:
    """ITL at the planned concurrency, beside the target that was asked for."""
    plans = []
    for plan in client_machines.plans():
        plans.append(plan)
        asked = f"{plan.server} {plan.prompt}/{plan.output} ITL {plan.target_ms:.1f} ms: plan, safe"
        told = f"{plan.planned} {plan.itl - 1:+.1%}, {plan.safe} {plan.safe_itl - 1:+.1%}"
        board.line(asked, told, note="" if plan.usable else "not usable")
    for kind, limit in (("usable", 5), ("not usable", np.inf)):
        of_kind = [plan for plan in plans if plan.usable == (kind == "usable")]
        errors = [abs(100 * (plan.itl - 1)) for plan in of_kind]
        board.at_most(f"ITL of {len(of_kind)} {kind} plans off its target, mean", float(np.mean(errors)), limit, " %")
        board.keep(f"ITL of {kind} plans off its target, worst", max(errors), " %")
        broken = 100 * float(np.mean([plan.safe_itl > 1 for plan in of_kind]))
        board.at_most(f"safe {kind} plans that break the target", broken, 2 * limit, " %")


def recordings(board: Board) -> None:
    """Mean ITL of every later minute."""
    inside = []
    for name in client_minutes.LIMITS:
        minutes = client_minutes.judge(board.captures / name)
        for each in minutes:
            mix = f"{each.prompt:.0f}/{each.output:.0f} met {each.met:.2f} hit {each.prefix_hit:.2f}"
            said = f"{each.true_us / 1e3:.1f} ms {each.error:+.1%}"
            board.line(f"{name} {mix}: ITL", said, note="" if each.inside else "outside of its band")
        error = 100 * float(np.mean([abs(each.error) for each in minutes]))
        board.at_most(f"{name}: mean ITL error", error, np.inf if name.startswith("c2") else 10, " %")
        inside += [each.inside for each in minutes]
    outside = 100 * (1 - float(np.mean(inside)))
    board.at_most(f"of {len(inside)} minutes outside of the published band", outside, 20, " %")


def _exported(board: Board) -> Iterator[tuple[Path, Path]]:
    """Each table, and what an un-forked vLLM would have sent of it."""
    for table in sorted(board.tables.glob("2*.csv.gz")):
        with tempfile.TemporaryDirectory() as directory:
            yield table, board.as_otlp(table.name.removesuffix(".csv.gz"), Path(directory) / "run.pb.gz")


def tables(board: Board) -> None:
    """Mean ITL and E2E of H100 runs at their own mix."""
    within = []
    for table, exported in _exported(board):
        itl, e2e = client_tables.judge(table, exported)
        within.append(max(abs(itl), abs(e2e)) <= WITHIN)
        board.line(f"{table.name[16:-7]}: ITL, E2E", f"{itl:+.1%}, {e2e:+.1%}")
    board.at_most(f"tables of {len(within)} not within 10 % in both", within.count(False), 0.2 * len(within))


def single_requests(board: Board) -> None:
    """What the client says of single requests, beside what routers learn of their features."""
    held, count = Counter(), 0
    for table, exported in _exported(board):
        count += 1
        scores = {score["model"]: score for score in client_tables.side_by_side(exported).scores}
        for name, score in scores.items():
            board.line(
                f"{table.name[16:-7]}, {name}: TTFT, TPOT, median error",
                ", ".join(f"{100 * score[figure]:.2f}" for figure in FIGURES),
            )
        worse = [(n, f) for n in BASELINES for f in FIGURES if scores["request"][f] > scores[n][f] + 5e-4]
        held.update(worse)
    for name in BASELINES:
        for figure in FIGURES:
            what = f"tables of {count}, request worse than {name} in {figure}"
            board.at_most(what, held[name, figure], 0.2 * count)


SECTIONS = {
    "costs": costs,
    "recordings": recordings,
    "machines": machines,
    "tables": tables,
    "requests": single_requests,
}
NEEDS = {"recordings": ("captures",), "tables": ("tables", "tools"), "requests": ("tables", "tools")}

if __name__ == "__main__":
    sys.exit(run(__doc__, SECTIONS, NEEDS))
