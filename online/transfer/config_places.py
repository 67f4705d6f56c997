"""Which configurations are learned: a bounded number, and the living are not forgotten for newcomers.

A newcomer takes a free place, or that of the configuration silent longest if it has been silent for an hour of event
time; else its rows are refused, and it is remembered as refused until it finds a place or is silent for as long itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

SILENT_NS = 3_600 * 10**9
REFUSED_MAX = 1024
"""Names remembered of configurations that found no place."""


class Learned(Protocol):
    """What a configuration has learned of one target."""

    last_ns: int
    """Event time of the newest row, 0 before any."""


class ConfigPlaces:
    """Of a bank.

    Attributes:
        evictions: how many lost their place.
        refused: who found no place lately, by the event time of the newest row; the one heard of longest ago first.
    """

    def __init__(self, places_max: int) -> None:
        self._places_max = places_max
        self.evictions = 0
        self.refused: OrderedDict[str, int] = OrderedDict()

    def offer(self, newcomer: str, unix_ns: int, configs: Mapping[str, Mapping[Any, Learned]]) -> str | None:
        """Whose place it takes, itself for a free one; None if there is none.

        ``configs``: those that have places; of one that has only begun nobody knows how long it is silent.
        """
        taken: str | None = newcomer
        if len(configs) >= self._places_max:
            newest_ns = {known: max((one.last_ns for one in own.values()), default=0) for known, own in configs.items()}
            known = {config_id: at_ns for config_id, at_ns in newest_ns.items() if 0 < at_ns < unix_ns - SILENT_NS}
            taken = min(known, key=lambda config_id: known[config_id], default=None)
        if taken is None:
            self._refuse(newcomer, unix_ns)
        else:
            self.refused.pop(newcomer, None)
            self.evictions += taken != newcomer
        return taken

    def _refuse(self, newcomer: str, unix_ns: int) -> None:
        self.refused[newcomer] = max(unix_ns, self.refused.pop(newcomer, 0))
        while len(self.refused) > REFUSED_MAX or next(iter(self.refused.values())) < unix_ns - SILENT_NS:
            self.refused.popitem(last=False)
