"""What is published of configurations whose engines have fallen silent: as if their telemetry had ended there.

The state waits on, so that what is learned in the end does not depend on when anybody looked; what is published comes
from a copy in which those engines are flushed. It stands until the state has learned as many rows by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from online import HistoryView, TargetSnapshot


class _Settled(NamedTuple):
    targets: dict[str, TargetSnapshot]
    rows: int
    """What the copy learned beyond the state."""
    state_rows: int
    """What the state had learned when it was copied."""
    history: HistoryView | None


class SettledViews:
    """By configuration; the worker's thread alone touches it."""

    def __init__(self) -> None:
        self._views: dict[str, _Settled] = {}
        self._state_rows: Counter[str] = Counter()

    def put(
        self, config_id: str, targets: dict[str, TargetSnapshot], rows: int, history: HistoryView | None = None
    ) -> None:
        """Publish these targets of a configuration, which ``rows`` more than the state's made."""
        self._views[config_id] = _Settled(targets, rows, self._state_rows[config_id], history)

    def targets(self, config_id: str) -> dict[str, TargetSnapshot] | None:
        """What is published instead of the state's; None where there is nothing better."""
        view = self._views.get(config_id)
        return None if view is None else view.targets

    def history(self, config_id: str) -> HistoryView | None:
        """Of the same copy."""
        view = self._views.get(config_id)
        return None if view is None else view.history

    @property
    def rows(self) -> int:
        """Rows that are published and not in the state."""
        return sum(view.rows for view in self._views.values())

    def record(self, config_id: str, rows: int) -> None:
        """The state has learned rows of a configuration."""
        self._state_rows[config_id] += rows
        view = self._views.get(config_id)
        if view is not None and self._state_rows[config_id] >= view.state_rows + view.rows:
            del self._views[config_id]

    def rename(self, old: str, new: str) -> None:
        """The configuration is known better."""
        self._state_rows[new] += self._state_rows.pop(old, 0)
        self._views.pop(old, None)

    def retain(self, config_ids: Collection[str]) -> None:
        """Forget configurations that are no longer held."""
        for config_id in self._state_rows.keys() - set(config_ids):
            del self._state_rows[config_id]
            self._views.pop(config_id, None)

    def clear(self) -> None:
        """What is published is the state's."""
        self._views.clear()
