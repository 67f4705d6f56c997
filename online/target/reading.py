"""What a reader of a target is told, and from what while rows wait for the end of their block.

Reading changes nothing, so they are learned by a copy; the copy, and a block learned for it, cost a reader of every
second more than all else it asks for. A live reader is therefore told without them where they are few: n rows more
move estimates that rest on N by about sqrt(n / (N + n)) of their standard errors, below a half for n <= N / 4.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

from online.snapshot import TargetSnapshot

from .target_state import TargetState

LITTLE_SHARE = 1 / 4
"""Of the rows known: the largest block that a live reader may wait for."""
MANY_ROWS = 256
"""With fewer, error bars are no measure yet."""


class Readings:
    """What live readers are told, kept while nothing comes: of a quiet configuration a generation costs nothing."""

    def __init__(self) -> None:
        self._told: WeakKeyDictionary[TargetState, TargetSnapshot | None] = WeakKeyDictionary()

    def __deepcopy__(self, _: dict[int, Any]) -> Readings:
        """Of copies nothing has been told yet."""
        return Readings()

    def changing(self, state: TargetState) -> TargetState:
        """Whatever is about to change takes the target from here: what was told of it holds no longer."""
        self._told.pop(state, None)
        return state

    def snapshot_of(self, state: TargetState, *, exact: bool) -> TargetSnapshot | None:
        """What is published of a target now; None while there is nothing to say."""
        if exact:
            return target_for_reader(state, exact=True).snapshot()
        if state not in self._told:
            self._told[state] = target_for_reader(state, exact=False).snapshot()
        return self._told[state]


def target_for_reader(state: TargetState, *, exact: bool) -> TargetState:
    """The state itself, or a copy that has learned its partial block: always the latter where ``exact`` is asked."""
    if not exact and _waits_for_little(state):
        return state
    flushed = copy.deepcopy(state)
    flushed.flush()
    # A counter must not fall, and the rest of the block may decide that this part is learned otherwise.
    flushed.residuals = state.residuals
    return flushed


def _waits_for_little(state: TargetState) -> bool:
    watcher = state.watcher()
    if watcher is None or not watcher.started or watcher.members.slow.trial is not None:
        return False
    known_rows = watcher.effective_rows()
    return known_rows >= MANY_ROWS and LITTLE_SHARE * known_rows >= len(state.cutter)
