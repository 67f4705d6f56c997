"""Two ``rls`` learners into one, and several engines of a configuration, each held against the others.

Merging adds statistics, it never averages coefficients. What one stream learned after the other is treated as if one
learner had seen both: the earlier statistics are first decayed by what the later learned, stratum by stratum. Streams
side by side keep each its own decay. Then one solve. Errors and the detector start over: nobody has predicted by the
merged coefficients yet. The squared scale is the mean of both, by their rows.

A replica is the statistics of one engine at the merge: A, b, and N, the variance of its scores; before there are
p + 1 windows, and of engines that send to one sidecar, s^2 A stands in, each single step times 32: so many may share
their noise. Of windows the scale is a median's, which misses the tail: a row's variance is what a fit of the engine
alone leaves, or s^2 if that is more, times 1.5. Of engines that send to one sidecar, one counts with 16 rows. Phases
belong to the stamps of a server and are taken out at their estimate.

    beta_i = the fit of what all others know together, without those that are odd
    P_i    = A_o (A_i + A_o)^-1 A_i                      o: the others; i and o say so much of how they differ
    s_i    = A_o (A_i + A_o)^-1 b_i - A_i (A_i + A_o)^-1 b_o        = P_i (fit of i alone - fit of o alone)
    r_i    = log (1 + beta_i' s_i / beta_i' P_i beta_i)  0 = as fast as the others; exp r_i is its ratio
    v_i    = beta_i' N_s beta_i / (beta_i' P_i beta_i)^2            N_s: the variance of s_i by N of both
    se_i   = max (sqrt v_i, 1.4826 MAD of r over those that do not differ)

P is the parallel sum of A_i and A_o (Anderson and Duffin 1969). What only one of them was asked for, such as a price of
prompts that the others never had, or a split of costs that their loads do not tell, is 0 in it: it may be anything. So
two replicas are as far from each other whichever is asked first, and one change between them is in one term.

A replica differs where |r_i| > 5 % and > 3 se_i; and where the same ratio of the prefill columns alone, fitted beside
one of all others, is beyond 1.25 and 3 se_i: prefill is in few rows, and other prompts alone move its price by 14 %
(quarters of c10_long). An outlier is as far from the median of all, by the fit of all, so a slow replica makes no other
look fast. Where several differ, each but the furthest must also differ without the furthest. A replica that differs on
the whole is left out where prefill is compared. The scatter of the others counts because engines with other loads
differ by what the form misses. In which term a replica differs: online/moved_term.py, by P and s.

Reference: Anderson and Duffin, Series and parallel addition of matrices (J. Math. Anal. Appl. 1969).
Shapes: A, N, P (p, p), b, s, beta (p,).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Self

import numpy as np

from online.blocks import Design, median_of
from online.constants import APART, ENGINES_MAX, FEW_ROWS, MAD_TO_SD, NOISE_ROWS, SURE_SD, TINY, WORTH
from online.errors import PrequentialError
from online.moved_term import MovedTerm, is_of_prefill, moved_term
from online.rows import Floats, Mask
from online.snapshot import ReplicaSnapshot
from online.state import Stateful, Tree

from .learner import RlsLearner
from .solve import RELATIVE_RIDGE, solve

# Chosen: on pages of simulated servers every 15 s: with 1 a replica differs in 2 of 20 groups in which none is slow.
_WINDOW_NOISE = 1.5


def merge(into: RlsLearner, other: RlsLearner, *, other_is_later: bool, side_by_side: bool) -> None:
    """Merge ``other`` into ``into``, both without a partial block; ``other`` must not be used again. Burn-in ends."""
    for learner in (into, other):
        learner.fit_burn_in(last=True)
    # too few for a fit of their own: they are learned as any others
    few = other.burn_in if other.in_burn_in else into.burn_in
    if into.in_burn_in and not other.in_burn_in:
        for name in (*RlsLearner.SAVED, "prior", "burn_in"):
            setattr(into, name, getattr(other, name))
    elif not other.in_burn_in:
        if not side_by_side:
            earlier, later = (into, other) if other_is_later else (other, into)
            earlier.sums *= 2.0 ** -later.half_lives()
            earlier.intervals.decay(later.intervals.rows)
            earlier.strata.decay(later.strata.clock)
        _add_statistics(into, other)
    if few is not None:
        into.learn(Design.of(into.features, few))
    into.drift = into.drift.without_changes()


def _add_statistics(into: RlsLearner, other: RlsLearner) -> None:
    rows, more = (max(float(side.strata.n1.sum()), TINY) for side in (into, other))
    share = more / (rows + more)
    into.scale = math.sqrt((1.0 - share) * into.scale**2 + share * other.scale**2)
    into.median_us += share * (other.median_us - into.median_us)
    into.rows += other.rows
    into.by_pages &= other.by_pages
    into.sums += other.sums
    into.error = PrequentialError()
    into.intervals.add(other.intervals)
    into.strata.add(other.strata)
    into.shapes.add(other.shapes)
    into.solve()


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
        """The replica of a learner's engine; empty before its first fit."""
        if not learner.started:
            return []
        p, (a, b) = len(learner.features), learner.normal_equations()
        of_scores = learner.strata.scores.of_scores(int(learner.live.sum()))
        noise = NOISE_ROWS * learner.scale**2 * a if of_scores is None else of_scores[:p, :p]
        return [Replica(engine, learner.rows, a, b, noise)]

    @staticmethod
    def of_engines(learner: RlsLearner, names: Mapping[int, str]) -> list[Replica]:
        """Replicas of the engines whose rows a learner gets, by ``names``; empty where there is only one."""
        heard = [(names.get(number, str(number)), rows) for number, rows in learner.drift.engines.rows.items()]
        replicas, variance = [], learner.scale**2
        for name, rows in heard:
            if rows.learned >= FEW_ROWS:
                by_windows = learner.drift.search.by_windows
                noise = _WINDOW_NOISE * max(rows.variance(), variance) if by_windows else NOISE_ROWS * variance
                replicas.append(Replica(name, rows.learned, rows.a, rows.b, noise * rows.a))
        return replicas

    @staticmethod
    def of_state(state: Tree, p: int) -> Replica:
        """One of p columns from the state file; StateError if it does not fit."""
        replica = Replica("", 0, np.zeros((p, p)), np.zeros(p), np.zeros((p, p)))
        replica.from_state(state)
        return replica

    def plus(self, other: Self) -> Replica:
        """The sum of two replicas of one engine."""
        a, b, noise = self.a + other.a, self.b + other.b, self.noise + other.noise
        return Replica(self.engine, self.rows + other.rows, a, b, noise)


