"""What ``tracefit demo`` says, and what it takes: ``make bench WHAT=demo ARGS=--record`` for README.md."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile

from tests.bench.figures import record


def main() -> int:
    """Run it to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write it to docs/figures.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "collector", "demo", "--dir", directory]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        said = [line.replace(directory, "snapshots/demo") for line in done.stdout.splitlines()]
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = spent.ru_utime + spent.ru_stime
    print("\n".join([*said, f"{cpu_s:.1f} s of CPU"]))
    if args.record:
        record("demo", {"said": said, "cpu_s": cpu_s})
    return 0


if __name__ == "__main__":
    sys.exit(main())
