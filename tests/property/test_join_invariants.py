"""Invariants 1 to 4 of docs/architecture.md on a recording that is reordered, duplicated, dropped, delayed and cut.

1. received = accepted + skipped, for spans and events; rows have such an equation too.
2. Nothing grows without bound, nothing non-finite comes out.
3. A repeated export changes nothing.
4. Coefficients are a function of the accepted telemetry: not of its order (within 10 s), nor of the pieces.
"""

from __future__ import annotations

import functools
import heapq
import json
import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from collector.config.schema import Config
from collector.decode import Export
from collector.service.pipeline import Pipeline
from collector.telemetry import table
from collector.telemetry.metrics import metric_of
from collector.telemetry.reasons import Skip
from online.bank import Bank
from online.rows import RowOutcome
from tests.support.paths import DATA
from tests.support.pipelines import coefficients
from tests.support.recordings import recording
from tests.support.toy_spans import Piece, export_of, pieces_in

LATE_NS = 10 * 10**9
STEPS_MAX, REQUESTS_MAX = 4096, 400


class SmallJoin(Config, frozen=True, kw_only=True):
    """Bounds that a recording of a few minutes reaches."""

    steps_max = STEPS_MAX
    requests_max = REQUESTS_MAX


def small_pipeline() -> Pipeline:
    return Pipeline(SmallJoin(learners=("rls",)), "0")


@functools.cache
def timeline(name: str) -> tuple[tuple[int, str, Piece], ...]:
    """Spans of a recording with the time each was received."""
    path = DATA / name / "otlp.pb.gz"
    import gzip

    index = gzip.decompress(path.with_name("otlp.idx.jsonl.gz").read_bytes()).splitlines()
    received = [json.loads(line)["recv_unix_ns"] for line in index]
    return tuple(
        (at, peer, piece)
        for at, export in zip(received, recording(path), strict=True)
        for peer, piece in pieces_in([export])
    )


def export(peer: str, group: list[Piece]) -> Export:
    return Export(export_of(group).SerializeToString(), peer, "test", len(group), "recording")


@functools.cache
def reference(name: str, dropped: frozenset[int]) -> tuple[dict, dict]:
    """Coefficients and rows of the recording in order of receipt, one span at a time, without the dropped ones."""
    pipeline = small_pipeline()
    for number, (_, peer, piece) in enumerate(timeline(name)):
        if number not in dropped:
            pipeline.process([export(peer, [piece])])
    pipeline.flush()
    return coefficients(pipeline), rows_of(pipeline.take_counts())


def rows_of(counts):
    """What became of the rows of each target."""
    return {row: count for row, count in counts.items() if metric_of(row) is table.ROWS and count}


class Telling(RuleBasedStateMachine):
    """A recording told in another order and in other pieces."""

    name = "c1_mixed"

    @initialize(share=st.floats(0.2, 0.6))
    def begin(self, share: float) -> None:
        self.pipeline: Pipeline = small_pipeline()
        spans = timeline(self.name)
        self.count = int(share * len(spans))
        # what is not told at all counts as dropped
        self.dropped = set(range(self.count, len(spans)))
        self.waiting = [(spans[number][0], number) for number in range(self.count)]
        heapq.heapify(self.waiting)
        self.delayed: set[int] = set()
        self.told: list[int] = []
        self.sent = self.repeated = self.learned = self.received_rows = 0
        self.watch(self.pipeline._bank)

    def watch(self, bank: Bank) -> None:
        """Count rows on their way into the bank."""
        learn = bank.learn

        def counted(config_id, target, rows, engines=None):
            outcome = learn(config_id, target, rows, engines)
            assert sum(outcome.values()) == len(rows)
            self.received_rows += len(rows)
            self.learned += outcome[RowOutcome.LEARNED]
            return outcome

        bank.learn = counted

    def process(self, numbers: list[int], cut: int) -> None:
        spans = timeline(self.name)
        exports = []
        for start in range(0, len(numbers), cut):
            by_peer: dict[str, list[Piece]] = {}
            for number in numbers[start : start + cut]:
                by_peer.setdefault(spans[number][1], []).append(spans[number][2])
            exports += [export(peer, group) for peer, group in by_peer.items()]
        self.pipeline.process(exports)
        self.sent += len(numbers)

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 60), cut=st.integers(1, 60))
    def tell(self, count: int, cut: int) -> None:
        numbers = [heapq.heappop(self.waiting)[1] for _ in range(min(count, len(self.waiting)))]
        self.process(numbers, cut)
        self.told += numbers

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 20), late=st.floats(0.01, 1.0))
    def delay(self, count: int, late: float) -> None:
        spans, kept = timeline(self.name), []
        for _ in range(min(count, len(self.waiting))):
            at, number = heapq.heappop(self.waiting)
            if number not in self.delayed:
                at = spans[number][0] + int(late * LATE_NS)
                self.delayed.add(number)
            kept.append((at, number))
        for one in kept:
            heapq.heappush(self.waiting, one)

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 4))
    def drop(self, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            self.dropped.add(heapq.heappop(self.waiting)[1])

    @precondition(lambda self: self.told)
    @rule(share=st.floats(0, 1), count=st.integers(1, 30), cut=st.integers(1, 30))
    def repeat(self, share: float, count: int, cut: int) -> None:
        start = int(share * (len(self.told) - 1))
        numbers = self.told[start : start + count]
        before = self.learned
        self.process(numbers, cut)
        self.repeated += len(numbers)
        assert self.learned == before

    @rule()
    def look(self) -> None:
        values = coefficients(self.pipeline)
        assert all(math.isfinite(value) and value >= 0 for value in values.values())

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pipeline"):
            return
        counts = self.pipeline._counts
        assert counts.total(table.DECODED_SPANS) == self.sent
        assert counts[table.DECODED_SPANS, Skip.DUPLICATE] + counts[table.DECODED_SPANS, Skip.LATE] == self.repeated
        assert self.pipeline._counts.total(table.ROWS) == self.received_rows
        assert self.pipeline.learned_rows == self.learned

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "pipeline"):
            return
        joiner = self.pipeline.joiner
        assert sum(pending.requests for pending in joiner.pending()) <= REQUESTS_MAX
        assert len(joiner.api_spans._spans) <= REQUESTS_MAX
        assert sum(len(waiting) for waiting in joiner.api_spans._waiting.values()) <= REQUESTS_MAX
        for engine in joiner.engines.values():
            assert sum(s.window.size for s in engine.processes) <= 2 * STEPS_MAX

    def teardown(self) -> None:
        if not hasattr(self, "pipeline"):
            return
        while self.waiting:
            self.tell(17, 5)
        self.pipeline.flush()
        expected, rows = reference(self.name, frozenset(self.dropped))
        found = coefficients(self.pipeline)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
        assert rows_of(self.pipeline._counts) == rows
        self.books_balance()


class TellingAsynchronous(Telling):
    """The same of an asynchronous engine without API spans."""

    name = "c7_async_sim"


def bounded(machine: type[Telling], examples: int) -> type:
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


TestMixed = bounded(Telling, 12)
TestAsynchronous = bounded(TellingAsynchronous, 3)
