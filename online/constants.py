"""Numbers that more than one module of the learner needs."""

from __future__ import annotations

import math
from statistics import NormalDist

_NORMAL = NormalDist()
MAD_TO_SD = 1.0 / _NORMAL.inv_cdf(0.75)
"""Of a normal distribution, standard deviation per median absolute deviation."""
MEAN_ABS_TO_SD = math.sqrt(math.pi / 2.0)
"""Of a normal distribution, standard deviation per mean absolute deviation."""
TENTH = _NORMAL.inv_cdf(0.9)
"""The normal deviate of P90."""
# Measured: the share of peak that H100 GEMM tables reach (online/features/systems.py).
GEMM_EFFICIENCY = 0.62
# Guess: rows that share their noise; they are solved, compared and scored together.
NOISE_ROWS = 32
# Guess: of so many rows a median says something, and a mean is a reference to compare others with.
FEW_ROWS = 16
# Guess: rows (or blocks) of the recent past that a running mean or error remembers; half or twice as many move nothing.
MEMORY_ROWS = 256
# Guess: rows of the first fit, before which nothing is called sure.
START_ROWS = 256
# Guess: of windows, each a sum over many steps, so many are enough if they tell of five minutes.
START_WINDOWS, START_NS = 64, 300_000_000_000
# Guess: steps after which a row counts half.
HALF_LIFE_STEPS = 4000
# Guess: rows after which the error of a prediction counts half; what a row adds at most where errors are compared.
# Without a bound a few stalls decide: the hold-out of the recording c7 is 12.5 % then, with it 12.0.
ERROR_ROWS, ERROR_MAX = 1000.0, 0.5
# Guard: a value beyond is no measurement; squares, sums of these and their inverses stay finite.
VALUE_MAX = 1e12
# Guess: share of the evidence that a confirmed change of speed leaves.
ALARM_KEEP = 0.02
# Guess: without a row for ten minutes an engine is silent.
IDLE_GAP_NS = 600_000_000_000
# Guard: memory; of one configuration.
ENGINES_MAX = 4096
# Guess: a difference of 5 % is worth telling.
WORTH = 0.05
PREFERENCE = 1.0 - WORTH
"""A preferred choice changes only for one that is so much better, so that readers do not see it flip."""
# Derived: the larger of two times that one coefficient is within a tenth of both is 1.25 of the other.
APART = math.log(1.25)
# Guess: three standard deviations are sure.
SURE_SD = 3.0
# Guess: how far a donor's coefficient may be off; 20 rows then do what 500 do from cold.
DONOR_SHARE = 0.15
# Measured: a linear form is off by 1 to 3 % at an operating point (online/transfer/sheet.py).
LACK_OF_FIT = 0.02
# Guard: no machine is quieter than 0.5 %, and weights stay finite.
QUIETEST = 0.005
# Guard: no division by 0; smaller than any sum that rows leave.
TINY = 1e-300
# Guard: a predicted time is above 0, so that its ratio and logarithm are finite.
TINY_US = 1e-9
