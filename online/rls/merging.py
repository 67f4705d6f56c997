"""Two ``rls`` learners into one.

Merging adds statistics, it never averages coefficients. What one stream learned after the other is treated as if one
learner had seen both: the earlier statistics are first decayed by what the later learned, stratum by stratum. Streams
side by side keep each its own decay. Then one solve. The detector starts over.

The scale is that of the merged coefficients:

    R_k(beta) = beta' A_k beta - 2 b_k' beta + y'Wy_k         sum of squared relative residuals of side k
    n s^2     = n_1 s_1^2 + n_2 s_2^2 + R(beta) - R_1(beta_1) - R_2(beta_2)              n: rows in Huber shares

Sums telescope: stages give what one merge of all would. Prequential errors and bands start over: nobody has predicted
by the merged coefficients yet.
"""

from __future__ import annotations

import math

from online.blocks import Design
from online.rows import Floats

from .members import Members
from .rls_learner import RlsLearner


def merge(into: RlsLearner, other: RlsLearner, *, other_is_later: bool, side_by_side: bool) -> None:
    """Add what ``other`` knows; both have no partial block. ``other`` is used up."""
    for learner in (into, other):
        if into.phases or other.phases:
            learner.open_phases()
    if into.startup.holding and other.startup.holding:
        _merge_held(into, other, other_is_later=other_is_later)
        return
    for learner in (into, other):
        if learner.startup.fittable:
            learner.refit(release=True)
    if other.startup.holding:
        return
    if into.startup.holding:
        into.startup, into.members, into.rows = other.startup, other.members, other.rows
        into.members.solve_slow()
    else:
        if not side_by_side:
            earlier, later = (into, other) if other_is_later else (other, into)
            earlier.members.slow.decay(later.members.slow.strata.clock)
        _merge_members(into.members, other.members)
        into.rows += other.rows
    into.members.restart_detector()


def _merge_members(into: Members, other: Members) -> None:
    sides = (into, other)
    rows = [float(side.slow.strata.n1.sum()) for side in sides]
    scales = [side.weighing.scale for side in sides]
    own = sum(_residual(side.slow.strata.total(), side.slow.beta) for side in sides)
    into.add(other)
    into.scores.add(other.scores)
    into.solve_slow()
    between = max(_residual(into.slow.strata.total(), into.slow.beta) - own, 0.0)
    within = sum(n * scale**2 for n, scale in zip(rows, scales, strict=True))
    into.weighing.scale = max(math.sqrt((within + between) / max(sum(rows), 1.0)), min(scales))
    into.solve_slow()


def _residual(g: Floats, beta: Floats) -> float:
    """R(beta) of statistics G (q, q), y behind the p columns."""
    p = len(beta)
    return float(beta @ g[:p, :p] @ beta - 2.0 * (g[p, :p] @ beta) + g[p, p])


def _merge_held(into: RlsLearner, other: RlsLearner, *, other_is_later: bool) -> None:
    parts = [into.startup.held, other.startup.held] if other_is_later else [other.startup.held, into.startup.held]
    held = [part for part in parts if part is not None]
    into.rows += other.rows
    into.members.means.add(other.members.means)
    into.members.scores.add(other.members.scores)
    if held:
        into.startup.held = Design.concatenate(held)
        into.refit()
    if not into.startup.holding:
        into.members.solve_slow()
    into.members.restart_detector()
