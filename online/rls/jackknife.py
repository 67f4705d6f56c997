"""Error bars of coefficients learned from sums over windows: what they owe to the rows they happened to rest on.

    rows in G = 16 groups of neighbours, theta_g = fit without group g, theta_bar = their mean

    jack_j^2 = (G - 1) / G sum_g (theta_gj - theta_bar_j)^2           delete-a-group jackknife, (p,)
    se_j^2   = jack_j^2 + (floor_j beta_j)^2                          floor: 2 % of the intercept, 10 % of the others
    t_j      = beta_j / se_j

Sums over a window carry an error that more rows do not average out: where in it the prompts came. Sandwich estimators
of any kind miss it (their 90 % intervals hold half of the prefill coefficients); the floor was measured, on recordings
with complete telemetry beside the pages. Status, by the t that a reader can work out from what is published:

    t >= 8       identified      act on it
    4 <= t < 8   weak            off by 6-25 % in the median where this was measured, one in ten by 40-70 %
    below        unidentified    only predictions are of use: columns trade with each other

A floor of 10 % leaves t <= 10, so identified means that the rows add no more than 7.5 % to it. With the jackknife's own
t a prefill coefficient was identified whose error bar was 16 %, and which was off by 19.

and unidentified whatever its t where a column is a mixture of the others (vif > 1,000): every group then splits the sum
between them the same way, by the solver's ridge.

Below 12 rows nothing is identified. The groups are of the last 512 rows at most, so se is never too small for what
has been forgotten. Reference: Kunsch, The jackknife and the bootstrap for general stationary observations (Annals of
Statistics 1989).
"""

from __future__ import annotations

import msgspec
import numpy as np

from online.blocks import Design, median_of
from online.rows import Floats
from online.snapshot import FeatureSnapshot, ModelSnapshot

from .rls_learner import RlsLearner
from .robust import FLOOR, relative, shares
from .solve import solve

GROUPS = 16
ROWS_MAX = 512
ROWS_MIN = 12
INTERCEPT_FLOOR, OTHERS_FLOOR = 0.02, 0.10
IDENTIFIED_T, WEAK_T = 8.0, 4.0
VIF_MAX = 1e3
UNIDENTIFIED = "unidentified"


def jackknife(learner: RlsLearner, rows: Design) -> Floats:
    """Standard errors without the floor, (p,); infinite where the rows are too few."""
    p, n, slow = len(learner.features), len(rows), learner.members.slow
    if n < ROWS_MIN:
        return np.full(p, np.inf)
    x, y, steps = rows.x, rows.elapsed_us, rows.steps
    floor = FLOOR * median_of(y / steps) * steps
    u, per_unit = relative(y, np.sqrt(steps * rows.weight), x @ slow.beta[:p], floor)
    xw = x * (shares(u, learner.members.weighing.scale) * per_unit * per_unit)[:, None]
    groups = min(GROUPS, n // 2)
    starts = np.arange(groups) * n // groups
    a = np.add.reduceat(xw[:, :, None] * x[:, None, :], starts, axis=0)
    b = np.add.reduceat(xw * y[:, None], starts, axis=0)
    a_all, b_all = a.sum(axis=0), b.sum(axis=0)
    free, warm = slow.free[:p], slow.passive[:p]
    without = np.array([solve(a_all - a[g], b_all - b[g], free, warm).beta for g in range(groups)])
    spread = np.sqrt((groups - 1) / groups * ((without - without.mean(axis=0)) ** 2).sum(axis=0))
    return np.asarray(spread, np.float64)


def with_jackknife(snapshot: ModelSnapshot, learner: RlsLearner, rows: Design) -> ModelSnapshot:
    """The model with error bars and status for what was learned from windows."""
    if not snapshot.features:
        return snapshot
    spread = dict(zip(learner.features.names, jackknife(learner, rows), strict=True))
    features = [_judged(feature, float(spread[feature.name])) for feature in snapshot.features]
    return msgspec.structs.replace(snapshot, features=features)


def _judged(feature: FeatureSnapshot, spread: float) -> FeatureSnapshot:
    size = abs(feature.coefficient)
    floor = (INTERCEPT_FLOOR if feature.name == "intercept" else OTHERS_FLOOR) * size
    stderr = float(np.hypot(spread, floor)) if np.isfinite(spread) else None
    mixture = feature.vif is not None and feature.vif > VIF_MAX
    if mixture or size == 0.0 or stderr is None:
        status = UNIDENTIFIED
    elif size >= IDENTIFIED_T * stderr:
        status = "identified"
    elif size >= WEAK_T * stderr:
        status = "weak"
    else:
        status = UNIDENTIFIED
    return msgspec.structs.replace(feature, stderr=stderr, status=status)
