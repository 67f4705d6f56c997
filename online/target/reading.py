"""What a reader of a target is told from, while rows wait for the end of their block.

Reading changes nothing, so they are learned by a copy; the copy, and a block learned for it, cost a reader of every
second more than all else it asks for. A live reader is therefore told without them where they are few: n rows more
move estimates that rest on N by about sqrt(n / (N + n)) of their standard errors, below a half for n <= N / 4.
"""

from __future__ import annotations

import copy

from .target_state import TargetState

LITTLE_SHARE = 1 / 4
"""Of the rows known: the largest block that a live reader may wait for."""
MANY_ROWS = 256
"""With fewer, error bars are no measure yet."""


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
