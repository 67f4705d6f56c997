"""Do the replicas that were merged agree: each against its siblings, and all of them in how many clusters.

    ratio_i = beta' b_i / beta' A_i beta         beta solves what its siblings know together; 1 = as fast as they
    se^2    = beta' N_i beta / (beta' A_i beta)^2 + ratio_i^2 u' V u       u = A_i beta / beta' A_i beta, V = C N C
    D_i^2   = d' A_i d / y'Wy_i                  d = beta_i - beta: mean squared relative difference on i's own work
    E_i     = tr A_i (V_i + V) / y'Wy_i          what D_i^2 is expected to be among equals
    F_i     = D_i^2 / E_i                        about F of p and f_i degrees: the windows behind N, less p (hac.py)

A replica differs where D_i is beyond 5 % and Holm's procedure rejects that it is an equal, at 1 % for all replicas of a
target together; the tail of F is Paulson's, f_i that of i or of its siblings, whichever is less. ``low`` and ``high``
hold all ratios of the target at once, 95 times out of 100 (Bonferroni, Student's quantile at f_i).

Siblings are all others that do not differ themselves: the furthest are set apart and the rest is looked at again, as
long as two are left, lest one that is slow makes the others fast. Of a cluster they are the others of it: where the
ratios to the common fit fall into two groups, of three and of a tenth of all at least, whose means are 5 % and five
times the spread within them apart, the common fit is a mean of two machines, to which nobody is close. Groups are split
again, to four clusters at most.

Guards: a replica on whose work its siblings predict nothing has no ratio; ratios that are not finite neither.
References: Holm (Scand. J. Statist. 1979); Paulson (Ann. Math. Statist. 1942).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from online.rows import Floats
from online.snapshot import ReplicaClusterSnapshot, ReplicaSnapshot

from .error_bars import FREE_MIN, WINDOW_ROWS
from .replicas import Replica

FAMILY_WISE_LEVEL = 0.01
INTERVAL_LEVEL = 0.05
_DIFFERENCE = 0.05
_MEMORY_ROWS = 8192
"""What is remembered at least of a steady stream; more degrees of freedom are not counted."""
_ALIKE, _MAJORITY_MIN = 0.9, 2
_CLUSTERS_MAX, _CLUSTER_MIN, _CLUSTER_SHARE, _SEPARATION = 4, 3, 0.1, 5.0
_NORMAL = NormalDist()


class _Compared(NamedTuple):
    """A replica against its siblings; ``p_value`` that an equal is as far from them."""

    replica: Replica
    ratio: float | None = None
    stderr: float = 0.0
    free: float = FREE_MIN
    difference: float = 0.0
    p_value: float = 1.0


def compared(
    replicas: Sequence[Replica], learned_rows: int
) -> tuple[list[ReplicaSnapshot], list[ReplicaClusterSnapshot]]:
    """Each against its siblings, those first that are furthest from them; the clusters, none where all are one.

    Nothing where there are no siblings, or where of ``learned_rows`` by now most came after the merge.
    """
    if len(replicas) < 2 or learned_rows > 2 * sum(replica.rows for replica in replicas):  # noqa: PLR2004
        return [], []
    whole = reduce(Replica.plus, replicas)
    clusters = _clusters(replicas, whole)
    several = len(clusters) > 1
    snapshots = [
        _snapshot(each, len(replicas), number if several else None, differs=differs)
        for number, members in enumerate(clusters)
        for each, differs in _against_siblings(members, len(replicas))
    ]
    snapshots.sort(key=lambda s: (not s.differs, -abs(math.log(s.ratio)) if s.ratio else 0.0, s.engine))
    return snapshots, [_cluster(members, whole) for members in clusters] if several else []


def _against_siblings(members: Sequence[Replica], family: int) -> list[tuple[_Compared, bool]]:
    """Each against the others that do not differ, and whether it does."""
    apart: set[int] = set()
    while True:
        together = reduce(Replica.plus, (each for index, each in enumerate(members) if index not in apart))
        every = [
            _compare(each, together if index in apart else together.minus(each)) for index, each in enumerate(members)
        ]
        differing = _rejected(every, family)
        furthest = max((every[index].difference for index in differing - apart), default=math.inf)
        further = {index for index in differing - apart if every[index].difference >= _ALIKE * furthest}
        if not further or len(members) - len(apart | further) < _MAJORITY_MIN:
            return [(each, index in differing) for index, each in enumerate(every)]
        apart |= further


def _compare(replica: Replica, siblings: Replica) -> _Compared:
    beta, covariance = siblings.beta(), siblings.covariance()
    forecast = float(beta @ replica.a @ beta)
    against = float(beta @ replica.b)
    if not (forecast > 0.0 and against > 0.0 and replica.squares > 0.0):
        return _Compared(replica)
    ratio, u = against / forecast, replica.a @ beta / forecast
    variance = float(beta @ replica.noise @ beta) / forecast**2 + ratio**2 * float(u @ covariance @ u)
    apart = replica.beta() - beta
    observed = float(apart @ replica.a @ apart) / replica.squares
    expected = float(np.trace(replica.a @ (replica.covariance() + covariance))) / replica.squares
    if not math.isfinite(ratio + variance + observed + expected):
        return _Compared(replica)
    free = _free(min(replica.rows, siblings.rows, _MEMORY_ROWS), len(beta))
    p_value = _f_tail(observed / expected, len(beta), free) if expected > 0.0 < observed else 1.0
    stderr, difference = math.sqrt(max(variance, 0.0)), math.sqrt(max(observed, 0.0))
    return _Compared(replica, ratio, stderr, free, difference, p_value)


def _rejected(every: Sequence[_Compared], family: int) -> set[int]:
    """Positions of those that are no equals (Holm), and far enough off to be worth a name."""
    rejected = set()
    for step, index in enumerate(sorted(range(len(every)), key=lambda index: every[index].p_value)):
        if every[index].p_value * (family - step) > FAMILY_WISE_LEVEL:
            break
        rejected.add(index)
    return {index for index in rejected if every[index].difference > _DIFFERENCE}


def _snapshot(one: _Compared, family: int, cluster: int | None, *, differs: bool) -> ReplicaSnapshot:
    engine, rows = one.replica.engine, one.replica.rows
    if one.ratio is None:
        return ReplicaSnapshot(engine=engine, rows=rows, differs=False, cluster=cluster)
    half = one.stderr * _student(1.0 - INTERVAL_LEVEL / (2.0 * family), one.free)
    return ReplicaSnapshot(
        engine=engine,
        rows=rows,
        differs=differs,
        ratio=one.ratio,
        stderr=one.stderr,
        low=max(one.ratio - half, 0.0),
        high=one.ratio + half,
        cluster=cluster,
    )


# ------------------------------------------------------------------ clusters


def _clusters(replicas: Sequence[Replica], whole: Replica) -> list[list[Replica]]:
    """All in one, or those of like speed together, the fastest first."""
    beta = whole.beta()
    logs = [_log_speed(replica, beta) for replica in replicas]
    placed = sorted((log, index) for index, log in enumerate(logs) if log is not None)
    groups = _split([log for log, _ in placed], _CLUSTERS_MAX, max(_CLUSTER_MIN, _CLUSTER_SHARE * len(placed)))
    if len(groups) < 2:  # noqa: PLR2004
        return [list(replicas)]
    clusters, at = [], 0
    for group in groups:
        clusters.append([replicas[index] for _, index in placed[at : at + len(group)]])
        at += len(group)
    clusters[0] += [replica for replica, log in zip(replicas, logs, strict=True) if log is None]
    return clusters


def _log_speed(replica: Replica, beta: Floats) -> float | None:
    forecast, against = float(beta @ replica.a @ beta), float(beta @ replica.b)
    log = math.log(against / forecast) if forecast > 0.0 and against > 0.0 else math.nan
    return log if math.isfinite(log) else None


def _split(logs: list[float], clusters_max: int, size_min: float) -> list[list[float]]:
    """Sorted numbers cut where that leaves the least spread within, if the parts are clearly apart."""
    n, values = len(logs), np.array(logs)
    cuts = range(math.ceil(size_min), n - math.ceil(size_min) + 1)
    if clusters_max < 2 or not cuts:  # noqa: PLR2004
        return [logs]
    sums, squares = np.cumsum(values), np.cumsum(values**2)
    ends = np.array(cuts)
    low, high = sums[ends - 1] / ends, (sums[-1] - sums[ends - 1]) / (n - ends)
    within = np.maximum(squares[-1] - ends * low**2 - (n - ends) * high**2, 0.0)
    best = int(np.argmin(within))
    apart = float(high[best] - low[best])
    if apart < math.log1p(_DIFFERENCE) or apart < _SEPARATION * math.sqrt(within[best] / (n - 2)):
        return [logs]
    parts = logs[: cuts[best]], logs[cuts[best] :]
    first = _split(parts[0], clusters_max - 1, size_min)
    return first + _split(parts[1], clusters_max - len(first), size_min)


def _cluster(members: Sequence[Replica], whole: Replica) -> ReplicaClusterSnapshot:
    together = reduce(Replica.plus, members)
    one = _compare(together, whole.minus(together))
    return ReplicaClusterSnapshot(engines=len(members), rows=together.rows, ratio=one.ratio)


# ------------------------------------------------------------ distributions


def _free(rows: int, p: int) -> float:
    """Degrees of freedom of N: the windows behind it, less p."""
    return max(rows / WINDOW_ROWS - p, FREE_MIN)


def _f_tail(f: float, p: float, free: float) -> float:
    """P(F > f) of p and ``free`` degrees: Paulson's normal approximation."""
    cube, a, b = math.cbrt(f), 2.0 / (9.0 * p), 2.0 / (9.0 * free)
    z = ((1.0 - b) * cube - (1.0 - a)) / math.sqrt(b * cube**2 + a)
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def _student(probability: float, free: float) -> float:
    """The quantile of Student's t by its Cornish-Fisher expansion, three terms: 2 % short at 4 degrees and 99.9 %."""
    z = _NORMAL.inv_cdf(probability)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / free + second / free**2 + third / free**3
