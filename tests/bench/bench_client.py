"""Every number of the client beside its target: ``make bench WHAT=client``.

Costs, requests against recordings with client-side truth, the largest concurrency against simulated GPU servers
(tests/bench/client_machines.py), and single requests beside what routers learn; ``ARGS=requests`` is one section. Exit
status 1 if a target is missed. CPU time of this process, the best of several rounds. Recordings with the client's clock
come from ``--captures``, request tables from ``--tables`` and ``--tools`` (tests/bench/outside.py); without them these
sections are skipped, loudly.
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
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

import tracefit
from tests.bench import client_machines, client_minutes, client_tables
from tests.bench.outside import add_arguments, outside_of
from tests.support.paths import ROOT
from tests.tracefit.example_snapshot import encoded

MANY = 10_000
WITHIN = 0.1
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
    command = [sys.executable, "-c", code]
    imports = [subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout for _ in range(5)]
    line("import tracefit", 1e3 * min(map(float, imports)), 30, " ms")


# ------------------------------------------------------------------- GPU servers


def machines():
    """What a plan says that fits, served on the servers of docs/accuracy.md."""
    plans = []
    for plan in client_machines.plans():
        plans.append(plan)
        sys.stdout.write(
            f"   {plan.server:<18} {plan.prompt:>5}/{plan.output:<4} ITL {plan.target_ms:5.1f} ms:"
            f" plan {plan.planned:4d} {plan.itl - 1:+6.1%}  safe {plan.safe:4d} {plan.safe_itl - 1:+6.1%}"
            f"{'' if plan.usable else '  not usable'}\n"
        )
    for kind, limit in (("usable", 5), ("not usable", None)):
        of_kind = [plan for plan in plans if plan.usable == (kind == "usable")]
        errors = [abs(100 * (plan.itl - 1)) for plan in of_kind]
        line(f"ITL of {len(of_kind)} {kind} plans off its target, mean", float(np.mean(errors)), limit, " %")
        line(f"ITL of {kind} plans off its target, worst", max(errors), unit=" %")
        broken = [plan.safe_itl > 1 for plan in of_kind]
        line(f"safe {kind} plans that break the target", 100 * float(np.mean(broken)), limit and 10, " %")


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
    held = Counter()
    ratios = defaultdict(list)
    for table in found:
        report, costs_s = client_tables.side_by_side(table, converter)
        scores = {score["model"]: score for score in report.scores}
        sys.stdout.write(f"   {table.name.removesuffix('.csv.gz')[16:]}\n")
        for name, score in scores.items():
            errors = "  ".join(f"{field} {100 * score[field]:6.2f}" for field in fields)
            cost = f"  {1e6 * costs_s[name]:6.0f} µs" if name in costs_s else ""
            sys.stdout.write(f"      {name:<20} {errors}{cost}\n")
        for name in client_tables.BASELINES:
            worse = [f for f in fields if scores["request"][f] > scores[name][f] + 5e-4]
            held.update((name, what) for what in (*worse, *(["any"] if worse else ())))
            ratios[name].append(costs_s["request"] / costs_s[name])
    for name in client_tables.BASELINES:
        for field in (*fields, "any"):
            line(f"tables of {len(found)}, request worse than {name} in {field}", held[name, field], 0.2 * len(found))
    for name, parts in ratios.items():
        line(f"cost of a request in parts of {name}'s", float(np.median(parts)), 0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--captures", type=Path, help="recordings with client.jsonl.gz")
    add_arguments(parser)
    arguments = parser.parse_args()
    sections = {
        "costs": costs,
        "recordings": lambda: recordings(arguments.captures),
        "machines": machines,
        "tables": lambda: tables(outside_of(arguments)),
        "requests": lambda: single_requests(outside_of(arguments)),
    }
    for section in arguments.sections or SECTIONS:
        sections[section]()
    sys.stdout.write("\n".join(["", *(f"missed: {each}" for each in missed)]) + "\n")
    sys.exit(bool(missed))
