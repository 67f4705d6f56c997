"""``tracefit lab merge``: several states in, one out; a bad one is named and nothing is written."""

from pathlib import Path

import pytest

from collector.fleet.pull import merge_files
from collector.recordings import Recording
from collector.service.pipeline import make_pipeline
from online.bank import Bank
from online.snapshot import Snapshot
from tests.support.command_lines import spoken
from tests.support.fleets import CONFIG, state_of
from tests.support.paths import DATA


def merged(states, out):
    """Exit code and what was said."""
    code, said, noted = spoken(merge_files, states, out, CONFIG)
    return code, said + noted


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """States of one sidecar, in the middle and at the end of a recording; and of another one."""
    directory = tmp_path_factory.mktemp("states")
    pipeline = make_pipeline(CONFIG)
    exports = list(Recording(DATA / "c1_mixed" / "otlp.pb.gz", print).exports())
    for name, part in (("early.bin", exports[:18]), ("late.bin", exports[18:])):
        pipeline.process(part)
        (directory / name).write_bytes(pipeline.state())
    other = make_pipeline(CONFIG)
    other.process(list(Recording(DATA / "c6_saturated" / "otlp.pb.gz", print).exports()))
    (directory / "other.bin").write_bytes(other.state())
    return directory


@pytest.mark.parametrize("states", [("late.bin", "late.bin"), ("early.bin", "late.bin"), ("late.bin", "early.bin")])
def test_a_state_and_itself_or_its_own_past_are_refused_by_name(kept, tmp_path, states):
    code, said = merged([kept / name for name in ("other.bin", *states)], tmp_path / "out.bin")
    assert code == 1
    assert len(said) == 1
    assert f"{kept / states[1]}: engine '87191f17-1456-41d4-ac9a-b27d9e810194'" in said[0]
    assert f"is in {kept / states[0]} too" in said[0]
    assert not (tmp_path / "out.bin").exists()


def test_what_a_merged_state_was_made_of_is_not_merged_into_it_again(kept, tmp_path):
    assert merged([kept / "late.bin", kept / "other.bin"], tmp_path / "fleet.bin")[0] == 0
    code, said = merged([tmp_path / "fleet.bin", kept / "early.bin"], tmp_path / "again.bin")
    assert code == 1
    assert f"is in {tmp_path / 'fleet.bin'} too" in said[0]


def test_a_replica_that_is_slower_is_named_and_in_the_snapshot(tmp_path):
    for name, gain in (("fast", 1.0), ("slow", 1.6)):
        (tmp_path / f"{name}.bin").write_bytes(state_of(name, 3, gain=gain, config_id="0f3c"))
    paths = [tmp_path / "fast.bin", tmp_path / "slow.bin"]
    snapshot = tmp_path / "fleet.json"
    out = tmp_path / "fleet.bin"
    code, _, noted = spoken(merge_files, paths, out, CONFIG, snapshot)
    assert code == 0
    assert noted[0].startswith("warning: 0f3c step_time: engine 'slow' takes 1.6")
    assert noted[1].startswith("warning: 0f3c step_time: engine 'fast' takes 0.62")
    found = Snapshot.from_json(snapshot.read_bytes())
    (known,) = found.configs
    assert [replica.engine for replica in known.targets["step_time"].replicas] == ["slow", "fast"]
    assert known.telemetry == "merged"
    assert found.created_unix_nano > 1_700_000_000_000_000_000


def coefficients(state: Path) -> dict[str, dict[str, float]]:
    bank = Bank(CONFIG)
    bank.restore(state.read_bytes())
    return {
        config_id: {f.name: f.coefficient for f in bank.targets(config_id)["step_time"].models["portable"].features}
        for config_id in bank.configs()
    }


def test_states_of_different_configurations_stand_side_by_side(tmp_path):
    states, out = [tmp_path / "one.bin", tmp_path / "other.bin"], tmp_path / "fleet.bin"
    for number, path in enumerate(states):
        path.write_bytes(state_of(f"engine-{number}", number, config_id=f"config-{number}"))
    assert merged(states, out)[0] == 0
    apart = coefficients(states[0]) | coefficients(states[1])
    together = coefficients(out)
    assert len(apart) == 2
    assert together.keys() == apart.keys()
    for config_id, found in apart.items():
        assert together[config_id] == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"tracefit?", "state.bin: not a state file"), (make_pipeline(CONFIG).state(), "nothing to merge: no row")],
    ids=["corrupt", "nothing learned"],
)
def test_a_state_that_cannot_be_used_is_said_and_nothing_is_written(tmp_path, content, sentence):
    (tmp_path / "state.bin").write_bytes(content)
    code, said = merged([tmp_path / "state.bin"], tmp_path / "fleet.bin")
    assert code == 1
    assert sentence in said[0]
    assert not (tmp_path / "fleet.bin").exists()
