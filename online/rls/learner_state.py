"""State of the ``rls`` learner: to the state file, back from it, and two of them into one.

Merging adds statistics, it never averages coefficients. What one stream learned after the other is treated as if one
learner had seen both: the earlier statistics are first decayed by what the later learned, stratum by stratum. Streams
side by side keep each its own decay. Then one solve. The fast member, the detector and a running trial start over.
"""

from __future__ import annotations

from online.blocks import Design
from online.state import State, StateError, pack, unpack

from .fast_member import SLOW
from .prior import Prior
from .rls_learner import MIN_START_ROWS, RlsLearner

_PLAIN = (
    "beta",
    "live",
    "passive",
    "per_row",
    "evidence",
    "slow_rows",
    "scale",
    "median_us",
    "start_median_us",
    "rows",
    "champion",
    "quick",
    "recent",
    "sums",
    "started",
    "holding",
)
_PARTS = ("slow", "fast", "meat", "error", "live_error", "intervals", "drift")


def save(learner: RlsLearner) -> State:
    """Everything that its next block depends on; the prior goes with it."""
    state: State = {name: getattr(learner, name).state() for name in _PARTS}
    state["phases"] = learner.phases > 0
    state["plain"] = pack(learner, (*_PLAIN, *learner.extra))
    state["trial"] = None if learner.trial is None else learner.trial.state()
    state["start"] = None if learner.start is None else learner.start.state()
    state["prior"] = None if learner.prior is None else learner.prior.state()
    return state


def restore(learner: RlsLearner, state: State) -> None:
    """Fill a fresh learner of the same columns.

    Raises:
        StateError: the state does not fit; the learner must then be thrown away.
    """
    try:
        if state["phases"]:
            learner.open_phases()
        for name in _PARTS:
            getattr(learner, name).restore(state[name])
        unpack(learner, (*_PLAIN, *learner.extra), state["plain"])
        learner.trial = None
        if state["trial"] is not None:
            learner.trial = learner.new_strata()
            learner.trial.restore(state["trial"])
        held = state["start"]
        learner.start = None if held is None else Design.restored(held, len(learner.features))
        learner.prior = None if state["prior"] is None else Prior.restored(state["prior"], learner.p)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise error if isinstance(error, StateError) else StateError(f"rls state: {error!r}") from error


def merge(into: RlsLearner, other: RlsLearner, *, other_is_later: bool, side_by_side: bool) -> None:
    """Add what ``other`` knows; both have no partial block. ``other`` is used up."""
    for learner in (into, other):
        learner.stop_trial()
        if into.phases or other.phases:
            learner.open_phases()
    if into.holding and other.holding:
        _merge_held(into, other, other_is_later=other_is_later)
        return
    for learner in (into, other):
        if learner.holding and learner.start is not None and len(learner.start) >= MIN_START_ROWS:
            learner.release()
    if other.holding:
        return
    if into.holding:
        restore(into, save(other))
        into.restart_live()
        return
    if not side_by_side:
        earlier, later = (into, other) if other_is_later else (other, into)
        earlier.slow.decay(later.slow.clock)
        earlier.meat.decay(later.slow.clock)
    _add(into, other)


def _merge_held(into: RlsLearner, other: RlsLearner, *, other_is_later: bool) -> None:
    parts = [into.start, other.start] if other_is_later else [other.start, into.start]
    held = [part for part in parts if part is not None]
    into.rows += other.rows
    into.sums = into.sums + other.sums
    into.error.add(other.error)
    if held:
        into.start = Design.concatenate(held)
        if len(into.start) >= MIN_START_ROWS:
            into.refit(release=len(into.start) >= into.settings.start_rows)
    into.restart_live()


def _add(into: RlsLearner, other: RlsLearner) -> None:
    mine, theirs = float(into.slow.n1.sum()), float(other.slow.n1.sum())
    share = theirs / (mine + theirs) if mine + theirs > 0.0 else 0.5
    into.scale[:] = (1.0 - share) * into.scale[SLOW] + share * other.scale[SLOW]
    into.median_us += share * (other.median_us - into.median_us)
    into.slow.add(other.slow)
    into.meat.add(other.meat)
    into.rows += other.rows
    into.sums = into.sums + other.sums
    into.error.add(other.error)
    into.live_error.add(other.live_error)
    into.intervals.add(other.intervals)
    into.restart_live()
