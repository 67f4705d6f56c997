"""Numbers that more than one module of the learner needs."""

from __future__ import annotations

# Derived: of a normal distribution, standard deviation per median absolute deviation, 1 / 0.6745.
MAD_TO_SD = 1.4826
# Derived: of a normal distribution, standard deviation per mean absolute deviation, sqrt(pi / 2).
MEAN_ABS_TO_SD = 1.2533
# Derived: the normal deviate of the ninth decile, so of P10 and P90.
TENTH = 1.2816
# Source: Tukey's bisquare cut with 95 % efficiency at the normal; Holland and Welsch (Comm. Stat. 1977).
BISQUARE = 4.685
# Measured: the share of peak that H100 GEMM tables reach (online/features/systems/base.py).
GEMM_EFFICIENCY = 0.62
# Guess: rows that share their noise; they are solved, compared and scored together.
NOISE_ROWS = 32
# Guess: rows of the first fit, before which nothing is called sure.
START_ROWS = 256
# Guess: steps after which a row counts half.
HALF_LIFE_STEPS = 4000
# Guess: share of the evidence that a confirmed change of speed leaves.
ALARM_KEEP = 0.02
# Guess: without a row for ten minutes an engine is silent.
SILENCE_NS = 600_000_000_000
# Guard: memory; of one configuration.
ENGINES_MAX = 4096
# Guess: what is preferred gives way only to what is 5 % better, so that a reader is not told something else each time.
PREFERENCE = 0.95
# Guess: how far a donor's coefficient may be off; 20 rows then do what 500 do from cold.
DONOR_SHARE = 0.15
# Guard: no machine is quieter than 0.5 %, and weights stay finite.
QUIETEST = 0.005
# Guard: no division by 0; smaller than any sum that rows leave.
TINY = 1e-300
# Guard: a predicted time is above 0, so that its ratio and logarithm are finite.
TINY_US = 1e-9
