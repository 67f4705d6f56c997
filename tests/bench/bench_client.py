"""Every number of the client beside its target: ``make bench WHAT=client``.

Costs, predictions against the sidecar's own, requests against recordings with client-side truth, the largest
concurrency against simulated machines that are stepped in a closed loop, and single requests beside what routers learn
(``ARGS=requests``, likewise the other sections). Exit status 1 if a target is missed. CPU time of this process, the
best of several rounds. Recordings with the client's clock come from ``--captures``, request tables from ``--tables``
and ``--tools`` (tests/bench/outside.py); without them these sections are skipped, loudly.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import tracefit
from collector.config import Config
from online.bank import Bank
from online.blocks import strata_of
from online.features.registry import portable
from online.prediction import cell_name
from online.rows import STEP_FEATURES, Target
from online.snapshot import ConfigSnapshot, Snapshot
from tests.bench import client_minutes, client_tables, simulated
from tests.bench.outside import add_arguments, outside_of
from tests.support.paths import ROOT
from tests.support.roofline_steps import MACHINES, Physics, simulate
from tests.tracefit.closed_engine import run
from tests.tracefit.example_snapshot import encoded

ROWS = 60_000
MANY = 10_000
WITHIN = 0.1
PLANNED = ("7b_h100", "70b_h100_tp4", "34b_h100_tp2", "8b_a100", "8b_h100_async")
MIXES = ((600, 230), (1800, 60), (200, 400), (700, 800))
SECTIONS = ("costs", "recordings", "machines", "tables", "requests")
missed: list[str] = []


def line(what, value, limit=None, unit=""):
    """One number; a miss is remembered."""
    verdict = "" if limit is None else f"   target <= {limit:g}{unit}   {'holds' if value <= limit else 'MISSED'}"
    if limit is not None and value > limit:
        missed.append(what)
    sys.stdout.write(f"{what:<64} {value:9.3f}{unit}{verdict}\n")
    sys.stdout.flush()


# ------------------------------------------------------------------- costs


def _best_s(call, rounds, repeats=1):
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, (time.process_time() - start) / repeats)
    return best


def costs():
    """What a caller pays."""
    config = tracefit.load(encoded()).config()
    draw = random.Random(1)
    prefill = [draw.choice((0, 0, 0, draw.randrange(2000))) for _ in range(MANY)]
    requests = [draw.randrange(1, 256) for _ in range(MANY)]
    context = [draw.randrange(500_000) for _ in range(MANY)]
    one = _best_s(lambda: config.step_time(prefill_tokens=512, requests=20, decode_context_tokens=30_000), 20, 500)
    line("one prediction", 1e6 * one, 20, " µs")
    columns = {"prefill_tokens": prefill, "requests": requests, "decode_context_tokens": context}
    fresh = tracefit.load(encoded()).config()
    line("10,000 in columns, the first time", 1e3 * _best_s(lambda: fresh.step_time(**columns), 1), unit=" ms")
    line("10,000 in columns", 1e3 * _best_s(lambda: config.step_time(**columns), 20), 5, " ms")
    chat = {"prompt_tokens": 2000, "output_tokens": 300}
    line("request", 1e6 * _best_s(lambda: config.request(**chat, concurrency=20), 20, 100), unit=" µs")
    line("plan", 1e3 * _best_s(lambda: config.plan(**chat, itl_ms=30, ttft_ms=1000, rate=3), 10, 5), 20, " ms")
    line("load from bytes", 1e3 * _best_s(lambda: tracefit.load(encoded()), 10, 5), unit=" ms")
    code = "import time; t = time.process_time(); import tracefit; print(time.process_time() - t)"
    imports = [
        float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(5)
    ]
    line("import tracefit", 1e3 * min(imports), 30, " ms")


# ------------------------------------------------------------------- the sidecar's own


def _learned(rows, facts):
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


def _same_as_the_sidecar(rows, own, config):
    names = ("prefill_tokens", "requests", "decode_context_tokens")
    columns = {name: rows.raw[:, STEP_FEATURES.index(name)].tolist() for name in names}
    asked = np.array(config.step_time(**columns).us)
    return float(np.max(np.abs(asked / own - 1.0)))


# ------------------------------------------------------------------- simulated machines


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


def machines():
    """Largest concurrency, from coefficients learned on a noisy stream of other mixes."""
    errors, close, safe_held, total = [], 0, 0, 0
    for name in PLANNED:
        machine, rows = MACHINES[name], simulate(name, ROWS, 77, simulated.segments(0)).rows
        limits = {"max_num_seqs": machine.seats, "max_num_batched_tokens": machine.budget}
        own, config = _learned(rows, {**limits, "block_size": 16, "num_gpu_blocks": machine.blocks})
        line(f"{name}: client against sidecar, relative", _same_as_the_sidecar(rows, own, config), 1e-9)
        for prompt, output in MIXES:
            step = _true_step(machine, prompt)
            alone_us = step(0, 1, prompt + output / 2)
            for times in (1.5, 2.0):
                target_us = times * alone_us
                best, itl = _largest(step, machine, prompt, output, target_us)
                asked = {"prompt_tokens": prompt, "output_tokens": output, "itl_ms": target_us / 1e3}
                plan, safe = config.plan(**asked), config.plan(**asked, safe=True)
                if plan.limit not in ("itl", "token_budget") or best < 4:
                    continue
                errors.append(abs(plan.concurrency - best) / best)
                close += abs(plan.concurrency - best) <= max(1.0, 0.05 * best)  # no whole number is within 5 % of 4
                total += 1
                safe_held += safe.concurrency <= best or itl(safe.concurrency) <= target_us
                sys.stdout.write(
                    f"   {prompt:>5}/{output:<4} ITL {target_us / 1e3:5.1f} ms: true {best:4d}"
                    f"  plan {plan.concurrency:4d}  safe {safe.concurrency:4d}\n"
                )
    line("plan's concurrency, median error", 100 * float(np.median(errors)), 5, " %")
    line("plan's concurrency, mean error", 100 * float(np.mean(errors)), 5, " %")
    line(f"plans of {total} off by more than 5 % and one request", total - close, 0)
    line("plan's concurrency, p90 error", 100 * float(np.quantile(errors, 0.9)), unit=" %")
    line("safe plans that break the target", 100 * (1 - safe_held / total), 10, " %")


# ------------------------------------------------------------------- recordings


def recordings(captures):
    """Mean ITL of every later minute."""
    if captures is None:
        sys.stdout.write("recordings: SKIPPED, needs --captures\n")
        return
    by_recording = {name: client_minutes.judge(captures / name) for name in client_minutes.LIMITS}
    for name, minutes in by_recording.items():
        for each in minutes:
            said = "  ".join(
                f"{weights} {each.error(weights):+.1%}{'' if each.inside(weights) else ' OUTSIDE'}"
                for weights in client_minutes.WEIGHTS
            )
            sys.stdout.write(
                f"   {name:<20} {each.prompt:5.0f}/{each.output:<4.0f} met {each.met:5.2f} hit {each.prefix_hit:.2f}"
                f"  ITL {each.true_us / 1e3:6.1f} ms, {said}\n"
            )
    for weights in client_minutes.WEIGHTS:
        judged = weights != "mixed"
        for name, minutes in by_recording.items():
            limit = 10 if judged and not name.startswith("c2") else None
            error = np.mean([abs(each.error(weights)) for each in minutes])
            line(f"{name}: mean ITL error, mix {weights}", 100 * error, limit, " %")
        inside = [each.inside(weights) for minutes in by_recording.values() for each in minutes]
        outside = 100 * (1 - float(np.mean(inside)))
        line(f"minutes outside of the published band, mix {weights}", outside, 20 if judged else None, " %")


# ------------------------------------------------------------------- request tables


def tables(outside):
    """Mean ITL and E2E of H100 runs at their own mix."""
    if outside.tables is None or outside.tools is None:
        sys.stdout.write("request tables: SKIPPED, needs --tables, --tools\n")
        return
    converter, found = outside.tools / "requests_to_otlp.py", sorted(outside.tables.glob("2*.csv.gz"))
    good = 0
    for table in found:
        itl, e2e = client_tables.judge(table, converter)
        good += max(abs(itl), abs(e2e)) <= WITHIN
        sys.stdout.write(f"   {table.name.removesuffix('.csv.gz')[16:]:<40} ITL {itl:+.1%}  E2E {e2e:+.1%}\n")
    line(f"tables of {len(found)} not within 10 % in both", len(found) - good, 0.2 * len(found))


def single_requests(outside):
    """TTFT and TPOT of single requests beside what routers learn; a tie at 0.1 % points is no loss."""
    if outside.tables is None or outside.tools is None:
        return
    converter, found = outside.tools / "requests_to_otlp.py", sorted(outside.tables.glob("2*.csv.gz"))
    fields = ("ttft_median", "ttft_p90", "tpot_median", "tpot_p90")
    held = {(name, field): 0 for name in client_tables.BASELINES for field in fields}
    held_together, ratios = dict.fromkeys(client_tables.BASELINES, 0), {name: [] for name in client_tables.BASELINES}
    for table in found:
        report, costs_s = client_tables.side_by_side(table, converter)
        scores = {score.model: score for score in report.scores}
        sys.stdout.write(f"   {table.name.removesuffix('.csv.gz')[16:]}\n")
        for name, score in scores.items():
            errors = "  ".join(f"{field} {100 * getattr(score, field):6.2f}" for field in fields)
            cost = f"  {1e6 * costs_s[name]:6.0f} µs" if name in costs_s else ""
            sys.stdout.write(f"      {name:<20} {errors}{cost}\n")
        for name in client_tables.BASELINES:
            each = {f: getattr(scores["request"], f) <= getattr(scores[name], f) + 5e-4 for f in fields}
            for field, good in each.items():
                held[name, field] += good
            held_together[name] += all(each.values())
            ratios[name].append(costs_s["request"] / costs_s[name])
    for (name, field), tables_held in held.items():
        line(f"tables of {len(found)} worse than {name} in {field}", len(found) - tables_held, 0.2 * len(found))
    for name, tables_held in held_together.items():
        line(f"tables of {len(found)} worse than {name} in any", len(found) - tables_held, 0.2 * len(found))
        line(f"cost of a request in parts of {name}'s", float(np.median(ratios[name])), 0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--captures", type=Path, help="recordings with client.jsonl.gz")
    add_arguments(parser)
    arguments = parser.parse_args()
    wanted = arguments.sections or SECTIONS
    if "costs" in wanted:
        costs()
    if "recordings" in wanted:
        recordings(arguments.captures)
    if "machines" in wanted:
        machines()
    if "tables" in wanted:
        tables(outside_of(arguments))
    if "requests" in wanted:
        single_requests(outside_of(arguments))
    sys.stdout.write("\n".join(["", *(f"missed: {each}" for each in missed)]) + "\n")
    sys.exit(bool(missed))