def join_replicas(mine: Sequence[Replica], theirs: Sequence[Replica]) -> list[Replica]:
    """Replicas of two states, those of one engine summed; beyond the bound those with the fewest rows are dropped."""
    by_engine: dict[str | int, Replica] = {}
    for number, replica in enumerate((*mine, *theirs)):
        name = replica.engine or number  # one without a name is nobody else
        by_engine[name] = by_engine[name].plus(replica) if name in by_engine else replica
    every = sorted(by_engine.values(), key=lambda replica: (replica.engine, replica.rows))
    return every if len(every) <= ENGINES_MAX else sorted(every, key=lambda replica: -replica.rows)[:ENGINES_MAX]


def compare_replicas(replicas: Sequence[Replica], learned_rows: int, names: Sequence[str]) -> list[ReplicaSnapshot]:
    """Compare each replica with the others; those that differ come first, the furthest at the top.

    The result is empty without others, and where most of ``learned_rows`` came after the merge. A replica has no ratio
    where the others predict nothing for its work. ``names``: of the columns, for the term in which one differs.
    """
    if len(replicas) < 2 or learned_rows > 2 * sum(replica.rows for replica in replicas):  # noqa: PLR2004
        return []
    every, of_prefill = np.ones(len(replicas), np.bool_), np.array([*map(is_of_prefill, names)], np.bool_)
    whole = _apart(replicas, None, WORTH, every)
    usual = every if np.count_nonzero(~whole.differs) < 2 else ~whole.differs  # noqa: PLR2004
    prefill = _apart(replicas, of_prefill, APART, usual)
    snapshots = []
    for index, replica in enumerate(replicas):
        r, stderr = float(whole.log_ratio[index]), float(whole.stderr[index])
        fields: dict[str, Any] = {} if math.isnan(r) else {"ratio": math.exp(r), "stderr": math.exp(r) * stderr}
        differs, term = bool(whole.differs[index] or prefill.differs[index]), None
        if whole.differs[index]:
            beta, contrast = whole.beta[index], whole.contrast[index]
            noise = float(beta @ contrast.noise @ beta) / float(beta @ contrast.p @ beta)
            term = moved_term(contrast.p, contrast.s, beta, names, slower=r > 0.0, noise=noise)
        elif differs:  # in prefill alone
            column = int(of_prefill.argmax())
            added = math.expm1(prefill.log_ratio[index]) * float(prefill.beta[index][column])
            term = MovedTerm(names[column], added)
        if term is not None and term.name:
            fields |= {"term": term.name, "added": term.added or None}
        snapshots.append(ReplicaSnapshot(engine=replica.engine, rows=replica.rows, differs=differs, **fields))
    return sorted(snapshots, key=_furthest_first)


def _furthest_first(replica: ReplicaSnapshot) -> tuple[bool, float, float, str]:
    """Key of an order; of two that are as far from each other the slower is first."""
    ratio = replica.ratio or 1.0
    return not replica.differs, -round(abs(math.log(ratio)), 3), -ratio, replica.engine


