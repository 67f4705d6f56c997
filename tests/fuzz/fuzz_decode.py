"""Fuzz the columnar decoder against the plain one.

    python -m tests.fuzz.fuzz_decode --guided --seconds 60       coverage-guided, needs atheris
    python -m tests.fuzz.fuzz_decode --executions 10000000       mutations only, needs nothing

One execution is one damaged event or one damaged export compared. The first difference or exception ends the run with
the input in hexadecimal.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from importlib.util import find_spec

from tests import otlp_bytes as otlp
from tests.fuzz.mutations import damage, step_event

BATCH = 400
EXPORTS_PER_BATCH = 8


def mutate(seed, executions, seconds):
    """Damage good events and exports until a budget is used up; the number of executions and of events taken."""
    from tests.fuzz.targets import check_events, check_export

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


def guide(seconds, executions, seed):
    """Let atheris look for bytes that reach new code; the bytes are an export, or events with their lengths."""
    import atheris

    with atheris.instrument_imports(include=["collector.decode"]):
        from tests.fuzz.targets import check_events, check_export

    def one(data):
        if data[:1] == _EXPORT:
            check_export(data[1:])
        else:
            check_events(_unpack(data))

    def mutator(data, size_max, seed):
        rng = random.Random(seed)
        if len(data) < 2 or rng.random() < 0.02:
            events = [step_event(rng) for _ in range(3)]
            data = _EXPORT + otlp.steps_export(events) if rng.random() < 0.5 else _pack(events)
        data = bytes(data)
        return (data[:1] + damage(rng, data[1:]) if rng.random() < 0.7 else atheris.Mutate(data, size_max))[:size_max]

    budget = [f"-max_total_time={int(seconds)}"] if seconds < float("inf") else []
    options = [*budget, f"-runs={executions}", f"-seed={seed}", "-max_len=4096", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutator)
    atheris.Fuzz()


_EXPORT, _EVENTS = b"x", b"e"


def _pack(events):
    return _EVENTS + b"".join(len(event).to_bytes(2, "little") + event for event in events)


def _unpack(data):
    events, at = [], 1
    while at + 2 <= len(data) and len(events) < BATCH:
        size = int.from_bytes(data[at : at + 2], "little") % 2048
        events.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return events


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--executions", type=int, default=(1 << 31) - 1)
    args = parser.parse_args()
    if args.guided and find_spec("atheris"):
        guide(args.seconds, args.executions, args.seed)
        return
    if args.guided:
        sys.stdout.write("atheris is not installed: mutations only\n")
    start_s = time.process_time()
    done, taken = mutate(args.seed, args.executions, args.seconds)
    cpu_s = time.process_time() - start_s
    sys.stdout.write(f"{done} executions, seed {args.seed}, {taken} read as columns, all alike, {cpu_s:.0f} s CPU\n")


if __name__ == "__main__":
    main()
