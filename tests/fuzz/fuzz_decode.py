"""Fuzz the columnar decoder against the plain one.

    python -m tests.fuzz.fuzz_decode --executions 10000000

One execution is one damaged event or one damaged export compared. The first difference or exception ends the run with
the input in hexadecimal.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.fuzz.mutations import damage, step_event
from tests.fuzz.targets import check_events, check_export
from tests.support import otlp_bytes as otlp

BATCH = 400
EXPORTS_PER_BATCH = 8


def mutate(seed, executions, seconds):
    """Damage good events and exports until a budget is used up; the number of executions and of events taken."""
    rng = random.Random(seed)
    done = taken = 0
    deadline_s = time.monotonic() + seconds
    while done < executions and time.monotonic() < deadline_s:
        events = [step_event(rng) for _ in range(BATCH // 4)]
        damaged = [damage(rng, rng.choice(events)) for _ in range(BATCH - len(events))]
        batch = events + damaged
        rng.shuffle(batch)
        taken += check_events(batch)
        for _ in range(EXPORTS_PER_BATCH):
            some = [*rng.sample(batch, rng.randrange(4)), otlp.snapshot(3), *rng.sample(events, 2)]
            whole = otlp.steps_export(some)
            check_export(damage(rng, whole) if rng.random() < 0.7 else whole)
        done += BATCH + EXPORTS_PER_BATCH
    return done, taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--executions", type=int, default=(1 << 31) - 1)
    args = parser.parse_args()
    start_s = time.process_time()
    done, taken = mutate(args.seed, args.executions, args.seconds)
    cpu_s = time.process_time() - start_s
    sys.stdout.write(f"{done} executions, seed {args.seed}, {taken} read as columns, all alike, {cpu_s:.0f} s CPU\n")


if __name__ == "__main__":
    main()
