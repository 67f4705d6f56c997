"""What ``tracefit demo`` says, and what it takes: ``make bench WHAT=demo ARGS=--record`` for README.md.

It ends with 1 if in fewer than 90 % of its lines, after the first 256 rows, all error bars hold the value of its end.
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
BAR = re.compile(r"([\d.e+-]+) ± ([\d.e+-]+)")
FIRST_ROWS, HELD_MIN = 256, 0.9


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
    held, lines = held_of(said)
    told = f"of {lines} lines {held} hold the value of the end ({HELD_MIN:.0%} wanted)"
    sys.stdout.write("\n".join([*said, f"{cpu_s:.1f} s of CPU", told, ""]))
    if args.record:
        record("demo", {"said": said, "cpu_s": cpu_s})
    return int(held < HELD_MIN * lines)


def held_of(said: list[str]) -> tuple[int, int]:
    """Lines of which every bar holds the coefficient that is reported first at the end, and lines."""
    printed = [found for line in said if (found := LINE.fullmatch(line)) and int(found[1]) > FIRST_ROWS]
    bars = [[(float(value), float(bar)) for value, bar in BAR.findall(found[2])] for found in printed]
    report = next(number for number, line in enumerate(said) if line.startswith("  step_time"))
    end = [float(line.split()[1]) for line in said[report + 1 : report + 1 + len(bars[0])]]
    return sum(all(abs(v - e) <= bar for (v, bar), e in zip(line, end, strict=True)) for line in bars), len(bars)


if __name__ == "__main__":
    sys.exit(main())
