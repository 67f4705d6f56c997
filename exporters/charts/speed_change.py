"""A confirmed change of speed in the words that the log, the status page and ``tracefit doctor`` share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from exporters.labels import MAX_LABEL_CHARS, printable
from online import ConfigSnapshot

IS_NEWS_NS = 86_400_000_000_000
"""The page and ``doctor`` tell a change for a day: so far back reach the page's own charts, which show it."""


class SpeedChange(NamedTuple):
    """The newest change of the steps of a configuration: new time per old time, and the event time it began at.

    ``of_prefill``: steps with prefill alone changed.
    """

    factor: float
    since_unix_nano: int
    of_prefill: bool = False

    def is_news(self, now_unix_nano: int) -> bool:
        """Whether a person who looks now may not have heard of it."""
        return now_unix_nano - self.since_unix_nano < IS_NEWS_NS

    def text(self, now_unix_nano: int) -> str:
        """``steps take 1.42 × as long since 14:03 UTC``, with the date where that is not today's."""
        since, now = _utc(self.since_unix_nano), _utc(now_unix_nano)
        change = f"steps {'with prefill ' * self.of_prefill}take {self.factor:.2f} × as long"
        if since is None:
            return change
        day = "" if now is not None and since.date() == now.date() else f"{since:%Y-%m-%d} "
        return f"{change} since {day}{since:%H:%M} UTC"


def newest_change(config: ConfigSnapshot) -> SpeedChange | None:
    """The newest confirmed change of speed of a configuration's steps; None without any."""
    step = config.targets.get("step_time")
    drift = None if step is None else step.drift
    if drift is None or drift.last_unix_nano is None or drift.gain is None:
        return None
    return SpeedChange(drift.gain, drift.last_unix_nano, drift.of_prefill)


def name_of(config: ConfigSnapshot) -> str:
    """The name of its model, else its id; on one line, whatever telemetry said."""
    return printable(str(config.config.get("model") or config.config_id), MAX_LABEL_CHARS)


def _utc(unix_nano: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(unix_nano // 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
