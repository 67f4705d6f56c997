"""``tracefit fleet replay`` without Ray: what is cut and learned, and what is said where the extra is not installed."""

import sys
from itertools import islice

import fsspec
import pytest

from collector.cli import main
from collector.commands.replay import replay
from collector.fleet.replay import SHARED, cut, learn_bucket
from collector.fleet.sources import find_recordings
from collector.recordings import source_of
from collector.runtime import StartError
from tests.support.fleets import CONFIG, as_another_engine
from tests.support.otlp_bytes import varint
from tests.support.paths import DATA
from tests.support.recordings import payloads as recorded

ENGINES = 3


def write_by_time(directory, payloads):
    """Two files, cut by time, in each of which all engines have a part."""
    directory.mkdir(exist_ok=True)
    exports = list(zip(*payloads, strict=True))
    for name, part in (("traces.pb.1", exports[:12]), ("traces.pb", exports[12:])):
        whole = (varint(len(payload)) + payload for payloads in part for payload in payloads)
        (directory / name).write_bytes(b"".join(whole))
    return directory


@pytest.fixture(scope="module")
def payloads():
    """Of three engines and their API servers, by engine and in their order."""
    exports = [*islice(recorded("c10_long"), 24)]
    return [[as_another_engine(export, number) for export in exports] for number in range(ENGINES)]


def learned(places):
    """The states of all engines, by name; everything in this process."""
    *gathered, (buckets, _) = cut(find_recordings([str(place) for place in places]))
    by_bucket = {}
    for bucket, pieces in zip(buckets, gathered, strict=True):
        by_bucket.setdefault(bucket, []).append(pieces)
    shared = by_bucket.pop(SHARED, [])
    found = [each for own in by_bucket.values() for each in learn_bucket(CONFIG, len(own), *own, *shared)]
    return {each.instance: each.state for each in found}


def test_an_engine_is_learned_as_a_replay_of_its_telemetry_alone_learns_it(payloads, tmp_path, monkeypatch):
    monkeypatch.setattr("collector.fleet.replay.BATCH_BYTES", 100_000)  # several batches of each file
    own, state = tmp_path / "recording", tmp_path / "state.bin"
    write_by_time(own, [payloads[1]])
    assert replay([own], tmp_path / "one.json", CONFIG, state=state) == 0
    states = learned([write_by_time(own, payloads)])
    assert states["engine-1"] == state.read_bytes()
    assert len(set(states.values())) == ENGINES


def test_an_engine_that_is_behind_the_others_of_its_files_keeps_its_order(payloads, tmp_path):
    alone = learned([write_by_time(tmp_path / "recording", [payloads[0][:16]])])
    ahead = [payloads[number][8:] for number in (1, 2)]
    together = learned([write_by_time(tmp_path / "recording", [payloads[0][:16], *ahead])])
    assert together["engine-0"] == alone["engine-0"]


def test_what_cannot_be_read_or_learned_without_the_extra_is_said(tmp_path, capsys, monkeypatch):
    for extra, place, sentence in (
        (sys, tmp_path / "none.pb", "none.pb: there is no such file"),
        (None, DATA / "c10_long", "`fleet replay` needs Ray: install tracefit's extra fleet"),
    ):
        monkeypatch.setitem(sys.modules, "ray", extra)
        assert main(["fleet", "replay", str(place), "-o", str(tmp_path / "out")]) == 1
        assert sentence in capsys.readouterr().err


@pytest.fixture
def stored(payloads, tmp_path):
    """Two objects of a store, and one that is hidden; where they are."""
    storage = fsspec.filesystem("memory")
    for file in write_by_time(tmp_path / "recording", payloads[:1]).iterdir():
        storage.pipe(f"/bucket/otlp/{file.name}", file.read_bytes())
    storage.pipe("/bucket/otlp/.hidden", b"x")
    yield "memory:///bucket/otlp"
    storage.store.clear()


def test_objects_of_a_store_are_files(stored):
    files = find_recordings([stored])
    assert files == [f"{stored}/traces.pb", f"{stored}/traces.pb.1"]
    assert [source_of(file) for file in files] == [f"{stored}/traces.pb"] * 2
    assert len(find_recordings([f"{stored}/*.1"])) == 1
    assert list(learned([stored])) == ["engine-0"]
    with pytest.raises(StartError, match="there is no such file or object"):
        find_recordings(["memory://bucket/none"])
