"""The newest snapshot: what is made of it once and kept, and how the client library sees it.

Whatever predicts asks the client, so that nothing here predicts by sums of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import tracefit
from online import ConfigSnapshot, Snapshot

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


def client_config(config: ConfigSnapshot) -> tracefit.Config:
    """One configuration, by way of the document that the client reads.

    Raises:
        LoadError: the document is not what the client expects.
    """
    document = Snapshot(generation=0, created_unix_nano=0, tracefit_version="", configs=[config])
    try:
        return tracefit.load(document.to_json()).configs[0]
    except UnicodeEncodeError:
        raise tracefit.LoadError(f"a name in configuration {config.config_id} is no text") from None


def index_of(configs: Sequence[ConfigSnapshot], which: str) -> int:
    """Which of them is meant, as ``find_config`` of the client understands it.

    Raises:
        NotFoundError: none is, or several that are alive.
    """
    return tracefit.find_config(
        [(each.config_id, each.config) for each in configs],
        which,
        heard_unix_nano=[each.last_heard_unix_nano for each in configs],
        replaced=[bool(each.replaced_by) for each in configs],
    )


class ClientView:
    """Configurations of the newest snapshot.

    Args:
        source: returns the newest snapshot, or None before the first; what is shown at the moment.
    """

    def __init__(self, source: Callable[[], Snapshot | None]) -> None:
        self.snapshot = source
        self._configs = PerGeneration[str, tracefit.Config]()

    def config(self, snapshot: Snapshot, which: str = "") -> tracefit.Config:
        """The only configuration that is meant, as ``find_config`` of the client understands it.

        Raises:
            NotFoundError: none is, or several that are alive.
            LoadError: the client cannot read it.
        """
        configs = snapshot.configs
        meant = next((each for each in configs if each.config_id == which), None)
        if meant is None:
            meant = configs[index_of(configs, which)]
        return self._configs.get(lambda: snapshot, meant.config_id, lambda _: client_config(meant))
