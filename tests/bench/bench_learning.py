"""Every number of the learning core beside its target: ``make bench WHAT=learning``.

Exit status 1 if a target is missed. What needs ``--tools`` (tests/bench/outside.py) is printed as skipped without it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collector.config.schema import Config
from online.bank import Bank
from online.rows import Target
from tests.bench import captured, learning_bars, learning_drift, learning_level
from tests.bench.outside import add_arguments, outside_of
from tests.support.linear_steps import BETA, steps

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


# ------------------------------------------------------------------- simulated machines


# ------------------------------------------------------------------- linear machines


def _intervals_of(seed):
    bank = Bank(RLS)
    bank.learn("c", Target.STEP_TIME, steps(4096, 50_000 + seed, noise=0.02, autocorrelation=0.97).rows)
    features = bank.targets("c")["step_time"].models["portable"].features
    return [abs(f.coefficient - b) < 1.96 * f.stderr for f, b in zip(features, BETA, strict=True)]


def coefficient_lines(pool):
    """Confidence intervals under noise with a memory of 33 steps; the compile step."""
    hits = np.array(list(pool.map(_intervals_of, range(150))))
    covered = 100 * float(hits.mean())
    what = "95 % intervals of coefficients under AR(1) 0.97 cover"
    yield Line(what, f"{covered:.1f} %", "90..97 %", 90 <= covered <= 97)
    found = []
    for warm_up in (False, True):
        bank = Bank(RLS)
        bank.learn("c", Target.STEP_TIME, steps(2000, 8, warm_up=warm_up).rows)
        found.append([f.coefficient for f in bank.targets("c")["step_time"].models["portable"].features])
    moved = 100 * float(np.abs(np.array(found[1]) / np.array(found[0]) - 1).max())
    yield at_most("a 12 s compile step moves a coefficient by", moved, 1.0, " %", 3)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--captures", type=Path, help="recordings, a directory each")
    parser.add_argument("--only", help="the section whose title begins so")
    arguments = parser.parse_args()
    outside = outside_of(arguments)
    missed = skipped = 0
    with ProcessPoolExecutor() as pool:
        sections = (
            ("coefficients", coefficient_lines(pool)),
            ("error bars and bands", learning_bars.lines(Line, pool, arguments.captures)),
            ("changes of speed", learning_drift.lines(Line, pool, arguments.captures)),
            ("recordings", captured.lines(Line, pool, outside)),
            ("level", learning_level.lines(Line, pool, arguments.captures)),
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
