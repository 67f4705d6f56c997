"""What a reader of a target is told, and from what while rows wait for the end of their block.

Reading changes nothing, so they are learned by a copy; the copy, and a block learned for it, cost a reader of every
second more than all else it asks for. A live reader is therefore told without them where they are few: n rows more
move estimates that rest on N by about sqrt(n / (N + n)) of their standard errors, below a half for n <= N / 4.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from online.snapshot import TargetSnapshot

from .target_state import TargetState

LITTLE_SHARE = 1 / 4
"""Of the rows known: the largest block that a live reader may wait for."""
# Derived: from start_rows.
MANY_ROWS = 256
"""With fewer, error bars are no measure yet, and a target that has just begun is told every row of."""
# Guess: a minute.
BEGUN_NS = 60_000_000_000
"""Of event time; what has so few rows by then has them seldom, as requests that meet an idle engine."""


class Told(NamedTuple):
    """What was said of a target, of which so many blocks had been learned while so many rows waited."""

    blocks_learned: int
    waiting_rows: int
    snapshot: TargetSnapshot | None


class Readings:
    """What live readers are told, kept until a block is learned: of a quiet target a generation costs nothing."""

    def __init__(self) -> None:
        self._told: WeakKeyDictionary[TargetState, Told] = WeakKeyDictionary()

    def __deepcopy__(self, _: dict[int, Any]) -> Readings:
        """Of copies nothing has been told yet."""
        return Readings()

    def changing(self, state: TargetState) -> TargetState:
        """Whatever changes a target otherwise than by rows takes it from here: what was told of it holds no longer."""
        self._told.pop(state, None)
        return state

    def snapshot_of(self, state: TargetState, *, exact: bool) -> TargetSnapshot | None:
        """What is published of a target now; None while there is nothing to say."""
        if exact:
            return target_for_reader(state, exact=True).snapshot()
        told = self._told.get(state)
        if told is None or not _holds(told, state):
            snapshot = target_for_reader(state, exact=False).snapshot()
            told = self._told[state] = Told(state.blocks_learned, len(state.cutter), snapshot)
        return told.snapshot


def target_for_reader(state: TargetState, *, exact: bool) -> TargetState:
    """The state itself, or a copy that has learned its partial block: always the latter where ``exact`` is asked."""
    if not exact and _waits_for_little(state):
        return state
    flushed = copy.deepcopy(state)
    flushed.flush()
    # A counter must not fall, and the rest of the block may decide that this part is learned otherwise.
    flushed.residuals = state.residuals
    return flushed


def _holds(told: Told, state: TargetState) -> bool:
    """Whether nothing was learned since that a reader is told of."""
    return told.blocks_learned == state.blocks_learned and (
        told.waiting_rows == len(state.cutter) or _waits_for_little(state)
    )


def _waits_for_little(state: TargetState) -> bool:
    watcher = state.watcher()
    if watcher is None or not watcher.started or watcher.drift.suspects:
        return False
    known_rows = watcher.effective_rows()
    begins = known_rows < MANY_ROWS and state.last_ns - state.first_ns < BEGUN_NS
    return not begins and LITTLE_SHARE * known_rows >= len(state.cutter)
