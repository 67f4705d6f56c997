"""What ``tracefit demo`` says, and what it takes: ``make bench WHAT=demo ARGS=--record`` for README.md.

Of its bars, after the first 256 rows, it counts those that hold the value of the end. The recording is a programme of
ten loads, and a bar is for the load so far: how often bars hold is wanted of steady loads, in learning_bars.py.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile

from tests.bench.figures import record

LINE = re.compile(r" +\d+ s +(\d+) +(.*) +[\d.]+%")
BAR = re.compile(r"([\d.,-]+) ± ([\d.,]+)")
FIRST_ROWS = 256


def main() -> int:
    """Run it to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write it to docs/figures.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "collector", "demo", "--directory", directory]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        said = [line.replace(directory, "snapshots/demo") for line in done.stdout.splitlines()]
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = spent.ru_utime + spent.ru_stime
    held, bars = held_of(said)
    told = f"of {bars} bars {held} hold the value of the end"
    sys.stdout.write("\n".join([*said, f"{cpu_s:.1f} s of CPU", told, ""]))
    if args.record:
        record("demo", {"said": said, "cpu_s": cpu_s})
    return 0


def number(text: str) -> float:
    """Of ``15,210``."""
    return float(text.replace(",", ""))


def held_of(said: list[str]) -> tuple[int, int]:
    """Bars that hold the coefficient that is reported at the end, and bars."""
    printed = [found for line in said if (found := LINE.fullmatch(line)) and int(found[1]) > FIRST_ROWS]
    bars = [[(number(value), number(bar)) for value, bar in BAR.findall(found[2])] for found in printed]
    report = next(number for number, line in enumerate(said) if line.startswith("  step_time"))
    end = [number(line.split()[1]) for line in said[report + 1 : report + 1 + len(bars[0])]]
    held = [abs(v - e) <= bar for line in bars for (v, bar), e in zip(line, end, strict=True)]
    return sum(held), len(held)


if __name__ == "__main__":
    sys.exit(main())
