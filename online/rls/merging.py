"""Two ``rls`` learners into one, and several engines of a configuration, each held against the others.

Merging adds statistics, it never averages coefficients. What one stream learned after the other is treated as if one
learner had seen both: the earlier statistics are first decayed by what the later learned, stratum by stratum. Streams
side by side keep each its own decay. Then one solve. Errors and the detector start over: nobody has predicted by the
merged coefficients yet. The scale is that of the merged coefficients:

    R_k(beta) = beta' A_k beta - 2 b_k' beta + y'Wy_k         sum of squared relative residuals of side k
    n s^2     = n_1 s_1^2 + n_2 s_2^2 + R(beta) - R_1(beta_1) - R_2(beta_2)              n: rows in Huber shares

A replica is the statistics of one engine at the merge: A, b, and N, the variance of its scores; before there are
2 p + 2 windows, and of engines that send to one sidecar, 64 s^2 A stands in: neighbouring rows may share that much of
their noise. Phases belong to the stamps of a server and are taken out at their estimate.

    beta_i = the fit of what all others know together, without those that differ
    r_i    = log (beta_i' b_i / beta_i' A_i beta_i)            0 = as fast as the others; exp r_i is its ratio
    v_i    = beta_i' N beta_i / (beta_i' A beta_i)^2           summed over A, N of its own rows and of the others'
    se_i   = max (sqrt v_i, 1.4826 MAD of r over those that do not differ)

A replica differs where |r_i| > 5 % and > 3 se_i; and where the same ratio of the prefill columns alone, fitted beside
one of all others, is beyond 1.25 and 3 se_i: prefill is in few rows, and other prompts alone move its price by 14 %
(quarters of c10_long). Those furthest off are set apart and the rest is looked at again, as long as two are left: one
that is slow makes no other fast. Who differs on the whole is no measure of the others' prefill either. The scatter of
the others counts because engines with other loads differ by what the form misses. In which term: online/change.py.

Shapes: A, N (p, p), b, beta (p,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Self

import numpy as np

from online.blocks import Design, median_of
from online.change import APART, MovedTerm, is_of_prefill, moved_term
from online.constants import ENGINES_MAX, MAD_TO_SD, SURE_SD, WORTH
from online.errors import PrequentialError
from online.rows import Floats, Mask
from online.snapshot import ReplicaSnapshot
from online.state import Stateful, Tree

from .learner import RlsLearner, residual_squares
from .solve import solve

# Guess: a bound of what neighbouring rows share.
_SHARED_NOISE = 64.0
# Guess: those within a tenth of the furthest go with it; rounds.
_ALIKE, _ROUNDS = 0.9, 16


def merge(into: RlsLearner, other: RlsLearner, *, other_is_later: bool, side_by_side: bool) -> None:
    """Add what ``other`` knows; both have no partial block. ``other`` is used up."""
    for learner in (into, other):
        if into.phases or other.phases:
            learner.open_phases()
        if not (into.holding and other.holding):
            learner.release()
    if other.holding and not into.holding:
        return  # too few rows for a fit of their own
    if into.holding and not other.holding:
        for name in (*RlsLearner.SAVED, "held"):
            setattr(into, name, getattr(other, name))
    else:
        into.rows += other.rows
        into.means.sums = into.means.sums + other.means.sums
        into.error = PrequentialError()
        into.intervals.add(other.intervals)
        if into.holding:
            parts = [into.held, other.held] if other_is_later else [other.held, into.held]
            if held := [part for part in parts if part is not None]:
                into.held = Design.concatenate(held)
                into.refit()
        else:
            if not side_by_side:
                earlier, later = (into, other) if other_is_later else (other, into)
                earlier.fit.decay(later.fit.strata.clock)
            _add_statistics(into, other)
    into.drift = into.drift.restarted()


def _add_statistics(into: RlsLearner, other: RlsLearner) -> None:
    """Statistics of both, and the scale of what solves them."""
    sides = [(side, float(side.fit.strata.n1.sum())) for side in (into, other)]
    rows = max(sum(n for _, n in sides), 1.0)
    least = min(into.scale, other.scale)
    squares = sum(n * side.scale**2 - residual_squares(side.fit.strata.total(), side.fit.beta) for side, n in sides)
    within = sum(n * side.scale**2 for side, n in sides)
    into.median_us += sides[1][1] / rows * (other.median_us - into.median_us)
    into.fit.add(other.fit)
    into.shapes.add(other.shapes)
    into.fit.solve_strata(into.scale)
    squares += residual_squares(into.fit.strata.total(), into.fit.beta)
    into.scale = max(math.sqrt(max(squares, within) / rows), least)
    into.fit.solve_strata(into.scale)


# ------------------------------------------------------------------- replicas


@dataclass(slots=True)
class Replica(Stateful):
    """What one engine's state knew when it was merged: A, b, N and how many rows."""

    SAVED = ("engine", "rows", "a", "b", "noise")

    engine: str
    rows: int
    a: Floats
    b: Floats
    noise: Floats

    @staticmethod
    def of(learner: RlsLearner, engine: str) -> list[Replica]:
        """What a learner knows, as one of several; none before its first fit."""
        if not learner.started:
            return []
        p, (a, b) = len(learner.features), learner.normal_equations()
        meat = learner.fit.meat.of_scores(learner.fit.p)
        noise = _SHARED_NOISE * learner.scale**2 * a if meat is None else meat[:p, :p]
        return [Replica(engine, learner.rows, a, b, noise)]

    @staticmethod
    def of_engines(learner: RlsLearner, names: Mapping[int, str]) -> list[Replica]:
        """The engines that a learner hears, by their numbers' ``names``; none where it hears one alone."""
        heard = [(names.get(number, str(number)), rows) for number, rows in learner.drift.engines.rows.items()]
        shared = _SHARED_NOISE * learner.scale**2
        return [Replica(name, rows.learned, rows.a, rows.b, shared * rows.a) for name, rows in heard if rows.learned]

    @staticmethod
    def of_state(state: Tree, p: int) -> Replica:
        """One of p columns from the state file; StateError if it does not fit."""
        replica = Replica("", 0, np.zeros((p, p)), np.zeros(p), np.zeros((p, p)))
        replica.from_state(state)
        return replica

    def plus(self, other: Self, sign: int = 1) -> Replica:
        """Both, as one engine's; with -1, this without a part of it."""
        a, b, noise = self.a + sign * other.a, self.b + sign * other.b, self.noise + sign * other.noise
        return Replica(self.engine, self.rows + sign * other.rows, a, b, noise)


