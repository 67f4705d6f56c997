"""Silence ends waiting: what is held of engines that send nothing more is published, and what waits is said.

The join's clock is event time, which stands still when nothing comes. After ``grace_s`` of the process's own clock
without telemetry of an engine that holds something, a copy of its configuration is flushed and published
(settled.py): once per silence, and again, at most every ``grace_s``, while others of its configuration teach on.
A thousand engines are copied in seconds, in which nothing else is learned and others seem silent, too. So silence is
judged as of when the oldest export that still waits had come, and copies take a tenth of the time at most.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from collector.config import JoinConfig
from collector.join import Key, Waiting
from collector.runtime import Clock
from collector.telemetry import Metrics, table

_LOOK_EVERY_NS = 1_000_000_000
_COPY_BUDGET_NS = 250_000_000
"""Configurations are copied one after the other, and no longer than this between two batches."""
_COPY_SHARE = 0.1
"""Of the worker's time that copies of one configuration may take."""
_NAMED_MAX = 3
_SERIES_ENGINES_MAX = 5
_LABEL_CHARS_MAX = 120

_log = logging.getLogger(__name__)


class Settling(Protocol):
    """What the watch needs of the pipeline."""

    def waiting(self) -> list[Waiting]:
        """What each emitter holds that gave no rows yet, also those that hold nothing."""
        ...

    def settle(self, config_id: str, keys: Collection[Key]) -> int:
        """Publish a configuration as if these emitters had ended; rows that this adds."""
        ...


class _Heard(NamedTuple):
    pieces: int
    since_ns: int


class _Taken(NamedTuple):
    """As of when a configuration was copied, for whose silence, what had been heard of all its emitters.

    ``next_ns``: by the clock, when another copy takes no larger a share of the time than it may.
    """

    at_ns: int
    silent: frozenset[tuple[Key, int]]
    heard: int
    next_ns: int = 0


class SilenceWatch:
    """Asked by the worker after every turn.

    Attributes:
        waiting: what waits, and for how many seconds nothing was heard; replaced, never edited.
    """

    def __init__(
        self,
        source: Settling,
        metrics: Metrics,
        clock: Clock,
        settings: JoinConfig,
        unread_ns: Callable[[], int],
    ) -> None:
        """``unread_ns``: how long the oldest export has waited that came and was not read yet."""
        self._source = source
        self._unread_ns = unread_ns
        self._metrics = metrics
        self._clock = clock
        self._grace_ns = int(settings.grace_s * 1e9)
        self._window_ns = int(settings.window_s * 1e9)
        self._looked_ns: int | None = None
        self._due_ns: float = math.inf
        self._heard: dict[Key, _Heard] = {}
        self._taken: dict[str, _Taken] = {}
        self.waiting: tuple[tuple[Waiting, float], ...] = ()

    def tick(self) -> None:
        """Look, at most once a second, and publish what waits in vain."""
        now_ns = self._clock.monotonic_ns()
        if self._looked_ns is not None and now_ns - self._looked_ns < _LOOK_EVERY_NS:
            return
        self._looked_ns = now_ns
        started_ns, now_ns = now_ns, now_ns - self._unread_ns()
        everybody = self._source.waiting()
        self._hear(everybody, now_ns)
        waiting = [one for one in everybody if one.reason is not None]
        self.waiting = tuple((one, self._silence_ns(one, now_ns) / 1e9) for one in waiting)
        self._metrics.replace(table.WAITING, series_of(waiting))
        by_config: dict[str, list[Waiting]] = {}
        for one in everybody:
            by_config.setdefault(one.config_id, []).append(one)
        by_config.pop("", None)
        self._taken = {config_id: taken for config_id, taken in self._taken.items() if config_id in by_config}
        # who was copied waits for those who were not: the time may not be enough for all
        for config_id in sorted(by_config, key=lambda one: self._taken[one].at_ns if one in self._taken else 0):
            self._settle_silent(config_id, by_config[config_id], now_ns)
            if self._clock.monotonic_ns() - started_ns > _COPY_BUDGET_NS:
                break

    def due_in_s(self) -> float:
        """Until the next emitter will have been silent for the grace, if nothing comes of it; inf without any."""
        return max(self._due_ns - self._clock.monotonic_ns(), _LOOK_EVERY_NS) / 1e9

    def _hear(self, everybody: list[Waiting], now_ns: int) -> None:
        """Since when nothing was heard of each emitter."""
        before = self._heard
        self._heard = {
            one.key: before[one.key]
            if one.key in before and before[one.key].pieces == one.heard
            else _Heard(one.heard, now_ns)
            for one in everybody
        }
        ends_ns = (heard.since_ns + self._grace_ns for heard in self._heard.values())
        self._due_ns = min((end_ns for end_ns in ends_ns if end_ns > now_ns), default=math.inf)

    def _silence_ns(self, one: Waiting, now_ns: int) -> int:
        return now_ns - self._heard[one.key].since_ns

    def _settle_silent(self, config_id: str, own: list[Waiting], now_ns: int) -> None:
        """Publish a configuration for which something waits in vain, unless that was done."""
        silent = [one for one in own if self._silence_ns(one, now_ns) >= self._grace_ns]
        waits_in_vain = {one.key for one in silent}
        holding = [one for one in own if one.reason is not None and (one.key in waits_in_vain or one.rows)]
        taken = self._taken.get(config_id)
        if taken is not None and self._clock.monotonic_ns() < taken.next_ns:
            return
        if not silent or not holding:
            self._taken.pop(config_id, None)
            return
        # after the window of event time nobody is waited for: who has gone for good costs no more copies
        waited_for = [one for one in silent if self._silence_ns(one, now_ns) <= self._grace_ns + self._window_ns]
        made = _Taken(now_ns, frozenset((one.key, one.heard) for one in waited_for), sum(one.heard for one in own))
        if taken is not None:
            fell_silent = bool(made.silent - taken.silent)
            others_go_on = bool(made.silent) and made.heard != taken.heard and now_ns - taken.at_ns >= self._grace_ns
            if not (fell_silent or others_go_on):
                return
        started_ns = self._clock.monotonic_ns()
        rows = self._source.settle(config_id, [one.key for one in silent])
        took_ns = self._clock.monotonic_ns() - started_ns
        self._taken[config_id] = made._replace(next_ns=started_ns + int(took_ns / _COPY_SHARE))
        if taken is None:
            names = ", ".join(described(one) for one in holding[:_NAMED_MAX])
            more = f" and {len(holding) - _NAMED_MAX} more" if len(holding) > _NAMED_MAX else ""
            _log.info(
                "engines of which nothing comes: %d; published without waiting: %d rows of %s%s",
                len(silent),
                rows,
                names,
                more,
            )


def series_of(waiting: list[Waiting]) -> dict[tuple[str, ...], float]:
    """What waits of the engines that hold most, as series of the metric."""
    most = sorted(waiting, key=lambda one: -(one.steps + one.requests + one.rows))[:_SERIES_ENGINES_MAX]
    return {
        (one.key[1][:_LABEL_CHARS_MAX], what, str(one.reason)): float(number)
        for one in most
        for what, number in (("steps", one.steps), ("requests", one.requests), ("rows", one.rows))
        if number
    }


def described(waiting: Waiting) -> str:
    """One line on an emitter: who, how much, for what."""
    parts = ((waiting.steps, "steps"), (waiting.requests, "requests"), (waiting.rows, "rows"))
    held = ", ".join(f"{number} {name}" for number, name in parts if number)
    return f"{waiting.key[1]} ({held} wait: {waiting.reason})"
