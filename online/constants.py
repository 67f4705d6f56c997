"""Numbers that more than one module of the learner needs: of the normal distribution, of a GPU, and least divisors."""

from __future__ import annotations

# Derived: of a normal distribution, standard deviation per median absolute deviation, 1 / 0.6745.
MAD_TO_SD = 1.4826
# Derived: of a normal distribution, standard deviation per mean absolute deviation, sqrt(pi / 2).
MEAN_ABS_TO_SD = 1.2533
# Derived: the normal deviate of the ninth decile, so of P10 and P90.
TENTH = 1.2816
# Source: Tukey's bisquare cut with 95 % efficiency at the normal; Holland and Welsch (Comm. Stat. 1977).
BISQUARE = 4.685
# Measured: the share of peak that H100 GEMM tables reach (online/features/systems/physics.py).
GEMM_EFFICIENCY = 0.62
# Guard: no division by 0; smaller than any sum that rows leave.
TINY = 1e-300
# Guard: a predicted time is above 0, so that its ratio and logarithm are finite.
TINY_US = 1e-9
