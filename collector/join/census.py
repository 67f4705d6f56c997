"""Everybody who is held, by configuration, and what is asked of all of them at every drain, as columns.

A gateway holds a thousand emitters and an export comes from one of them: only who was heard of is looked at again. A
census is made anew when somebody comes, goes, or is known better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from collector.config import JoinConfig
from online import Ints, Quality

from .emitter import Emitter, Key, by_config, key_of

_TURN_NS, _LONG_TURN_NS = 1_000_000_000, 4_000_000_000
"""Rows of several engines leave by the second, of many by four: every piece of an engine's rows has its cost."""
_MANY = 100


class Census:
    """Of one moment; :meth:`refresh` keeps its columns up to date.

    Attributes:
        by_config: emitters by configuration, in order of appearance.
    """

    def __init__(self, emitters: Mapping[Key, Emitter], config_ids: Mapping[Key, str]) -> None:
        self.by_config = by_config(emitters, config_ids)
        self._place = {key: place for place, key in enumerate(emitters)}
        self._places = {
            config_id: np.array([self._place[key_of(emitter)] for emitter in own])
            for config_id, own in self.by_config.items()
        }
        self._event_unix_ns, self._safe_unix_ns, self._open_requests = np.zeros((3, len(emitters)), np.int64)
        self._told: dict[Key, tuple[Quality, int]] = {}
        for emitter in emitters.values():
            self.refresh(emitter)

    def refresh(self, emitter: Emitter) -> bool:
        """Look at one of them again; whether its facts or the quality of its telemetry have changed."""
        key = key_of(emitter)
        place = self._place[key]
        self._event_unix_ns[place] = emitter.event_unix_ns
        self._safe_unix_ns[place] = emitter.safe_unix_ns
        self._open_requests[place] = emitter.open_requests
        told = emitter.quality, emitter.facts.version
        if self._told.get(key) == told:
            return False
        self._told[key] = told
        return True

    def horizon(self, config_id: str, settings: JoinConfig) -> int:
        """Until when (wall clock ns) the rows of a configuration are all here; see :func:`horizon`."""
        places = self._places[config_id]
        until_unix_ns = horizon(self._event_unix_ns[places], self._safe_unix_ns[places], settings)
        if len(places) == 1:
            return until_unix_ns
        turn_ns = _TURN_NS if len(places) < _MANY else _LONG_TURN_NS
        return until_unix_ns // turn_ns * turn_ns

    @property
    def open_requests(self) -> int:
        """Finished requests that have given no rows yet, of all emitters."""
        return int(self._open_requests.sum())

    @property
    def behind_s(self) -> float:
        """How far the emitter furthest behind is behind its newest event, seconds."""
        return float((self._event_unix_ns - self._safe_unix_ns).max(initial=0)) / 1e9


def engine_configs_of(engines: Iterable[Key], config_ids: Mapping[Key, str]) -> dict[str, set[str]]:
    """Configurations of engines, by recording."""
    configs: dict[str, set[str]] = {}
    for key in engines:
        configs.setdefault(key[0], set()).add(config_ids[key])
    return configs


def horizon(event_unix_ns: Ints, safe_unix_ns: Ints, settings: JoinConfig) -> int:
    """Until when (wall clock ns) the rows of these emitters (n,) are all here.

    Always ``grace_s`` behind the newest event: by then an engine not heard of before would have spoken. An engine
    silent for ``window_s`` is not waited for.
    """
    newest = int(event_unix_ns.max())
    grace = newest - int(settings.grace_s * 1e9)
    if len(event_unix_ns) == 1:
        return grace
    speaking = event_unix_ns >= newest - int(settings.window_s * 1e9)
    return min(grace, int(safe_unix_ns[speaking].min()))
