"""Every number of the learning core beside its target: ``make bench WHAT=learning``.

bars   whether one can rely on what is printed: error bars and bands (tests/bench/learning_bars.py)
speed  how soon changes of speed are reported, and how often falsely (tests/bench/learning_drift.py)
level  what the level and River's residual model bring (tests/bench/learning_level.py)
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sys

from tests.bench import learning_bars, learning_drift, learning_level
from tests.bench.board import run

SECTIONS = {"bars": learning_bars.measure, "speed": learning_drift.measure, "level": learning_level.measure}

if __name__ == "__main__":
    sys.exit(run(__doc__, SECTIONS))
