"""What ``tracefit demo`` says, and what it takes: ``make bench WHAT=demo``; README.md has what is recorded."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile

from tests.bench.board import Board, run


def demo(board: Board) -> None:
    """Run it to its end."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "collector", "demo", "--dir", directory]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        said = [line.replace(directory, "snapshots/demo") for line in done.stdout.splitlines()]
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("\n".join(said))
    board.keep("cpu_s", spent.ru_utime + spent.ru_stime)
    board.figures["said"] = said


if __name__ == "__main__":
    sys.exit(run(__doc__, {"demo": demo}, recorded_as=""))
