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
        self._spans: OrderedDict[str, deque[tuple[int, bytes]]] = OrderedDict()
        self._known: dict[tuple[str, str], tuple[int, str]] = {}

    def record(self, instance: str, ends: Iterable[tuple[int, bytes]]) -> None:
        """Record spans of a process: when each ended (Unix time) and its trace id; malformed ids are left out."""
        log = self._spans.get(instance)
        if log is None:
            log = self._spans[instance] = deque(maxlen=TRACES_MAX)
            if len(self._spans) > PROCESSES_MAX:
                self._spans.popitem(last=False)
        self._spans.move_to_end(instance)
        for end_unix_ns, trace_id in sorted(ends):
            if len(trace_id) == 16 and (not log or end_unix_ns >= log[-1][0] + SPACING_NS):  # noqa: PLR2004 -- W3C
                log.append((end_unix_ns, trace_id))

    def exemplars(self, configs: Iterable[ConfigSnapshot]) -> Traces:
        """The trace behind the newest drift of each target that has had one, as far as it is known."""
        known: dict[tuple[str, str], tuple[int, str]] = {}
        for config in configs:
            for target, snapshot in config.targets.items():
                when_ns = snapshot.drift.last_unix_nano if snapshot.drift is not None else None
                if when_ns is None:
                    continue
                key = (config.config_id, target)
                exemplar = self._known.get(key)
                if exemplar is None or exemplar[0] != when_ns:
                    trace = self._trace_at(when_ns, [engine.instance for engine in config.engines])
                    exemplar = (when_ns, trace) if trace else None
                if exemplar is not None:
                    known[key] = exemplar
        self._known = known
        return {key: trace for key, (_, trace) in known.items()}

    def _trace_at(self, when_ns: int, instances: Iterable[str]) -> str:
        candidates = []
        for instance in instances:
            log = self._spans.get(instance, ())
            place = bisect_left(log, (when_ns, b""))
            if place < len(log):
                candidates.append(log[place])
        return min(candidates)[1].hex() if candidates else ""
