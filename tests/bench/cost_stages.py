"""Where a microsecond goes while a steady stream is learned from, stage by stage, beside a parse into dicts.

One process without sockets: exports of five engines go through the pipeline one by one, after 40,000 steps with which
nothing is young any more, and a snapshot is taken every five exports, as it is every five seconds. Each export's time
is the least of several runs, so that a busy machine spoils it less; figures are CPU per step of this thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.config.schema import Config
from collector.join import Described, Event, Joiner, Rows, together
from collector.receive.export_request import Export
from collector.telemetry import Counts
from collector.worker.correlator import TelemetryReader
from online import Bank, RowOutcome, Target
from tests.support.otlp_load import Stream

ENGINES, WARMED, MEASURED, RUNS = 5, 8, 6, 3
STEPS_PER_EXPORT = 1000
LEARNED_MIN = 0.9
"""Of the steps that are measured, rows that are learned meanwhile; those of the last seconds wait for their turn."""
PARSE = "parse, a dict per event"
STAGES = ("decode", "place in windows", "rows", "learn", "snapshot")
DECODE, PLACE, ROWS, LEARN, SNAPSHOT = STAGES


class Sidecar:
    """What the worker's pipeline is made of, called one after the other; CPU of this thread by stage, in seconds."""

    def __init__(self, config: Config) -> None:
        self.spent_s: Counter[str] = Counter()
        self.learned_rows = 0
        self._reader = TelemetryReader(config.dedupe)
        self._joiner = Joiner(config.join)
        self._bank = Bank(config)

    def call(self, stage: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it, and count what it takes for the stage."""
        began_s = time.thread_time()
        answer = function(*arguments)
        self.spent_s[stage] += time.thread_time() - began_s
        return answer

    def process(self, export: Export) -> None:
        """Decode, join and learn."""
        for batch in self.call(DECODE, list, self._reader.read([export], Counts())):
            for _, telemetry in self.call(PLACE, list, together(batch, self._joiner.goes_on)):
                self.call(PLACE, self._joiner.add, telemetry)
            for event in self.call(ROWS, self._joiner.drain):
                self.call(LEARN, self._learn, event)

    def _learn(self, event: Event) -> None:
        match event:
            case Described(config_id, facts, _):
                self._bank.describe(config_id, facts)
            case Rows(config_id, target, rows, engines):
                outcome = self._bank.learn(config_id, target, rows, engines)
                if target is Target.STEP_TIME:
                    self.learned_rows += outcome[RowOutcome.LEARNED]

    def publish(self) -> None:
        """What a generation asks of the learners."""
        self.call(SNAPSHOT, lambda: [self._bank.targets(config_id, exact=False) for config_id in self._bank.configs()])


def measure(config: Config) -> dict[str, float]:
    """CPU us per step of each stage."""
    streams = [Stream(1 + number, instance=f"load-{number}", requests=True) for number in range(ENGINES)]
    rounds = [[stream.export(number) for stream in streams] for number in range(WARMED + MEASURED)]
    exports = [[Export(each.payload, "bench", None, each.spans) for each in one] for one in rounds]
    least: dict[tuple[int, str], float] = {}
    for _ in range(RUNS):
        for place, spent_s in enumerate(_run(config, exports)):
            for stage, seconds in spent_s.items():
                least[place, stage] = min(seconds, least.get((place, stage), seconds))
    total: Counter[str] = Counter()
    for (_, stage), seconds in least.items():
        total[stage] += seconds
    return {stage: total[stage] / (MEASURED * ENGINES * STEPS_PER_EXPORT) * 1e6 for stage in (PARSE, *STAGES)}


def _run(config: Config, exports: list[list[Export]]) -> Iterator[Counter[str]]:
    """What each measured export took, by stage."""
    sidecar = Sidecar(config)
    rows_before = 0
    for number, one in enumerate(exports):
        if number == WARMED:
            rows_before = sidecar.learned_rows
        for export in one:
            sidecar.spent_s.clear()
            sidecar.process(export)
            if export is one[-1]:
                sidecar.publish()
            if number >= WARMED:
                sidecar.call(PARSE, _parse, export.payload)
                yield sidecar.spent_s.copy()
    rows, steps = sidecar.learned_rows - rows_before, MEASURED * ENGINES * STEPS_PER_EXPORT
    if rows < LEARNED_MIN * steps:
        raise RuntimeError(f"{rows} rows learned from {steps} steps: this measures nothing")


def _parse(payload: bytes) -> None:
    for resource in ExportTraceServiceRequest.FromString(payload).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                for event in span.events:
                    {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in event.attributes}
