"""Fuzz every parser: damage seeds, expect an answer, never a crash.

    python -m tests.fuzz.fuzz_parsers json --seconds 60 --seed 1
    python -m tests.fuzz.fuzz_parsers all --executions 100000

Parsers: envelope, decode, json, kv, passes, pages, files, state, log, config. A seed is a file of
``tests/fuzz/corpus/<parser>`` or made in parsers.py; what was taken although damaged is damaged further. An input that
was tried before is not tried again and not counted. What crashed once is put into the corpus by name and is then a
test (tests/fuzz/test_fuzz_corpus.py).
The first exception that a parser does not promise, or a second of CPU for one input, ends the run with the input in
hexadecimal.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.parsers import Decode, Envelope, Files, Json, Kv, Pages, Passes
from tests.fuzz.parsers_kept import Config, LogFile, State

PARSERS = {
    "envelope": Envelope,
    "decode": Decode,
    "json": Json,
    "kv": Kv,
    "passes": Passes,
    "pages": Pages,
    "files": Files,
    "state": State,
    "log": LogFile,
    "config": Config,
}
HANG_S = 1.0
BRED_MAX = 256
"""Damaged inputs that were taken and are kept to be damaged further."""
_SEEN_BITS = 30


@dataclass
class Tried:
    """What came of a run; ``slowest_ms`` is CPU and includes making the input."""

    executions: int = 0
    taken: int = 0
    repeated: int = 0
    slowest_ms: float = 0.0
    cpu_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.executions} inputs, {self.taken} taken, {self.executions - self.taken} refused, 0 crashes; "
            f"{self.repeated} repeats left out; slowest {self.slowest_ms:.1f} ms, {self.cpu_s:.0f} s CPU"
        )


class Seen:
    """Inputs tried before, as one bit of 2^30 by CRC: a new one is rarely taken for an old one, never the reverse."""

    def __init__(self) -> None:
        self._bits = bytearray(1 << _SEEN_BITS - 3)

    def add(self, data):
        """Whether it is new."""
        place = zlib.crc32(data) >> 32 - _SEEN_BITS
        bit = 1 << (place & 7)
        old = self._bits[place >> 3]
        self._bits[place >> 3] = old | bit
        return not old & bit


class Stock:
    """What is damaged next: a seed, or something that was taken although damaged."""

    def __init__(self, seeds, bytes_max=None) -> None:
        self._seeds = seeds
        self._bred = []
        self._bytes_max = bytes_max or 2 * max(map(len, seeds)) + 64

    def pick(self, rng):
        return rng.choice(self._bred if self._bred and rng.random() < 0.4 else self._seeds)

    def breed(self, rng, data):
        """Keep one in eight, in the place of an earlier one when there are many."""
        if len(data) > self._bytes_max or rng.random() > 1 / 8:
            return
        if len(self._bred) < BRED_MAX:
            self._bred.append(data)
        else:
            self._bred[rng.randrange(BRED_MAX)] = data


def fuzz(name, directory, *, seed, seconds=float("inf"), executions):
    """Run one parser until a budget is used up; ``executions`` counts inputs that differ."""
    rng = random.Random(seed)
    parser = PARSERS[name](directory)
    stock, seen, tried = Stock(parser.corpus(), parser.bred_bytes_max), Seen(), Tried()
    begin_s = now_s = time.process_time()
    deadline_s = time.monotonic() + seconds
    while tried.executions < executions and (tried.executions % 64 or time.monotonic() < deadline_s):
        data = parser.edited(rng, stock.pick(rng))
        if not seen.add(data):
            tried.repeated += 1
            continue
        try:
            taken = parser.parse(data)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            raise SystemExit(f"{name}: crash after {tried.executions} on {data.hex()}") from None
        before_s, now_s = now_s, time.process_time()
        if now_s - before_s > HANG_S:
            raise SystemExit(f"{name}: {now_s - before_s:.1f} s for {data.hex()}")
        tried.slowest_ms = max(tried.slowest_ms, (now_s - before_s) * 1e3)
        tried.executions += 1
        if taken:
            tried.taken += 1
            stock.breed(rng, data)
    tried.cpu_s = now_s - begin_s
    return tried


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parser", choices=[*PARSERS, "all"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--executions", type=int, default=(1 << 31) - 1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a state of another layout is worth a line; millions of them are not
    for name in PARSERS if args.parser == "all" else (args.parser,):
        with tempfile.TemporaryDirectory() as directory:
            tried = fuzz(name, Path(directory), seed=args.seed, seconds=args.seconds, executions=args.executions)
        sys.stdout.write(f"{name:9} seed {args.seed}: {tried}\n")


if __name__ == "__main__":
    main()
