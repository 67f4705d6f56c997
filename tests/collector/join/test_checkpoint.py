"""A restart keeps how engines are read and up to when their rows left: nothing is learned twice, little is lost."""

from __future__ import annotations

import functools
import gzip
import json

import msgspec
import pytest

from collector.config.schema import Config
from collector.ingest.queue import Export
from collector.join import CheckpointError, Joiner
from collector.join.events import Rows
from collector.service.pipeline import Correlator
from collector.telemetry import Counts, RowDrop, table
from online import Target
from tests.support.paths import DATA
from tests.support.recordings import recording

SETTINGS = Config()
RECORDINGS = ("c1_mixed", "c3_preempt", "c7_async_sim", "c8_stock_0.32.0", "c9_dp2")


@functools.cache
def exports(name: str) -> tuple[Export, ...]:
    """A recording as it came live: each export with its peer and the time it was received."""
    path = DATA / name / "otlp.pb.gz"
    index = map(json.loads, gzip.decompress(path.with_name("otlp.idx.jsonl.gz").read_bytes()).splitlines())
    return tuple(
        Export(one.payload, one.peer, "grpc", one.spans, arrived_unix_ns=line["recv_unix_ns"])
        for one, line in zip(recording(path), index, strict=True)
    )


class Reader:
    """A process of ours, as far as rows go; it may be killed, and goes on from its last checkpoint and the log."""

    def __init__(self, joiner: Joiner | None = None) -> None:
        self.joiner = joiner or Joiner(SETTINGS)
        self.rows: list[tuple[str, int, int]] = []
        self.counts = Counts()
        self._reader = Correlator(SETTINGS)

    def read(self, some: tuple[Export, ...], *, flush: bool = False) -> None:
        for export in some:
            for recording_name, telemetry in self._reader.read([export], self.counts):
                self.joiner.add(telemetry, recording_name)
            self._drain()
        if flush:
            self._drain(flush=True)

    def _drain(self, *, flush: bool = False) -> None:
        for event in self.joiner.drain(flush=flush):
            if isinstance(event, Rows):
                ends, times = event.rows.end_ns.tolist(), event.rows.elapsed_us.tolist()
                engines = event.rows.engine.tolist()
                self.rows += zip([event.target] * len(ends), engines, ends, times, strict=True)

    def killed_and_started_again(self, so_far: tuple[Export, ...], *, from_the_start: bool = False) -> Reader:
        """The next process: its checkpoint went through a file, and the log is read from where it is needed."""
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(self.joiner.to_checkpoint()))
        after = Reader(Joiner.from_checkpoint(plain, SETTINGS))
        needed_ns = 0 if from_the_start else self.joiner.needed_unix_ns
        if needed_ns is not None:
            after.read(tuple(export for export in so_far if export.arrived_unix_ns >= needed_ns))
        return after

    def ends(self, target: Target) -> set[tuple[int, int]]:
        """Engine and end of each row of a target; none comes twice."""
        ends = [(engine, end_ns) for its, engine, end_ns, _ in self.rows if its is target]
        assert target is Target.PREEMPTION_GAP or len({*ends}) == len(ends)
        return {*ends}


def uncut(name: str) -> Reader:
    reader = Reader()
    reader.read(exports(name), flush=True)
    return reader


@pytest.mark.parametrize("part", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("name", RECORDINGS)
def test_a_restart_emits_no_row_twice_and_loses_hardly_any(name, part):
    whole, before, cut = uncut(name), Reader(), int(part * len(exports(name)))
    before.read(exports(name)[:cut])
    after = before.killed_and_started_again(exports(name)[:cut])
    after.read(exports(name)[cut:], flush=True)
    for target in {row[0] for row in whole.rows}:
        assert not before.ends(target) & after.ends(target), target
        differ = whole.ends(target) ^ (before.ends(target) | after.ends(target))
        assert len(differ) <= 1 + 0.002 * len(whole.ends(target)), target


def test_rows_before_the_mark_are_counted_and_not_made_again_when_the_whole_log_is_read():
    name = "c3_preempt"
    whole, before, cut = uncut(name), Reader(), int(0.8 * len(exports(name)))
    before.read(exports(name)[:cut])
    after = before.killed_and_started_again(exports(name)[:cut], from_the_start=True)
    after.read(exports(name)[cut:], flush=True)
    after.counts.merge(after.joiner.take_counts())
    assert before.rows
    assert not before.ends(Target.STEP_TIME) & after.ends(Target.STEP_TIME)
    assert after.counts[table.DROPPED_ROWS, RowDrop.LEARNED_BEFORE] >= 0.98 * len(before.rows)
    assert len(before.rows) + len(after.rows) >= 0.99 * len(whole.rows)


def test_a_configuration_is_known_at_once_after_a_restart():
    before = Reader()
    before.read(exports("c3_preempt"))
    after = Joiner.from_checkpoint(before.joiner.to_checkpoint(), SETTINGS)
    assert after.config_ids() == before.joiner.config_ids() != []
    (config_id,) = after.config_ids()
    (emitter,) = after.emitters_of(config_id)
    (known,) = before.joiner.emitters_of(config_id)
    assert emitter.facts.known() == known.facts.known()
    assert emitter.snapshot().scheduling == known.snapshot().scheduling == "sync"


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.clear(),
        lambda plain: plain.pop("emitters"),
        lambda plain: plain["emitters"][0].update(kind="unheard_of"),
        lambda plain: plain["emitters"][0]["queueing"].update(wait_us=float("nan")),
        lambda plain: plain["emitters"][0]["calibration"]["sums"].update(blocks=float("inf")),
        lambda plain: plain["emitters"][0]["calibration"].update(emitted_to=-1),
        lambda plain: plain.update(marks=[["a", {"no_target": 1}]]),
    ],
)
def test_what_is_no_checkpoint_is_refused(damage):
    before = Reader()
    before.read(exports("c3_preempt"))
    plain = before.joiner.to_checkpoint()
    damage(plain)
    with pytest.raises(CheckpointError):
        Joiner.from_checkpoint(plain, SETTINGS)