class Contrast(NamedTuple):
    """How a replica differs from the others, by both: P (p, p), s (p,) and its variance N_s (p, p)."""

    p: Floats
    s: Floats
    noise: Floats

    @staticmethod
    def of(replica: Replica, others: Replica) -> Contrast:
        """See the module's equations; directions that neither tells are left out."""
        both = replica.a + others.a
        unit = 1.0 / np.sqrt(np.maximum(both.diagonal(), TINY))
        inverse = np.linalg.pinv(both * unit * unit[:, None], RELATIVE_RIDGE, hermitian=True) * unit * unit[:, None]
        own, theirs = others.a @ inverse, replica.a @ inverse
        noise = own @ replica.noise @ own.T + theirs @ others.noise @ theirs.T
        return Contrast(own @ replica.a, own @ replica.b - theirs @ others.b, noise)

    def log_ratio(self, beta: Floats, of_prefill: Mask | None) -> tuple[float, float]:
        """R and sqrt v along beta (p,), or along its prefill columns beside the rest; NaN and 0 of nothing."""
        m = beta[:, None]
        if of_prefill is not None:
            m = np.column_stack((np.where(of_prefill, 0.0, beta), np.where(of_prefill, beta, 0.0)))
        try:
            along = np.linalg.solve(m.T @ self.p @ m, m.T)[-1]
        except np.linalg.LinAlgError:
            return math.nan, 0.0
        took = 1.0 + float(along @ self.s)
        if not 0.0 < took < math.inf:
            return math.nan, 0.0
        return math.log(took), math.sqrt(max(float(along @ self.noise @ along), 0.0))


class Apart(NamedTuple):
    """Replicas against the others: r and its standard error, (k,), NaN and 0 where these predict nothing, and more."""

    log_ratio: Floats
    stderr: Floats
    differs: Mask
    beta: list[Floats]
    contrast: list[Contrast]


def _apart(replicas: Sequence[Replica], of_prefill: Mask | None, least: float, usual: Mask) -> Apart:
    """By the log ratio of each replica to the others that are ``usual``; who is odd among those is found first.

    One differs by more than ``least``, in logs, and three standard errors. ``of_prefill``: compare these columns alone.
    """
    everyone = _sum(replicas, usual)
    first = _ratios(replicas, [everyone] * len(replicas), of_prefill)
    of_usual = first.log_ratio[usual & np.isfinite(first.log_ratio)]
    off = np.abs(first.log_ratio - median_of(of_usual))
    usual = usual & ~(off > np.maximum(least, SURE_SD * np.maximum(first.stderr, _scatter(of_usual))))
    found = _beside(replicas, of_prefill, least, usual)
    if np.count_nonzero(found.differs) > 1:
        furthest = np.arange(len(replicas)) == np.where(found.differs, np.abs(found.log_ratio), 0.0).argmax()
        again = _beside(replicas, of_prefill, least, usual & ~furthest)
        found = found._replace(differs=found.differs & (furthest | again.differs))
    return found


def _beside(replicas: Sequence[Replica], of_prefill: Mask | None, least: float, usual: Mask) -> Apart:
    """Each beside the others that are ``usual``, or beside all others where none of these is."""
    others = []
    for index in range(len(replicas)):
        them = usual.copy()
        them[index] = False
        others.append(_sum(replicas, them if them.any() else np.arange(len(replicas)) != index))
    found = _ratios(replicas, others, of_prefill)
    calm = usual & (np.abs(found.log_ratio) <= np.maximum(least, SURE_SD * found.stderr))
    stderr = np.maximum(found.stderr, _scatter(found.log_ratio[calm]))
    return found._replace(stderr=stderr, differs=np.abs(found.log_ratio) > np.maximum(least, SURE_SD * stderr))


def _scatter(log_ratio: Floats) -> float:
    """Standard deviation by the median absolute deviation; 0 of none."""
    return MAD_TO_SD * median_of(np.abs(log_ratio - median_of(log_ratio))) if len(log_ratio) else 0.0


def _sum(replicas: Sequence[Replica], counts: Mask) -> Replica:
    return reduce(Replica.plus, (replica for replica, counted in zip(replicas, counts, strict=True) if counted))


def _ratios(replicas: Sequence[Replica], others: Sequence[Replica], of_prefill: Mask | None) -> Apart:
    """R and sqrt v of each by rows, against its others, as if none differed."""
    beta = [solve(each.a, each.b).beta for each in others]
    contrast = [Contrast.of(*each) for each in zip(replicas, others, strict=True)]
    ratios = np.array([each.log_ratio(b, of_prefill) for each, b in zip(contrast, beta, strict=True)])
    return Apart(ratios[:, 0], ratios[:, 1], np.zeros(len(replicas), np.bool_), beta, contrast)
