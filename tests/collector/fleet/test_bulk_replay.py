"""``tracefit replay --workers``: cut by engine once, learned engine by engine, the same bytes whoever learned which."""

import io
import os
import signal
import sys
from functools import partial
from itertools import islice

import pytest

from collector.cli import main
from collector.commands.replay import replay
from collector.decode import PartKind, parts_by_emitter
from collector.fleet.bulk import runners as local_runner
from collector.fleet.bulk import shards as split
from collector.fleet.bulk.bulk_replay import WorkDirectory, bank_of, replay_in_bulk
from collector.fleet.bulk.learn import learn_engines
from collector.fleet.bulk.runners import LocalRunner
from collector.fleet.bulk.shards import find_bulk_files, merge_when_due, read_header, read_run
from collector.fleet.fleet_replay import ReplayOptions, replay_fleet
from collector.recordings import Recording
from collector.runtime import StartError, SystemClock
from online import Bank, Snapshot
from tests.support.clocks import FakeClock
from tests.support.fleets import CONFIG, as_another_engine
from tests.support.otlp_bytes import varint
from tests.support.paths import DATA

RECORDING = DATA / "c10_long" / "otlp.pb.gz"
ENGINES = 3


def delimited(payload):
    return varint(len(payload)) + payload


@pytest.fixture(scope="module")
def payloads():
    """Of three engines and their API servers, by engine and in their order."""
    exports = list(islice(Recording(RECORDING, print).exports(), 24))
    return [[as_another_engine(timed.export.payload, number) for timed in exports] for number in range(ENGINES)]


def write_by_time(directory, payloads):
    """Two files, cut by time, in each of which all engines have a part."""
    directory.mkdir(exist_ok=True)
    exports = list(zip(*payloads, strict=True))
    for name, part in (("traces.pb.1", exports[:12]), ("traces.pb", exports[12:])):
        (directory / name).write_bytes(b"".join(delimited(payload) for payloads in part for payload in payloads))
    return directory


@pytest.fixture(scope="module")
def recording(payloads, tmp_path_factory):
    return write_by_time(tmp_path_factory.mktemp("recording"), payloads)


def learned(places, work, workers=1, note=print, runner=None):
    work.mkdir(exist_ok=True)
    files = find_bulk_files([str(place) for place in places])
    runner = runner or LocalRunner(work, workers)
    try:
        replayed = replay_in_bulk(files, CONFIG, runner, work, SystemClock(), note)
        return bank_of(replayed, CONFIG, note)
    finally:
        runner.close()


@pytest.fixture(scope="module")
def alone(recording, tmp_path_factory):
    return learned([recording], tmp_path_factory.mktemp("work"))


