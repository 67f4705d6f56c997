"""What a published snapshot says that nobody was told yet: one line in the log for each piece of news.

    tiny: steps take 1.42 × as long since 14:03 UTC         WARNING, a change of speed was confirmed
    tiny: not usable: its engines disagree: ...             WARNING, there is a new doubt about a configuration
    tiny: no longer: its engines disagree: ...              INFO, the doubt is gone

A change is new when it began later than the last one that was told, also by the process before: a copy in which what
waits became rows may know of it sooner than the learner itself, and is given up again. Numbers inside of a doubt move
all the time: two doubts that differ in numbers alone are one. What is remembered is of the last snapshot.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

from collector.runtime import TOLD_ONCE
from exporters.wording import name_of, newest_change
from online import ConfigSnapshot, Snapshot

_NUMBER = re.compile(r"\d[\d.,]*")

_log = logging.getLogger(__name__)


@dataclass
class _Told:
    """What was told of one configuration: when its last change of speed began, and its doubts."""

    since_unix_nano: int = 0
    doubts: dict[str, str] = field(default_factory=dict)
    """By their words without numbers."""


class News:
    """Is shown every snapshot that is published, in order; belongs to the thread that publishes."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def skip_changes(self, snapshot: Snapshot) -> None:
        """These changes of speed were told by the process before."""
        self._told = {config.config_id: _Told(_since(config)) for config in snapshot.configs}

    def tell(self, snapshot: Snapshot) -> None:
        """Write a line for everything that is new in this snapshot."""
        before, self._told = self._told, {}
        present = {config.config_id for config in snapshot.configs}
        gone = [told for config_id, told in before.items() if config_id not in present]
        for config in snapshot.configs:
            told = before.get(config.config_id) or _renamed(config, gone)
            self._told[config.config_id] = _tell(config, told, snapshot.created_unix_nano)


def _tell(config: ConfigSnapshot, told: _Told, now_unix_nano: int) -> _Told:
    name, change = name_of(config), newest_change(config)
    if change is not None and change.since_unix_nano > told.since_unix_nano:
        _log.warning("%s: %s", name, change.text(now_unix_nano), extra=TOLD_ONCE)
    doubts = {_NUMBER.sub("#", doubt): doubt for doubt in config.doubts}
    for words, doubt in doubts.items():
        if words not in told.doubts:
            _log.warning("%s: not usable: %s", name, doubt, extra=TOLD_ONCE)
    for words, doubt in told.doubts.items():
        if words not in doubts:
            _log.info("%s: no longer: %s", name, doubt, extra=TOLD_ONCE)
    return _Told(max(_since(config), told.since_unix_nano), doubts)


def _since(config: ConfigSnapshot) -> int:
    change = newest_change(config)
    return 0 if change is None else change.since_unix_nano


def _renamed(config: ConfigSnapshot, gone: list[_Told]) -> _Told:
    """What was told of a configuration under the id it had before: one that is gone and had the same last change."""
    since = _since(config)
    return next((told for told in gone if since and told.since_unix_nano == since), _Told())
