"""Every number of the learning core beside its target: ``make bench WHAT=learning``; exit status 1 if one is missed.

Recordings are those of ``--captures DIR``, a directory each; without it the bundled ones.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.bench import learning_bars, learning_drift, learning_level
from tests.bench.board import Board

SECTIONS = {
    "error bars and bands": learning_bars.measure,
    "changes of speed": learning_drift.measure,
    "level": learning_level.measure,
}


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=Path)
    parser.add_argument("--only", help="the section whose title begins so", default="")
    arguments = parser.parse_args()
    board = Board()
    with ProcessPoolExecutor() as pool:
        for title, measure in SECTIONS.items():
            if title.startswith(arguments.only):
                print(f"\n{title}")
                measure(board, pool, arguments.captures)
    return board.end()


if __name__ == "__main__":
    sys.exit(main())
