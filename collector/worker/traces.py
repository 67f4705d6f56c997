"""Which trace told of a drift: the exemplar that leads from a metric to what happened.

A drift is reported for an event time, long after the telemetry came (rows wait for the watermark). Per emitting process
a thinned record of (when a span ended, its trace) is kept; the trace behind a drift is the first whose span ended at or
after that time: the span batch, or the request, that held the row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from online import ConfigSnapshot

SPACING_NS: Final = 1_000_000_000
"""One trace per second of event time is kept."""

TRACES_MAX: Final = 600
"""Per process: ten minutes, three times the join's window."""

PROCESSES_MAX: Final = 128

Traces = dict[tuple[str, str], str]
"""(config_id, target) -> trace id in hex."""


class TraceLog:
    """Belongs to the worker thread; what it publishes is a new dictionary each time."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, deque[tuple[int, bytes]]] = OrderedDict()
        self._found: dict[tuple[str, str], tuple[int, str]] = {}

    def see(self, instance: str, ends: Iterable[tuple[int, bytes]]) -> None:
        """Spans of a process: when each ended (Unix time) and its trace id; an id that is none is left out."""
        log = self._seen.get(instance)
        if log is None:
            log = self._seen[instance] = deque(maxlen=TRACES_MAX)
            if len(self._seen) > PROCESSES_MAX:
                self._seen.popitem(last=False)
        self._seen.move_to_end(instance)
        for end_unix_ns, trace_id in sorted(ends):
            if len(trace_id) == 16 and (not log or end_unix_ns >= log[-1][0] + SPACING_NS):  # noqa: PLR2004 -- W3C
                log.append((end_unix_ns, trace_id))

    def exemplars(self, configs: Iterable[ConfigSnapshot]) -> Traces:
        """The trace behind the newest drift of each target that has had one, as far as it is known."""
        found: dict[tuple[str, str], tuple[int, str]] = {}
        for config in configs:
            for target, snapshot in config.targets.items():
                when_ns = snapshot.drift.last_unix_nano if snapshot.drift is not None else None
                if when_ns is None:
                    continue
                key = (config.config_id, target)
                known = self._found.get(key)
                if known is None or known[0] != when_ns:
                    trace = self._trace_at(when_ns, [engine.instance for engine in config.engines])
                    known = (when_ns, trace) if trace else None
                if known is not None:
                    found[key] = known
        self._found = found
        return {key: trace for key, (_, trace) in found.items()}

    def _trace_at(self, when_ns: int, instances: Iterable[str]) -> str:
        candidates = []
        for instance in instances:
            log = self._seen.get(instance, ())
            place = bisect_left(log, (when_ns, b""))
            if place < len(log):
                candidates.append(log[place])
        return min(candidates)[1].hex() if candidates else ""
