"""The worker, the publisher and the writer, turn by turn."""

from unittest.mock import Mock

import msgspec
import pytest

from collector.decode import Export
from collector.ingest.queue import ExportQueue
from collector.runtime.tasks import Health
from collector.service import TAKE_BYTES, worker
from collector.service.publish import Publisher, SnapshotWriter
from collector.service.worker import Worker
from collector.telemetry.metrics import Metrics
from collector.telemetry.table import WORKER_FAILED_SPANS, WORKER_LAG, WRITES
from exporters.what_if import Advisory
from tests.support import exporter_cases as cases
from tests.support.clocks import FakeClock, eventually
from tests.support.pipelines import value_of
from tests.support.sidecars import CountingProcessor, NoKeeper, as_json


class House:
    """A worker with everything around it, and a clock that moves by hand."""

    def __init__(self, directory, drain_s=10.0):
        self.clock = FakeClock()
        self.metrics = Metrics()
        around = {"metrics": self.metrics, "health": Health(self.clock)}
        self.processor = CountingProcessor()
        self.queue = ExportQueue(self.clock, capacity_bytes=10 * TAKE_BYTES, wait_s=0)
        self.publisher = Publisher(self.processor, self.metrics, self.clock, 1.0, Advisory().verdict)
        self.deaths = []
        self.worker = Worker(
            *(self.queue, self.processor, self.publisher, NoKeeper()),
            drain_s=drain_s,
            on_death=lambda: self.deaths.append(1),
            **around,
        )
        self.writer = SnapshotWriter(directory, self.publisher, 3600, **around)

    def put(self, spans=1, size_bytes=10):
        assert self.queue.put_nowait(Export(bytes(size_bytes), "peer:1", spans)) is None

    def learn(self):
        """An export's worth, at once."""
        self.put()
        self.worker.step(0)


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def test_queued_exports_are_learned_from_together_and_make_room(house):
    for _ in range(3):
        house.put()
    house.clock.advance(2)
    house.worker.step(0)
    assert ([len(batch) for batch in house.processor.batches], house.queue.in_flight_bytes) == ([3], 0)
    assert value_of(house.metrics, WORKER_LAG) == 2
    house.worker.step(0)
    assert value_of(house.metrics, WORKER_LAG) == 0, "it has caught up"


def test_a_batch_that_fails_is_counted_and_makes_room(house):
    house.processor.error = RuntimeError("boom")
    house.put(spans=7)
    house.worker.step(0)
    assert value_of(house.metrics, WORKER_FAILED_SPANS) == 7
    assert house.queue.in_flight_bytes == 0


def test_a_worker_that_cannot_finish_in_time_says_what_it_has_not_learned_from(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker, "LAST_BATCH_S", 0.05)
    house = House(tmp_path, drain_s=0.05)
    house.processor.gate.clear()
    house.put(spans=3, size_bytes=TAKE_BYTES)
    house.put(spans=4, size_bytes=TAKE_BYTES)
    house.worker.start()
    assert not house.worker.stop()
    assert caplog.messages == [
        "stopped before all was done: 7 spans not learned from, no last checkpoint and generation"
    ]
    house.processor.gate.set()
    assert house.worker._task.join(60)
    assert len(house.processor.batches) == 1, "the rest is left"


def test_a_worker_that_dies_tells_the_process(house, monkeypatch):
    monkeypatch.setattr(house.processor, "process", Mock(side_effect=SystemExit))
    house.put()
    house.worker.start()
    eventually(lambda: house.deaths)
    assert not house.worker.stop()


def test_a_generation_is_made_only_when_something_was_learned_and_not_too_often(house):
    def generation():
        shown = house.publisher.current()
        return shown.generation if shown is not None else 0

    house.publisher.tick()
    assert generation() == 0
    house.learn()
    assert generation() == 1
    house.learn()
    assert generation() == 1, "within the interval"
    house.clock.advance(1)
    house.worker.step(0)
    assert generation() == 2
    house.clock.advance(1)
    house.worker.step(0)
    assert generation() == 2, "nothing new was learned"
    house.processor.engines = 1
    house.publisher.tick()
    assert generation() == 3, "an engine came after the last row of its configuration"


def test_a_snapshot_that_cannot_be_made_is_counted_and_the_old_one_stays(house, monkeypatch):
    house.learn()
    old = house.publisher.current()
    monkeypatch.setattr(house.processor, "snapshot", Mock(side_effect=ValueError("boom")))
    house.clock.advance(5)
    house.learn()
    assert house.publisher.current() is old
    assert value_of(house.metrics, WRITES, "generation", "failed") == 1


SHEET = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}
BLIS = "0f3c52aa9b1e.blis.yaml"


def test_a_generation_is_written_once_with_its_files_for_blis_and_what_fails_is_counted_and_tried_again(
    tmp_path, monkeypatch
):
    house, config = House(tmp_path / "d"), cases.config()
    (tmp_path / "d").mkdir()
    exportable = cases.snapshot(msgspec.structs.replace(config, config=config.config | SHEET), generation=1)
    monkeypatch.setattr(house.processor, "snapshot", lambda *_, **__: exportable)
    house.writer.start()
    assert house.writer.stop()
    assert list((tmp_path / "d").iterdir()) == [], "nothing learned, nothing written"
    house.learn()
    (tmp_path / "d" / BLIS).mkdir()
    assert not house.writer.stop()
    assert value_of(house.metrics, WRITES, "snapshot", "failed") == 1
    assert as_json(tmp_path / "d" / "snapshot.json")["generation"] == 1, "one file keeps no other from being written"
    (tmp_path / "d" / BLIS).rmdir()
    for _ in range(2):
        assert house.writer.stop()
        assert {path.name for path in (tmp_path / "d").iterdir()} == {"snapshot.json", BLIS}
        assert value_of(house.metrics, WRITES, "snapshot", "done") == 1 + 2
