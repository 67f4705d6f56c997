"""Two ``rls`` learners into one.

Merging adds statistics, it never averages coefficients. What one stream learned after the other is treated as if one
learner had seen both: the earlier statistics are first decayed by what the later learned, stratum by stratum. Streams
side by side keep each its own decay. Then one solve. The detector starts over.

Scale and error bars are those of the merged coefficients, not means of what each side knew of its own:

    R_k(beta) = beta' A_k beta - 2 b_k' beta + y'Wy_k         sum of squared relative residuals of side k
    n s^2     = n_1 s_1^2 + n_2 s_2^2 + R(beta) - R_1(beta_1) - R_2(beta_2)              n: rows in Huber shares
    M         = M_1 + M_2 + 2 sum_k g_k g_k' max(0, 1 - 9 / t)          g_k = b_k - A_k beta
    t         = sum_k g_k' C g_k / max(tr C M, p s^2)

The last term is the variance between two clusters: sides that differ by more than three of their own errors leave
coefficients that are no surer than their difference. Sums telescope: stages give what one merge of all would, as far as
statistics do. Prequential errors start over: nobody has predicted by the merged coefficients yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from online.blocks import Design
from online.rows import Floats

from .members import Members
from .rls_learner import RlsLearner
from .solve import RELATIVE_RIDGE

_SURE = 9.0


@dataclass(slots=True)
class _Side:
    """What one side believed: G (q, q), beta (p,), rows in Huber shares, and s."""

    g: Floats
    beta: Floats
    rows: float
    scale: float

    @staticmethod
    def of(members: Members) -> _Side:
        slow = members.slow
        return _Side(slow.strata.total(), slow.beta.copy(), float(slow.strata.n1.sum()), members.weighing.scale)

    def residual(self) -> float:
        """R_k(beta_k)."""
        return _residual(self.g, self.beta)


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
    sides = [_Side.of(into), _Side.of(other)]
    into.add(other)
    into.solve_slow()
    beta, g = into.slow.beta, into.slow.strata.total()
    between = max(_residual(g, beta) - sum(side.residual() for side in sides), 0.0)
    rows = max(sum(side.rows for side in sides), 1.0)
    within = sum(side.rows * side.scale**2 for side in sides)
    into.weighing.scale = max(float(np.sqrt((within + between) / rows)), min(side.scale for side in sides))
    _widen_errors(into, sides, within / rows)
    into.solve_slow()
    into.scores.add(other.scores)


def _widen_errors(merged: Members, sides: list[_Side], variance: float) -> None:
    """Put into M what the sides differ by beyond their own errors."""
    slow = merged.slow
    p, a = slow.p, slow.strata.total()[: slow.p, : slow.p]
    live = a.diagonal() > 0.0
    if not live.any():
        return
    scale = 1.0 / np.sqrt(np.where(live, a.diagonal(), 1.0))
    system = (a * scale * scale[:, None])[np.ix_(live, live)]
    inverse = np.linalg.inv(system + RELATIVE_RIDGE * np.eye(len(system)))
    scores = np.array([side.g[:p, p] - side.g[:p, :p] @ slow.beta for side in sides])
    scores[:, ~slow.passive] = 0.0
    scaled = (scores * scale)[:, live]
    noise, meat = variance * len(system), slow.meat.of_scores(len(system))
    if meat is not None:
        noise = max(noise, float(np.trace(inverse @ (meat * scale * scale[:, None])[np.ix_(live, live)])))
    observed = float(np.einsum("ki,ij,kj->", scaled, inverse, scaled))
    if observed > _SURE * noise:
        slow.meat.add_between((1.0 - _SURE * noise / observed) * 2.0 * scores.T @ scores, slow.strata.n1)


def _residual(g: Floats, beta: Floats) -> float:
    """R(beta) of statistics G (q, q), y behind the p columns."""
    p = len(beta)
    signed = np.append(beta, -1.0)
    return float(signed @ g[: p + 1, : p + 1] @ signed)


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
