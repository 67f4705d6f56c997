"""Who is held: a bounded number of emitters, and the living are not pushed out by newcomers.

A newcomer takes a free place, or that of the emitter silent longest if it has been silent for longer than ``window_s``;
else it is refused, telemetry and all, and counted. What was learned of the others is not touched. Silence is measured
by when telemetry came in, whatever times its sender claims; in a replay nobody knows that, and event times tell it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from collector.config import JoinConfig
from collector.decode import Telemetry
from collector.telemetry import Counts, JoinEvent, table

from .emitter import Emitter, Key

_REFUSED_MAX = 1024
"""Names remembered of emitters that found no place."""


class Full(Exception):
    """Every place is taken by an emitter that is alive."""


class Places:
    """Bounded by ``engines_max``."""

    def __init__(self, settings: JoinConfig) -> None:
        self._places_max = settings.engines_max
        self._window_ns = int(settings.window_s * 1e9)
        self._refused: OrderedDict[Key, int] = OrderedDict()

    @property
    def refused(self) -> int:
        """Emitters that found no place lately."""
        return len(self._refused)

    def make_room(
        self,
        emitters: Mapping[Key, Emitter],
        heard_unix_ns: Mapping[Key, int],
        key: Key,
        telemetry: Telemetry,
        counts: Counts,
    ) -> list[Key]:
        """Who has to go so that a newcomer has a place.

        Args:
            emitters: who has one.
            heard_unix_ns: when each of them was heard of last, where that is known.
            key: the newcomer's.
            telemetry: what it said first.
            counts: what became of it is added.

        Raises:
            Full: nobody is gone; the newcomer is counted and remembered as refused.
        """
        gone: list[Key] = []
        if len(emitters) >= self._places_max:
            unix_ns = telemetry.arrived_unix_ns or newest_unix_ns(telemetry)
            heard = {each: heard_unix_ns.get(each) or emitters[each].event_unix_ns for each in emitters}
            gone = self._silent_longest(heard, unix_ns if telemetry.arrived_unix_ns else max(unix_ns, *heard.values()))
            if not gone:
                self._refuse(key, unix_ns)
                counts[table.JOIN_EVENTS, JoinEvent.ENGINE_REFUSED] += 1
                raise Full
        self._refused.pop(key, None)
        counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] += len(gone)
        return gone

    def _refuse(self, key: Key, unix_ns: int) -> None:
        self._refused[key] = unix_ns
        self._refused.move_to_end(key)
        while len(self._refused) > _REFUSED_MAX or next(iter(self._refused.values())) < unix_ns - self._window_ns:
            self._refused.popitem(last=False)

    def _silent_longest(self, heard_unix_ns: Mapping[Key, int], now_unix_ns: int) -> list[Key]:
        """The emitter silent longest, if that is long enough to call it gone."""
        oldest = min(heard_unix_ns, key=lambda key: heard_unix_ns[key])
        return [oldest] if heard_unix_ns[oldest] < now_unix_ns - self._window_ns else []


def newest_unix_ns(telemetry: Telemetry) -> int:
    """The newest event in it."""
    ends = [int(telemetry.steps["unix_ns"].max())] if len(telemetry.steps) else []
    ends += [span.end_unix_ns for span in telemetry.core]
    ends += [span.end_unix_ns for span in telemetry.requests]
    return max(ends, default=0)
