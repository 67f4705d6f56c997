"""What is made of the newest snapshot, made once and kept until the next.

One maker at a time: whoever else asks meanwhile waits for the result instead of making it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from online import Snapshot

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class PerGeneration(Generic[Key, Made]):
    """Things made of one generation, by key; those of an earlier one are dropped. Keys have to be bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: Snapshot | None = None
        self._made: dict[Key, Made] = {}

    def get(self, source: Callable[[], Snapshot | None], key: Key, make: Callable[[Snapshot | None], Made]) -> Made:
        """What ``make`` makes of the snapshot that ``source`` returns; what it raises, and None, is not kept."""
        with self._lock:
            snapshot = source()
            if snapshot is not self._shown:
                self._shown, self._made = snapshot, {}
            made = self._made.get(key)
            if made is None:
                made = make(snapshot)
                if made is not None:
                    self._made[key] = made
            return made