def joined(mine: Sequence[Replica], theirs: Sequence[Replica]) -> list[Replica]:
    """Replicas of both, those of one engine together; beyond the bound the ones with the fewest rows go."""
    by_engine: dict[str, Replica] = {}
    every = []
    for replica in (*mine, *theirs):
        if not replica.engine:
            every.append(replica)
        elif replica.engine in by_engine:
            by_engine[replica.engine] = by_engine[replica.engine].plus(replica)
        else:
            by_engine[replica.engine] = replica
    every = sorted([*by_engine.values(), *every], key=lambda replica: (replica.engine, replica.rows))
    return every if len(every) <= ENGINES_MAX else sorted(every, key=lambda replica: -replica.rows)[:ENGINES_MAX]


class Comparison(NamedTuple):
    """Replicas, those that differ and are furthest from the others first, and how far apart the engines are.

    ``spread``: root mean square over the rows of how far engines that differ are from all, in logs; 0 where none does.
    """

    replicas: list[ReplicaSnapshot]
    spread: float


def compared(replicas: Sequence[Replica], learned_rows: int, names: Sequence[str]) -> Comparison:
    """Each replica against the others; ``names``: of the columns, for the term in which one differs.

    Nothing where there are no others, or where of ``learned_rows`` by now most came after the merge. A replica on whose
    work the others predict nothing has no ratio.
    """
    rows = np.array([replica.rows for replica in replicas], np.float64)
    if len(replicas) < 2 or learned_rows > 2 * rows.sum():  # noqa: PLR2004
        return Comparison([], 0.0)
    every, of_prefill = np.ones(len(replicas), np.bool_), np.array([*map(is_of_prefill, names)], np.bool_)
    whole = _apart(replicas, lambda replica, others, beta: _ratio(replica, others, beta[:, None]), WORTH, every)
    usual = every if np.count_nonzero(~whole.differs) < 2 else ~whole.differs  # noqa: PLR2004
    in_two = lambda replica, others, beta: _ratio(replica, others, _in_two(beta, of_prefill))  # noqa: E731
    prefill = _apart(replicas, in_two, APART, usual)
    snapshots = []
    for index, replica in enumerate(replicas):
        r, stderr = float(whole.log_ratio[index]), float(whole.stderr[index])
        told: dict[str, Any] = {} if math.isnan(r) else {"ratio": math.exp(r), "stderr": math.exp(r) * stderr}
        differs = whole.differs[index] or prefill.differs[index]
        if differs:
            in_prefill = prefill.differs[index] and not whole.differs[index]
            term = _prefill_term(prefill, index, names) if in_prefill else _term(replica, whole, index, names)
            told |= {"term": term.name, "added": term.added or None} if term.name else {}
        snapshots.append(ReplicaSnapshot(engine=replica.engine, rows=replica.rows, differs=bool(differs), **told))
    snapshots.sort(key=lambda s: (not s.differs, -abs(math.log(s.ratio)) if s.ratio else 0.0, s.engine))
    apart = np.where(whole.differs, whole.log_ratio, 0.0) * (1.0 - rows / rows.sum())  # from all, itself included
    return Comparison(snapshots, math.sqrt(float(rows @ apart**2) / float(rows.sum())))


