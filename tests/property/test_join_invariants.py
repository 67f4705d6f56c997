"""Invariants 1 to 4 of docs/architecture.md on a recording that is reordered, duplicated, dropped, delayed and cut.

1. received = accepted + skipped, for spans and events; rows have such an equation too.
2. Nothing grows without bound, nothing non-finite comes out.
3. A repeated export changes nothing.
4. Coefficients are a function of the accepted telemetry: not of its order (within 10 s), nor of the pieces.
"""

import functools
import math
import random

import pytest

from collector.config.schema import Config
from collector.decode import Export
from collector.service.pipeline import Pipeline
from collector.telemetry import table
from collector.telemetry.reasons import Skip
from online.rows import RowOutcome
from tests.support.paths import DATA
from tests.support.pipelines import coefficients, total_of
from tests.support.recordings import received, recording
from tests.support.toy_spans import Piece, export_of, pieces_in

LATE_NS = 10 * 10**9
STEPS_MAX, REQUESTS_MAX = 4096, 400


class SmallJoin(Config, frozen=True, kw_only=True):
    """Bounds that a recording of a few minutes reaches."""

    steps_max = STEPS_MAX
    requests_max = REQUESTS_MAX


@functools.cache
def timeline(name: str) -> list[tuple[int, str, Piece]]:
    """Spans of a recording with the time each was received."""
    path = DATA / name / "otlp.pb.gz"
    told = zip((line["recv_unix_ns"] for line in received(path)), recording(path), strict=True)
    return [(at, peer, piece) for at, export in told for peer, piece in pieces_in([export])]


class Told:
    """A pipeline that is told of spans, and its books."""

    def __init__(self) -> None:
        self.pipeline = Pipeline(SmallJoin(learners=("rls",)))
        self.received = 0
        self._learn, self.pipeline._bank.learn = self.pipeline._bank.learn, self._counted

    def _counted(self, config_id, target, rows, engines=None):
        outcome = self._learn(config_id, target, rows, engines)
        assert outcome.total() == len(rows)
        self.received += len(rows)
        return outcome

    def tell(self, spans: list[tuple[int, str, Piece]], cut: int) -> None:
        """In one turn, in exports of at most so many spans of a peer."""
        exports = []
        for start in range(0, len(spans), cut):
            of_peer: dict[str, list[Piece]] = {}
            for _, peer, piece in spans[start : start + cut]:
                of_peer.setdefault(peer, []).append(piece)
            exports += [
                Export(export_of(group).SerializeToString(), peer, len(group), "recording")
                for peer, group in of_peer.items()
            ]
        self.pipeline.process(exports)

    def assert_sound(self, sent: int, repeated: int) -> None:
        counts, joiner = self.pipeline._counts, self.pipeline.joiner
        assert total_of(counts, table.DECODED_SPANS) == sent
        assert counts[table.DECODED_SPANS, Skip.DUPLICATE] + counts[table.DECODED_SPANS, Skip.LATE] == repeated
        learned = sum(count for row, count in self.rows().items() if row[-1] is RowOutcome.LEARNED)
        assert (total_of(counts, table.ROWS), learned) == (self.received, self.pipeline.learned_rows)
        assert joiner.pending().requests <= REQUESTS_MAX
        assert len(joiner.api_spans._spans) <= REQUESTS_MAX
        assert sum(map(len, joiner.api_spans._waiting.values())) <= REQUESTS_MAX
        for engine in joiner.engines.values():
            assert sum(process.window.size for process in engine.processes) <= 2 * STEPS_MAX

    def rows(self):
        """What became of the rows of each target."""
        counts = self.pipeline._counts
        return {row: count for row, count in counts.items() if row[0] is table.ROWS and count}


@pytest.mark.parametrize(
    ("name", "seed"), [*(("c1_mixed", seed) for seed in range(6)), *(("c7_async_sim", seed) for seed in range(3))]
)
def test_neither_order_nor_pieces_nor_repeats_change_what_is_learned_and_the_books_balance(name, seed):
    """Mixed traffic; and an asynchronous engine without API spans."""
    draw, spans = random.Random(seed), timeline(name)
    kept = [one for one in spans[: int(draw.uniform(0.3, 1.0) * len(spans))] if draw.random() > 0.03]
    late_ns = [draw.uniform(0.01, 1.0) * LATE_NS * (draw.random() < 0.2) for _ in kept]
    mixed = [kept[n] for n in sorted(range(len(kept)), key=lambda n: kept[n][0] + late_ns[n])]
    straight, told, at, repeated = Told(), Told(), 0, 0
    for one in kept:
        straight.tell([one], 1)
    while at < len(mixed):
        at, begin = at + draw.randint(1, 40), at
        told.tell(mixed[begin:at], draw.randint(1, 60))
        if draw.random() < 0.5:
            before, begin = told.pipeline.learned_rows, draw.randrange(min(at, len(mixed)))
            again = mixed[begin : min(at, begin + draw.randint(1, 30))]
            told.tell(again, draw.randint(1, 30))
            repeated += len(again)
            assert told.pipeline.learned_rows == before
        told.assert_sound(min(at, len(mixed)) + repeated, repeated)
        assert all(math.isfinite(value) and value >= 0 for value in coefficients(told.pipeline).values())
    assert repeated > 0
    for each in (straight, told):
        each.pipeline.flush()
    found, expected = coefficients(told.pipeline), coefficients(straight.pipeline)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert told.rows() == straight.rows()
