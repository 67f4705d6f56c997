"""Fuzz every parser: damage seeds, expect an answer, never a crash.

    python -m tests.fuzz.fuzz_parsers json --seconds 60 --seed 1
    python -m tests.fuzz.fuzz_parsers all --executions 100000

Parsers: envelope, decode, json, kv, passes, pages, files. A seed is a file of
``tests/fuzz/corpus/<parser>`` or made in parsers.py; what was taken although damaged is damaged further. What crashed
once is put into the corpus by name and is then a test (tests/fuzz/test_fuzz_corpus.py).
The first exception that a parser does not promise, or a second of CPU for one input, ends the run with the input in
hexadecimal. Hypothesis would shrink it, and makes a fiftieth of the inputs in the same time.
"""

import argparse
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import deque
from pathlib import Path

from tests.fuzz.parsers import Decode, Envelope, Files, Json, Kv, Pages, Passes

PARSERS = {parser.__name__.lower(): parser for parser in (Envelope, Decode, Json, Kv, Passes, Pages, Files)}
HANG_S = 1.0
BRED_MAX = 256
"""Damaged inputs that were taken and are kept to be damaged further: of every eight one."""


def fuzz(name, directory, *, seed, seconds=float("inf"), executions):
    """Run one parser until a budget is used up: how many inputs there were, how many were taken, the slowest's ms."""
    rng, parser = random.Random(seed), PARSERS[name](directory)
    seeds, bred, tried, taken, slowest_s = parser.corpus(), deque(maxlen=BRED_MAX), 0, 0, 0.0
    bytes_max = 2 * max(map(len, seeds)) + 64
    now_s, deadline_s = time.process_time(), time.monotonic() + seconds
    while tried < executions and (tried % 64 or time.monotonic() < deadline_s):
        data = parser.edited(rng, rng.choice(bred if bred and rng.random() < 0.4 else seeds))
        try:
            is_taken = parser.parse(data)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            raise SystemExit(f"{name}: crash after {tried} on {data.hex()}") from None
        before_s, now_s = now_s, time.process_time()
        if now_s - before_s > HANG_S:
            raise SystemExit(f"{name}: {now_s - before_s:.1f} s for {data.hex()}")
        tried, taken, slowest_s = tried + 1, taken + is_taken, max(slowest_s, now_s - before_s)
        if is_taken and len(data) <= bytes_max and rng.random() < 1 / 8:
            bred.append(data)
    return tried, taken, slowest_s * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parser", choices=[*PARSERS, "all"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--executions", type=int, default=(1 << 31) - 1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name in PARSERS if args.parser == "all" else (args.parser,):
        with tempfile.TemporaryDirectory() as directory:
            tried, taken, slowest_ms = fuzz(
                name, Path(directory), seed=args.seed, seconds=args.seconds, executions=args.executions
            )
        sys.stdout.write(
            f"{name:9} seed {args.seed}: {tried} inputs, {taken} taken, 0 crashes; slowest {slowest_ms:.1f} ms\n"
        )


if __name__ == "__main__":
    main()
