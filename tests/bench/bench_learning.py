"""Every number of the learning core beside its target: ``make bench WHAT=learning``.

Exit status 1 if a target is missed. What needs ``--tools`` (tests/bench/outside.py) is printed as skipped without it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collector.config.learning_config import BankConfig
from collector.config.schema import Config
from online.bank import Bank, merge_states
from online.blocks import Cutter
from online.features.registry import portable
from online.rows import RowBlock, Target
from tests.bench import captured, learning_bars, learning_drift, learning_merge, learning_river, simulated
from tests.bench.outside import add_arguments, outside_of
from tests.support.linear_steps import BETA, steps
from tests.support.roofline_steps import MACHINES, Slowdown, simulate

STREAM_ROWS = 84_000
DRIFT_ROWS = 24_000
NEVER = learning_drift.NEVER
HELD_ROWS = 256
RLS = Config(learners=("rls",))


@dataclass(frozen=True)
class Line:
    """One measured number; ``ok`` is None where there is no target."""

    what: str
    value: str
    target: str
    ok: bool | None


def at_most(what, value, limit, unit="", digits=2):
    """A number that must not exceed its limit."""
    return Line(what, f"{value:.{digits}f}{unit}", f"<= {limit}{unit}", bool(value <= limit))


def between(what, value, low, high, unit="", digits=1):
    """A number with a range."""
    return Line(what, f"{value:.{digits}f}{unit}", f"{low}..{high}{unit}", bool(low <= value <= high))


# ------------------------------------------------------------------- simulated machines


def _steady(job):
    name, seed, order = job
    stream = simulate(name, STREAM_ROWS, seed, simulated.segments(order))
    rows, features = stream.rows, simulated.physics(stream.machine)
    frozen, segment = [], stream.segment
    ends = {int(np.flatnonzero(segment == s)[-1]) for s in np.unique(segment)}

    def hook(at, model):
        while ends and min(ends) < at:
            frozen.append((min(ends), model.members.slow.beta[: len(features)].copy()))
            ends.remove(min(ends))

    run = simulated.prequential(rows, features, hook)
    good = ~stream.outlier[: len(run.y)] & (np.arange(len(run.y)) >= HELD_ROWS) & np.isfinite(run.slow)
    x = features.evaluate(rows)[: len(run.y)]
    worst = 0.0
    for end, beta in frozen:
        ape = np.abs(x @ beta - run.y) / run.y
        for s in np.unique(segment[: end + 1]):
            worst = max(worst, ape[good & (segment[: len(run.y)] == s) & (np.arange(len(run.y)) <= end)].mean())
    shaped = run.ape("shaped")[good]
    return {
        "name": name,
        "shaped": 100 * shaped.mean(),
        "slow": 100 * run.ape("slow")[good].mean(),
        "p90": 100 * np.quantile(shaped, 0.9),
        "covered": 100 * run.covered()[HELD_ROWS:].mean(),
        "frozen": 100 * worst,
        "reports": run.model.members.drift.confirmed,
        "rows": len(run.y),
    }


def _changed(job):
    name, gain, seed = job
    stream = simulate(name, DRIFT_ROWS, seed, simulated.segments(0), [Slowdown(0.74, gain)])
    onset = int(0.74 * DRIFT_ROWS)
    first = {}

    def hook(at, model):
        if at > onset and model.members.drift.confirmed:
            first.setdefault("report", at - onset)

    run = simulated.prequential(stream.rows, simulated.physics(stream.machine), hook)
    good = ~stream.outlier[: len(run.y)] & np.isfinite(run.shaped)
    after = good & (np.arange(len(run.y)) >= onset) & (np.arange(len(run.y)) < onset + 500)
    return {
        "name": name,
        "report": first.get("report", NEVER),
        "first500": 100 * run.ape("shaped")[after].mean(),
        "covered": 100 * run.covered()[after].mean(),
    }


def simulated_lines(pool):
    """Accuracy, false reports, coverage and drift on the six machines."""
    names = list(MACHINES)
    runs = list(pool.map(_steady, [(n, 1000 + 7 * i, i) for i in range(2) for n in names]))
    for run in runs:
        yield at_most(f"MAPE, shaped, {run['name']} (coefficients alone {run['slow']:.2f} %)", run["shaped"], 2.0, " %")
    yield at_most("MAPE, shaped, median over machines", float(np.median([r["shaped"] for r in runs])), 1.4, " %")
    yield at_most("p90 of APE with shape factors, worst machine", max(r["p90"] for r in runs), 4.1, " %")
    for run in runs:
        yield between(f"P10-P90 coverage, steady, {run['name']}", run["covered"], 78, 82, " %")
    for run in runs:
        yield at_most(f"frozen at each regime's end, worst earlier regime, {run['name']}", run["frozen"], 4.0, " %")
    total = sum(r["rows"] for r in runs)
    per_million = 1e6 * sum(r["reports"] for r in runs) / total
    yield at_most(f"false drift reports per 1e6 of {total} steps", per_million, 20, "", 1)
    jobs = [(n, g, 2000) for g in (1.1, 1.2, 2.0) for n in names]
    for (name, gain, _), found in zip(jobs, pool.map(_changed, jobs), strict=True):
        if gain == 1.1:
            value = "missed" if found["report"] == NEVER else f"{found['report']} rows"
            yield Line(f"x1.1 reported, {name}", value, "found", found["report"] != NEVER)
            continue
        if gain == 1.2:
            yield at_most(f"x1.2 reported after, {name}", found["report"], 200, " rows", 0)
        yield at_most(f"x{gain} first-500 MAPE, {name}", found["first500"], 3.5 if gain == 1.2 else 7.0, " %")
        if gain == 2.0:
            value = found["covered"]
            yield Line(f"x2 P10-P90 coverage, 500 rows, {name}", f"{value:.1f} %", ">= 75 %", bool(value >= 75))


# ------------------------------------------------------------------- linear machines


def endurance_lines():
    """Ten million steps that excite next to nothing, then the workload returns."""
    rich, dull, back = steps(8000, 1), steps(64, 2, batch=(8, 8), prefill_share=0.0), steps(400, 3)
    state = simulated.TargetState(Target.STEP_TIME, RLS)
    state.offer(portable(Target.STEP_TIME), lambda _features: None)
    model = state.models["portable"]
    for block in state.cutter.push(state.matrix.evaluate(rich.rows)[0]):
        model.learn(block)
    # One constant step with noise, over and over: blocks of 4096 for speed, the statistics do not care.
    rng = np.random.default_rng(4)
    raw = np.repeat(dull.rows.raw[:1], 4096, axis=0)
    wide = Cutter(4096, 10**18)
    for _ in range(10_000_000 // 4096 + 1):
        y = dull.truth_us[0] * np.exp(0.01 * rng.standard_normal(4096))
        for block in wide.push(state.matrix.evaluate(RowBlock.of_lines(raw, y))[0]):
            model.learn(block)
    diagnosis, members = model.diagnosis(), model.members
    slow = members.slow
    finite = all(np.isfinite(a).all() for a in (slow.strata.g, slow.beta, slow.meat.m))
    yield Line("1e7 dull steps: state finite", str(finite), "True", finite)
    yield Line("1e7 dull steps: scaled condition", f"{diagnosis.condition:.2g}", "<= 1e8", diagnosis.condition <= 1e8)
    ape = []
    for block in Cutter(32, 10**18).push(state.matrix.evaluate(back.rows)[0]):
        ape.append(np.abs(model.predict(block) - block.elapsed_us) / block.elapsed_us)
        model.learn(block)
    yield at_most("MAPE of the first 200 after excitation returns", 100 * np.concatenate(ape)[:200].mean(), 1.5, " %")


def _intervals_of(seed):
    bank = Bank(RLS)
    bank.learn("c", Target.STEP_TIME, steps(4096, 50_000 + seed, noise=0.02, autocorrelation=0.97).rows)
    features = bank.targets("c")["step_time"].models["portable"].features
    return [abs(f.coefficient - b) < 1.96 * f.stderr for f, b in zip(features, BETA, strict=True)]


def coefficient_lines(pool):
    """Confidence intervals under noise with a memory of 33 steps; the compile step."""
    hits = np.array(list(pool.map(_intervals_of, range(150))))
    yield between("95 % intervals of coefficients under AR(1) 0.97 cover", 100 * hits.mean(), 90, 97, " %")
    found = []
    for warm_up in (False, True):
        bank = Bank(RLS)
        bank.learn("c", Target.STEP_TIME, steps(2000, 8, warm_up=warm_up).rows)
        found.append([f.coefficient for f in bank.targets("c")["step_time"].models["portable"].features])
    moved = 100 * float(np.abs(np.array(found[1]) / np.array(found[0]) - 1).max())
    yield at_most("a 12 s compile step moves a coefficient by", moved, 1.0, " %", 3)


def state_lines():
    """Restart, merge and size."""
    rows = steps(12_000, 5, batch=(1, 256), stalls=0.005).rows
    through, stopped, again = Bank(RLS), Bank(RLS), Bank(RLS)
    through.learn("c", Target.STEP_TIME, rows)
    stopped.learn("c", Target.STEP_TIME, rows.slice(0, 5001))
    again.restore(stopped.state())
    again.learn("c", Target.STEP_TIME, rows.slice(5001, 12_000))
    same = again.state() == through.state()
    yield Line("restart: bitwise equal continuation", str(same), "True", same)
    yield at_most("state of one target", len(through.state()) / 1024, 64, " kB", 1)
    a, b = ([f.coefficient for f in _merged(order)] for order in ((1, 2), (2, 1)))
    apart = float(np.abs(np.array(a) / np.array(b) - 1).max())
    yield Line("merge, either order, relative", f"{apart:.1e}", "<= 1e-9", apart <= 1e-9)


def _merged(seeds):
    parts = []
    for seed in seeds:
        bank = Bank(RLS)
        bank.learn("c", Target.STEP_TIME, steps(3000, seed).rows)
        parts.append(bank.state())
    merged = Bank(RLS)
    merged.restore(merge_states(parts, RLS))
    return merged.targets("c")["step_time"].models["portable"].features


def speed_lines():
    """The whole learner, rows in to statistics, errors, intervals and drift: CPU time of the quietest of 200 chunks."""
    rows = steps(44_096, 1, stalls=0.005).rows
    for block_rows, target in ((32, None), (64, 250_000), (512, 1_000_000)):
        bank = Bank(Config(learners=("rls",), bank=BankConfig(block_rows=block_rows, block_s=1e9)))
        bank.learn("c", Target.STEP_TIME, rows.slice(0, 4096))
        best, chunk = float("inf"), 1024
        for k in range(200):
            at = 4096 + chunk * (k % 39)
            part = rows.slice(at, at + chunk)
            start = time.process_time()
            bank.learn("c", Target.STEP_TIME, part)
            best = min(best, time.process_time() - start)
        rate = chunk / best
        limit = "" if target is None else f">= {target}"
        ok = None if target is None else rate >= target
        yield Line(f"rows/s per thread, block {block_rows}", f"{rate:.0f}", limit, ok)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--captures", type=Path, help="recordings, a directory each")
    parser.add_argument("--base", type=Path, help="another version of the project, for its CPU time")
    parser.add_argument("--only", help="the section whose title begins so")
    arguments = parser.parse_args()
    outside = outside_of(arguments)
    missed = skipped = 0
    with ProcessPoolExecutor() as pool:
        sections = (
            ("speed", speed_lines()),
            ("state", state_lines()),
            ("merge", learning_merge.lines(Line)),
            ("coefficients", coefficient_lines(pool)),
            ("error bars and bands", learning_bars.lines(Line, pool, arguments.captures)),
            ("changes of speed", learning_drift.lines(Line, pool, arguments.captures)),
            ("endurance", endurance_lines()),
            ("simulated machines", simulated_lines(pool)),
            ("recordings", captured.lines(Line, pool, outside)),
            ("correction", learning_river.lines(Line, pool, arguments.captures, arguments.base)),
        )
        for title, lines in sections:
            if not title.startswith(arguments.only or ""):
                continue
            print(f"\n{title}")
            for line in lines:
                mark = {True: "ok", False: "MISSED", None: ""}[line.ok]
                missed += line.ok is not None and not line.ok
                skipped += line.value == "SKIPPED"
                print(f"  {line.what:<72} {line.value:>14}  {line.target:<16} {mark}", flush=True)
    print(f"\n{missed} targets missed, {skipped} sections skipped")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
