"""What producer plugins say they lost, counted once.

A plugin says on each step span how much it has lost since it began. What is more than it said before is new; less, on a
newer span, is a new process, which began at 0.
"""

from __future__ import annotations

from collections import OrderedDict

from collector.decode import Telemetry
from collector.telemetry import Counts, PluginLoss, table

_PLUGINS_MAX = 1024


class PluginLosses:
    """By the instance that said it; the plugin heard of least lately is forgotten first."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, tuple[int, dict[PluginLoss, int]]] = OrderedDict()

    def record(self, telemetry: Telemetry, counts: Counts) -> None:
        """Count what is new."""
        for end_unix_ns, lost in telemetry.plugin_losses:
            newest_unix_ns, before = self._said.pop(telemetry.instance, (0, {}))
            if end_unix_ns <= newest_unix_ns:
                end_unix_ns, lost = newest_unix_ns, before  # noqa: PLW2901 -- it came late, and says nothing new
            for loss, count in lost.items():
                known = before.get(loss, 0)
                counts[table.PLUGIN_LOST, loss] += count - known if count >= known else count
            self._said[telemetry.instance] = end_unix_ns, lost
            if len(self._said) > _PLUGINS_MAX:
                self._said.popitem(last=False)
