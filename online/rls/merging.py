"""Two ``rls`` learners into one.

Merging adds statistics, it never averages coefficients. What one stream learned after the other is treated as if one
learner had seen both: the earlier statistics are first decayed by what the later learned, stratum by stratum. Streams
side by side keep each its own decay. Then one solve. The fast member, the detector and a running trial start over.
"""

from __future__ import annotations

from online.blocks import Design

from .rls_learner import RlsLearner


def merge(into: RlsLearner, other: RlsLearner, *, other_is_later: bool, side_by_side: bool) -> None:
    """Add what ``other`` knows; both have no partial block. ``other`` is used up."""
    for learner in (into, other):
        learner.members.refute_trial()
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
    else:
        if not side_by_side:
            earlier, later = (into, other) if other_is_later else (other, into)
            earlier.members.slow.decay(later.members.slow.strata.clock)
        into.members.add(other.members)
        into.rows += other.rows
    into.members.solve_slow()
    into.members.restart_live()


def _merge_held(into: RlsLearner, other: RlsLearner, *, other_is_later: bool) -> None:
    parts = [into.startup.held, other.startup.held] if other_is_later else [other.startup.held, into.startup.held]
    held = [part for part in parts if part is not None]
    into.rows += other.rows
    into.members.means.add(other.members.means)
    into.members.champion.error.add(other.members.champion.error)
    if held:
        into.startup.held = Design.concatenate(held)
        into.refit()
    if not into.startup.holding:
        into.members.solve_slow()
    into.members.restart_live()
