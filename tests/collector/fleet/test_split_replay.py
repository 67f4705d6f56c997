"""``tracefit replay --workers``: engine by engine, and the same bytes whoever learned which."""

from itertools import islice

import pytest

from collector.cli import main
from collector.commands.replay import replay
from collector.fleet import split_replay
from collector.recordings import Recording
from collector.runtime import StartError, SystemClock
from online import Bank, Snapshot
from tests.support.fleets import CONFIG, as_another_engine
from tests.support.otlp_bytes import varint
from tests.support.paths import DATA

RECORDING = DATA / "c10_long" / "otlp.pb.gz"
ENGINES = 3


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Two files, cut by time, in each of which three engines and their API servers have a part."""
    directory = tmp_path_factory.mktemp("recording")
    exports = list(islice(Recording(RECORDING, print).exports(), 24))
    for name, part in (("traces.pb.1", exports[:12]), ("traces.pb", exports[12:])):
        with (directory / name).open("wb") as file:
            for timed in part:
                for number in range(ENGINES):
                    payload = as_another_engine(timed.export.payload, number)
                    file.write(varint(len(payload)) + payload)
    return directory


def split(recording, workers):
    """States of all shares, learned one after the other in this process, merged."""
    said = []
    original = split_replay._run
    split_replay._run = lambda shares: [split_replay.learn_share(share) for share in shares]
    try:
        return split_replay.replay_split([recording], CONFIG, workers, said.append)
    finally:
        split_replay._run = original


@pytest.fixture(scope="module")
def alone(recording):
    return split(recording, 1)


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(recording, alone, workers):
    assert split(recording, workers).state() == alone.state()


def test_every_engine_is_learned_once_and_near_what_one_learner_would_know(recording, alone, tmp_path):
    said = []
    code = replay([recording], tmp_path / "one.json", CONFIG, SystemClock(), say=said.append, note=said.append)
    assert code == 0
    (config,) = Snapshot.from_json((tmp_path / "one.json").read_bytes()).configs
    (config_id,) = alone.configs()
    assert config_id == config.config_id
    steps = [targets["step_time"] for targets in (config.targets, alone.targets(config_id))]
    assert len(alone.lineages[config_id].engines) == ENGINES
    assert len(steps[1].replicas) == ENGINES
    assert steps[1].models["portable"].rows == pytest.approx(steps[0].models["portable"].rows, rel=0.02)
    assert steps[1].mean_us == pytest.approx(steps[0].mean_us, rel=0.02)


def test_an_engine_that_falls_silent_ends_and_one_that_comes_back_goes_on(recording, alone, monkeypatch):
    monkeypatch.setattr(split_replay, "SILENT_WINDOWS", 1e-3)
    often = split(recording, 2)
    (config_id,) = often.configs()
    assert sorted(often.lineages[config_id].engines) == sorted(alone.lineages[config_id].engines)


def test_real_processes_write_what_one_writes(recording, alone, tmp_path, capsys):
    out, state = tmp_path / "out.json", tmp_path / "out.bin"
    config = tmp_path / "config.yaml"
    config.write_text("learners: [rls]\nfeature_sets: [portable]\n")
    arguments = ["replay", str(recording), "--config", str(config), "--snapshot", str(out), "--state", str(state)]
    assert main([*arguments, "--workers", "2"]) == 0
    assert state.read_bytes() == alone.state()
    assert Bank(CONFIG).restore(state.read_bytes()) == []
    assert main(["replay", "-", "--snapshot", str(out), "--workers", "2"]) == 1
    assert "standard input can be read by one only" in capsys.readouterr().err


def test_what_cannot_be_read_is_said_by_whoever_reads_it(tmp_path):
    with pytest.raises(StartError, match="cannot read"):
        split_replay.replay_split([tmp_path / "none.pb"], CONFIG, 1, print)
    (tmp_path / "empty").write_bytes(b"")
    said = []
    assert split_replay.replay_split([tmp_path / "empty"], CONFIG, 1, said.append) is None
    assert len(said) == 1
