"""Two states of one target into one: their learners, what is counted of them, and who they were."""

from __future__ import annotations

from online.rls import Replica, RlsLearner, joined, merge, replica_of
from online.state import StateError

from .learners import publishes
from .published_prediction import SHAPED
from .target_state import TargetState


def merge_target(into: TargetState, other: TargetState, engines: tuple[str, str] = ("", "")) -> None:
    """Add what another state of a target knows; ``other`` is used up.

    Args:
        into: both are flushed first.
        other: of the same target.
        engines: whom the one and the other are named after where they differ.

    Raises:
        StateError: models of one name have other columns.
    """
    into.flush()
    other.flush()
    later = other.first_ns >= into.last_ns
    side_by_side = not later and other.last_ns > into.first_ns
    watched = SHAPED if SHAPED in into.models else next((model.features.name for model in into.publishers()), None)
    for name, model in into.models.items():
        theirs = other.models.get(name)
        if theirs is None or not publishes(model) or not publishes(theirs):
            continue
        if model.features.names != theirs.features.names:
            raise StateError(f"model {name!r}: {model.features.names} cannot be merged with {theirs.features.names}")
        if name == watched:
            mine = into.replicas.get(name) or _as_replicas(model, engines[0])
            into.replicas[name] = joined(mine, other.replicas.get(name) or _as_replicas(theirs, engines[1]))
        merge(model, theirs, other_is_later=later, side_by_side=side_by_side)
    into.residuals.add(other.residuals)
    into.clock.add(other.clock)
    if into.published is not None and other.published is not None:
        into.published.add(other.published)
    into.champion = ""  # nobody's before, so that neither order gives another one
    into.windows.add(other.windows, other_is_later=later)
    into.history.course.add(other.history.course)
    into.first_ns = min(into.first_ns or other.first_ns, other.first_ns)
    into.last_ns = max(into.last_ns, other.last_ns)


def _as_replicas(model: RlsLearner, engine: str) -> list[Replica]:
    """A state that was not merged before is one replica."""
    replica = replica_of(model, engine)
    return [] if replica is None else [replica]


def succeed_target(new: TargetState, old: TargetState) -> None:
    """A configuration changed: shape factors and course of the new one begin with the old one's."""
    new.history.course.succeed(old.history.course, old.last_ns)
    mine, theirs = new.models.get(SHAPED), old.models.get(SHAPED)
    if mine is not None and theirs is not None and publishes(mine) and publishes(theirs):
        mine.adopt_shapes(theirs)
