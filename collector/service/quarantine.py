"""A configuration whose learner raises is put aside; the others go on.

Its rows are counted as ``quarantined``, its half-updated models are forgotten (absent beats wrong) and stay out of the
saved state, so that a restart begins anew with it. Bounded by the configurations that are held.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from online import Bank, RowBlock, RowOutcome, Target, TargetSnapshot

_log = logging.getLogger(__name__)


class Quarantine:
    """Stands between the pipeline and the bank."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._reasons: dict[str, str] = {}
        self._new = 0

    def __len__(self) -> int:
        """Configurations put aside now."""
        return len(self._reasons)

    def reason(self, config_id: str) -> str:
        """Why a configuration is put aside; empty when it is not."""
        return self._reasons.get(config_id, "")

    def take_new(self) -> int:
        """How many were put aside since the last call."""
        new, self._new = self._new, 0
        return new

    def learn(
        self, config_id: str, target: Target, rows: RowBlock, engines: Mapping[int, str] | None = None
    ) -> Counter[RowOutcome]:
        """Let the bank learn; what became of the rows."""
        if config_id not in self._reasons:
            try:
                return self._bank.learn(config_id, target, rows, engines)
            except Exception as error:  # noqa: BLE001 -- whatever a learner raises
                self._put_aside(config_id, f"{target}: {type(error).__name__}")
        return Counter({RowOutcome.QUARANTINED: len(rows)})

    def targets(self, config_id: str, *, exact: bool) -> dict[str, TargetSnapshot]:
        """What is published of a configuration; nothing when it is put aside."""
        if config_id not in self._reasons:
            try:
                return self._bank.targets(config_id, exact=exact)
            except Exception as error:  # noqa: BLE001 -- whatever a learner raises
                self._put_aside(config_id, f"snapshot: {type(error).__name__}")
        return {}

    def mark_restart(self, config_id: str, unix_ns: int) -> None:
        """Let the bank remember it."""
        if config_id not in self._reasons:
            self._bank.mark_restart(config_id, unix_ns)

    def rename(self, old: str, new: str) -> None:
        """The configuration is known better: another identity, the same trouble."""
        if old in self._reasons:
            self._reasons.setdefault(new, self._reasons.pop(old))

    def retain(self, config_ids: Iterable[str]) -> None:
        """Forget configurations that are no longer held."""
        held = set(config_ids)
        self._reasons = {name: reason for name, reason in self._reasons.items() if name in held}

    def _put_aside(self, config_id: str, reason: str) -> None:
        self._reasons[config_id] = reason
        self._new += 1
        self._bank.drop(config_id)
        _log.exception("configuration %s is put aside: its learner raised", config_id)