def shards_of(places, work):
    (part,) = split.parts_of(find_bulk_files([str(place) for place in places]))
    done = local_runner.split_into(part, work)
    opened = [(shard.bucket, local_runner._opened(shard)) for shard in done.shards]
    return [s for bucket, s in opened if bucket != split.SHARED], [s for bucket, s in opened if bucket == split.SHARED]


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_an_engine_is_learned_as_a_replay_of_its_telemetry_alone_learns_it(
    payloads, tmp_path, monkeypatch, shard_bytes
):
    monkeypatch.setattr(split, "SHARD_BYTES", shard_bytes)
    own, state = tmp_path / "recording", tmp_path / "state.bin"
    write_by_time(own, [payloads[1]])
    assert replay([own], tmp_path / "one.json", CONFIG, SystemClock(), say=print, note=print, state=state) == 0
    write_by_time(own, payloads)
    states = [pipeline.state() for _, pipeline in learn_engines(CONFIG, *shards_of([own], tmp_path))]
    assert state.read_bytes() in states
    assert len(set(states)) == ENGINES


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_an_engine_that_is_behind_the_others_of_its_files_keeps_its_order(payloads, tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(split, "SHARD_BYTES", shard_bytes)
    ahead = [payloads[number][8:] for number in (1, 2)]
    own, _ = shards_of([write_by_time(tmp_path / "recording", [payloads[0][:16], *ahead])], tmp_path)
    runs = [(shard, run) for shard in own for run in read_header(shard()).runs if run.instance == "engine-0"]
    merged = merge_when_due((run.first_unix_nano, read_run(shard, run)) for shard, run in runs)
    parts = [part for payload in payloads[0][:16] for part in parts_by_emitter(payload, "")]
    said = [part.payload for part in parts if part.kind is PartKind.OF_EMITTER]
    assert [timed.export.payload for timed in merged] == said


def coefficients(bank):
    """Whatever the configurations are called: which recording it was is part of that, where no model is known."""
    return [
        (target, [feature.coefficient for feature in learned.models["portable"].features])
        for config_id in bank.configs()
        for target, learned in sorted(bank.targets(config_id).items())
    ]


def killed_once(task, work):
    """As learn_into, of whoever comes second."""
    try:
        (work / "killed").mkdir()
    except FileExistsError:
        return local_runner.learn_into(task, work)
    return os.kill(os.getpid(), signal.SIGKILL)


class KilledRunner(LocalRunner):
    """Its first worker that learns is killed while it does."""

    def learn_buckets(self, tasks):
        yield from self._run(partial(killed_once, work=self._work), tasks)


def killed_always(_task, **_):
    os.kill(os.getpid(), signal.SIGKILL)


class DyingRunner(LocalRunner):
    """Every worker that learns is killed."""

    def learn_buckets(self, tasks):
        yield from self._run(killed_always, tasks)


def test_a_killed_worker_changes_nothing(recording, alone, tmp_path):
    (tmp_path / "work").mkdir()
    bank = learned([recording], tmp_path / "work", runner=KilledRunner(tmp_path / "work", 2))
    assert (tmp_path / "work" / "killed").exists()
    assert bank.state() == alone.state()
    (tmp_path / "work2").mkdir()
    with pytest.raises(StartError, match="killed 3 times"):
        learned([recording], tmp_path / "work2", runner=DyingRunner(tmp_path / "work2", 2))


def test_what_was_stopped_goes_on_where_it_was(recording, alone, tmp_path, monkeypatch):
    said, out, state = [], tmp_path / "out.json", tmp_path / "out.bin"
    run = partial(
        replay, [recording], out, CONFIG, SystemClock(), say=said.append, note=said.append, state=state, workers=1
    )
    original, tasks = local_runner.learn_bucket, []

    def stopped(*arguments):
        tasks.append(1)
        if len(tasks) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(local_runner, "learn_bucket", stopped)
    assert run() == 130
    assert said[-1] == "stopped; the same command goes on from here"
    assert not out.exists()
    monkeypatch.setattr(local_runner, "split", None)
    assert run() == 0
    assert len(tasks) == ENGINES + 1
    assert any(line.startswith("going on with what is done already") for line in said)
    assert state.read_bytes() == alone.state()
    assert not (tmp_path / ".out.json.replay").exists()


def test_real_processes_write_what_one_writes(recording, alone, tmp_path, monkeypatch):
    out, state = tmp_path / "out.json", tmp_path / "out.bin"
    config = tmp_path / "config.yaml"
    config.write_text("learners: [rls]\nfeature_sets: [portable]\n")
    arguments = ["--config", str(config), "--snapshot", str(out), "--state", str(state)]
    assert main(["replay", str(recording), *arguments, "--workers", "2"]) == 0
    assert state.read_bytes() == alone.state()
    assert Bank(CONFIG).restore(state.read_bytes()) == []
    whole = b"".join((recording / name).read_bytes() for name in ("traces.pb.1", "traces.pb"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(whole)))
    assert main(["replay", "-", *arguments, "--workers", "1"]) == 0
    bank = Bank(CONFIG)
    bank.restore(state.read_bytes())
    (config_id,) = bank.configs()
    assert len(bank.lineages[config_id].engines) == ENGINES


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(StartError, match="cannot read"):
        learned([tmp_path / "none.pb"], tmp_path / "work")
    (tmp_path / "empty").write_bytes(b"")
    said = []
    assert learned([tmp_path / "empty"], tmp_path / "work", note=said.append) is None
    assert len(said) == 1


def test_a_fleet_of_recordings_is_written_as_a_pull_writes_it(recording, alone, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("learners: [rls]\nfeature_sets: [portable]\n")
    arguments = ["fleet", "replay", str(recording), "-o", str(tmp_path / "fleet"), "--config", str(config)]
    assert main(arguments) == 0
    assert f"2 files, {ENGINES} engines" in capsys.readouterr().out
    snapshot = Snapshot.from_json((tmp_path / "fleet" / "snapshot.json").read_bytes())
    (config_id,) = alone.configs()
    assert [each.config_id for each in snapshot.configs] == [config_id]
    assert len(snapshot.configs[0].targets["step_time"].replicas) == ENGINES
    assert sorted(path.name for path in (tmp_path / "fleet").iterdir() if path.is_dir()) == ["all", "states"]
    bank = Bank(CONFIG)
    bank.restore((tmp_path / "fleet" / "states" / f"{config_id}.bin").read_bytes())
    assert coefficients(bank) == coefficients(alone)
    options = ReplayOptions((str(recording),), tmp_path / "fleet")
    early = FakeClock(unix_nano=1_000_000_000)  # recordings may be of any time
    assert replay_fleet(options, CONFIG, early, say=print, note=print, stdin=io.BytesIO()) == 0
    assert main([*arguments[:-2], "--profile", "bulk"]) == 0
    snapshot = Snapshot.from_json((tmp_path / "fleet" / "snapshot.json").read_bytes())
    assert all([*target.models] == ["portable"] for target in snapshot.configs[0].targets.values())
    work = WorkDirectory(tmp_path / "fleet" / ".replay", SystemClock(), print)
    work.take([], CONFIG)
    assert main(arguments) == 1  # two fleets write to one directory
    assert "another process uses" in capsys.readouterr().err
    work.release()
    assert main(["fleet", "replay", "-", "-o", str(tmp_path / "other"), "--ray", "auto"]) == 1
    assert "standard input is on this machine alone" in capsys.readouterr().err
    (tmp_path / "empty.pb").touch()
    assert main(["fleet", "replay", str(tmp_path / "empty.pb"), "-o", str(tmp_path / "none")]) == 1
    assert "nothing was learned" in capsys.readouterr().err
    assert not (tmp_path / "none" / "snapshot.json").exists()


@pytest.mark.parametrize(("module", "option"), [("ray", ["--ray", "local"]), ("pyarrow", ["--rows", "rows"])])
def test_what_is_not_installed_is_said_before_anything_is_learned(
    recording, tmp_path, capsys, monkeypatch, module, option
):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["fleet", "replay", str(recording), "-o", str(tmp_path), *option]) == 1
    assert "install tracefit's extra fleet" in capsys.readouterr().err


# --- an export, cut ---------------------------------------------------------------------------------------------------


# --- objects ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory_store():
    import fsspec

    storage = fsspec.filesystem("memory")
    storage.store.clear()
    yield storage
    storage.store.clear()


def test_objects_of_a_store_are_files(recording, alone, memory_store, tmp_path):
    for file in recording.iterdir():
        with memory_store.open(f"/bucket/otlp/{file.name}", "wb") as stream:
            stream.write(file.read_bytes())
    with memory_store.open("/bucket/otlp/.hidden", "wb") as stream:
        stream.write(b"x")
    files = find_bulk_files(["memory://bucket/otlp"])
    assert [file.name for file in files] == ["memory://bucket/otlp/traces.pb", "memory://bucket/otlp/traces.pb.1"]
    assert [file.source for file in files] == ["memory://bucket/otlp/traces.pb"] * 2
    assert len(find_bulk_files(["memory://bucket/otlp/*.1"])) == 1
    assert coefficients(learned(["memory://bucket/otlp"], tmp_path)) == coefficients(alone)
    with pytest.raises(StartError, match="there is no object in it"):
        find_bulk_files(["memory://bucket/none"])
