"""Every number of the fleet, beside its target: ``make bench WHAT=fleet``.

    ARGS=overlap     three replicas side by side against one learner that was fed everything
    ARGS=outliers    one slow replica among forty; a hundred fleets of equals

States and streams are simulated (tests/support/fleets.py).
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from online import Bank, RowBlock, Target, merge_states
from online.rls import Replica, compared
from tests.support.fleets import CONFIG, state_of
from tests.support.linear_steps import BETA, NAMES, steps

REPLICAS, SLOWER, ROWS, NOISE = 40, 1.08, 2000, 0.03
failures: list[str] = []


def line(name, value, target="", good=None):
    verdict = "" if good is None else ("holds" if good else "MISSED")
    if good is False:
        failures.append(name)
    print(f"{name:<62} {value:>20}   {target:<10} {verdict}", flush=True)


def coefficients(bank):
    (config_id,) = bank.configs()
    return np.array([f.coefficient for f in bank.targets(config_id)["step_time"].models["portable"].features])


def bench_overlap(given):
    streams = [steps(given.rows, seed, noise=NOISE).rows for seed in (1, 2, 3)]
    one = Bank(CONFIG)
    joined = RowBlock.concatenate(streams)
    one.learn("0f3c52aa9b1e", Target.STEP_TIME, joined.take(np.argsort(joined.end_ns, kind="stable")))
    merged = Bank(CONFIG)
    begin = 1_700_000_000_000_000_000
    parts = [state_of(f"engine-{s}", s, rows=given.rows, begin_ns=begin, noise=NOISE) for s in (1, 2, 3)]
    merged.restore(merge_states(parts, CONFIG))
    apart = float(np.abs(coefficients(merged) / coefficients(one) - 1.0).max())
    name = f"three replicas side by side, {given.rows:,} rows each: worst coefficient"
    line(name, f"{100 * apart:.2f} %", "2 %", apart <= 0.02)


def replica(seed, gain=1.0, **kind):
    bank = Bank(CONFIG)
    rows = steps(ROWS, seed, noise=NOISE, beta=gain * BETA, **kind).rows
    bank.learn("c", Target.STEP_TIME, rows)
    state = bank._configs["c"][Target.STEP_TIME]
    state.flush()
    [replica] = Replica.of(state.models["portable"], f"engine-{seed}")
    return replica


def bench_outliers(given):
    for name, kind in (("white noise", {}), ("noise that lasts (AR 0.9)", {"autocorrelation": 0.9})):
        accused = named = wrongly = 0
        fleets = given.fleets if not kind else given.fleets // 5
        for fleet in range(fleets):
            equals = [replica(1_000_000 + 100 * fleet + n, **kind) for n in range(REPLICAS)]
            found, _ = compared(equals, 1, NAMES)
            accused += any(each.differs for each in found)
            if fleet < fleets // 5:
                slow = replica(2_000_000 + fleet, SLOWER, **kind)
                found, _ = compared([*equals[1:], slow], 1, NAMES)
                named += next(each.differs for each in found if each.engine == slow.engine)
                wrongly += any(each.differs for each in found if each.engine != slow.engine)
        tries = fleets // 5
        line(
            f"{name}: one of {REPLICAS} 8 % slower, named at {ROWS} rows", f"{named} of {tries}", "all", named == tries
        )
        line("  another one named beside it", f"{wrongly} of {tries}", "0", wrongly == 0)
        line(f"  fleets of {REPLICAS} equals in which one is named", f"{accused} of {fleets}", "0", accused == 0)


SECTIONS = {"overlap": bench_overlap, "outliers": bench_outliers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all of them without")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--fleets", type=int, default=100)
    given = parser.parse_args()
    for section in given.sections or SECTIONS:
        SECTIONS[section](given)
    print(f"missed: {', '.join(failures)}" if failures else "every number holds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
