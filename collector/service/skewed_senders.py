"""Senders whose clocks are ahead of ours: a warning for each, because what they send is left out."""

from __future__ import annotations

import logging
from collections import OrderedDict

from collector.decode import Telemetry

_SENDERS_MAX = 64
_AGAIN_NS = 3_600 * 10**9

_log = logging.getLogger(__name__)


class SkewedSenders:
    """Says it once an hour of each sender, of a bounded number of senders."""

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
