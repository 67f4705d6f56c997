"""What senders say of themselves: what a plugin lost on the way, and a clock that is ahead of ours."""

from __future__ import annotations

import logging
from collections import OrderedDict

from collector.decode import Telemetry
from collector.telemetry import Counts, PluginLoss, table

_PLUGINS_MAX = 1024
_SENDERS_MAX = 64
_AGAIN_NS = 3_600 * 10**9

_log = logging.getLogger(__name__)


class PluginLosses:
    """Counts what producer plugins say they lost, once.

    A plugin says on each step span how much it has lost since it began. What is more than it said before is new; less,
    on a newer span, is a new process, which began at 0. The plugin heard of least lately is forgotten first.
    """

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


class SkewedSenders:
    """Warns of senders whose clocks are ahead of ours: what they send is left out.

    Once an hour of each sender, of a bounded number of senders.
    """

    def __init__(self) -> None:
        self._said: OrderedDict[str, int] = OrderedDict()

    def record(self, telemetry: Telemetry) -> None:
        """Look at what one resource of an export said."""
        now_unix_ns = telemetry.arrived_unix_ns
        if not telemetry.too_new_unix_ns or not now_unix_ns:
            return
        while self._said and next(iter(self._said.values())) <= now_unix_ns - _AGAIN_NS:
            self._said.popitem(last=False)
        if telemetry.instance in self._said or len(self._said) >= _SENDERS_MAX:
            return
        self._said[telemetry.instance] = now_unix_ns
        _log.warning(
            "%r tells of times that lie %.0f s ahead of the clock here; such spans are left out (out_of_range). "
            "Set its clock, or ours",
            telemetry.instance,
            (telemetry.too_new_unix_ns - now_unix_ns) / 1e9,
        )