class Apart(NamedTuple):
    """Replicas against the others: R and its standard error, (k,), who differs, and the others' coefficients.

    NaN and 0 where the others predict nothing.
    """

    log_ratio: Floats
    stderr: Floats
    differs: Mask
    beta: list[Floats]


def _apart(
    replicas: Sequence[Replica],
    ratio_of: Callable[[Replica, Replica, Floats], tuple[float, float]],
    least: float,
    usual: Mask,
) -> Apart:
    """By the log ratio of a replica to the others and its error by rows; those furthest off are set apart first.

    One differs by more than ``least``, in logs, and three standard errors. ``usual`` are among the others at first.
    """
    usual = usual.copy()
    for _ in range(_ROUNDS):
        together = reduce(Replica.plus, (replica for replica, counts in zip(replicas, usual, strict=True) if counts))
        others = [together.plus(each, -1) if counts else together for each, counts in zip(replicas, usual, strict=True)]
        none = np.zeros(len(together.b), np.bool_)
        beta = [solve(each.a, each.b, none, ~none).beta for each in others]
        ratios = np.array([ratio_of(*each) for each in zip(replicas, others, beta, strict=True)])
        log_ratio, by_rows = ratios[:, 0], ratios[:, 1]
        off = np.abs(log_ratio)
        odd = usual & (off > np.maximum(least, SURE_SD * by_rows))  # of NaN it is False
        further = odd & (off >= _ALIKE * off[odd].max(initial=0.0))
        if not odd.any() or np.count_nonzero(usual & ~further) < 2:  # noqa: PLR2004
            break
        usual &= ~further
    calm = log_ratio[usual & ~odd & np.isfinite(log_ratio)]
    scatter = MAD_TO_SD * median_of(np.abs(calm - median_of(calm))) if len(calm) else 0.0
    stderr = np.maximum(by_rows, scatter)
    return Apart(log_ratio, stderr, off > np.maximum(least, SURE_SD * stderr), beta)


def _in_two(beta: Floats, of_prefill: Mask) -> Floats:
    """Directions (p, 2): what is not of prefill, and what is, which is the last one."""
    return np.column_stack((np.where(of_prefill, 0.0, beta), np.where(of_prefill, beta, 0.0)))


def _ratio(replica: Replica, others: Replica, m: Floats) -> tuple[float, float]:
    """R and sqrt v along the last of the directions m (p, k), which the others have at 1; NaN and 0 of nothing."""
    k, k_others = m.T @ replica.a @ m, m.T @ others.a @ m
    try:
        own, theirs = (np.linalg.solve(each, m.T)[-1] for each in (k, k_others))
    except np.linalg.LinAlgError:
        return math.nan, 0.0
    took = float(own @ replica.b)
    if not 0.0 < took < math.inf:
        return math.nan, 0.0
    variance = max(float(own @ replica.noise @ own), 0.0) + max(float(theirs @ others.noise @ theirs), 0.0)
    return math.log(took), math.sqrt(variance)


def _term(replica: Replica, apart: Apart, index: int, names: Sequence[str]) -> MovedTerm:
    """In which term a replica differs that takes longer, or less, on the whole."""
    return moved_term(replica.a, replica.b, apart.beta[index], names, slower=bool(apart.log_ratio[index] > 0.0))


def _prefill_term(apart: Apart, index: int, names: Sequence[str]) -> MovedTerm:
    """The term of one that differs in prefill alone."""
    column = next(each for each, name in enumerate(names) if is_of_prefill(name))
    return MovedTerm(names[column], float(np.expm1(apart.log_ratio[index]) * apart.beta[index][column]))
