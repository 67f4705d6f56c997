"""``tracefit merge``: several states in, one out; a bad one is named and nothing is written."""

from pathlib import Path

import pytest

from collector.commands.merge import merge_files
from collector.commands.replay import replay
from collector.config.schema import Config
from collector.runtime.clock import SystemClock
from online.bank import Bank
from tests.support.paths import DATA


def coefficients(state: Path) -> dict[str, dict[str, float]]:
    bank = Bank(Config())
    bank.restore(state.read_bytes())
    return {
        config_id: {f.name: f.coefficient for f in bank.targets(config_id)["step_time"].models["portable"].features}
        for config_id in bank.configs()
    }


def test_states_of_different_configurations_stand_side_by_side(tmp_path):
    states = []
    for capture in ("c1_mixed", "c6_saturated"):
        path, scratch = tmp_path / f"{capture}.bin", tmp_path / f"{capture}.json"
        said = []
        recording = DATA / capture / "otlp.pb.gz"
        assert replay([recording], scratch, Config(), SystemClock(), say=said.append, note=said.append, state=path) == 0
        states.append(path)
    out, said = tmp_path / "fleet.bin", []
    assert merge_files(states, out, Config(), say=said.append, note=said.append) == 0
    apart = coefficients(states[0]) | coefficients(states[1])
    together = coefficients(out)
    assert len(apart) == 2
    assert together.keys() == apart.keys()
    for config_id, found in apart.items():
        assert together[config_id] == pytest.approx(found, rel=1e-9)


def test_a_corrupt_state_is_named_and_nothing_is_written(tmp_path):
    bad = tmp_path / "bad.bin"
    bad.write_bytes(b"tracefit?")
    out, said = tmp_path / "fleet.bin", []
    assert merge_files([bad], out, Config(), say=said.append, note=said.append) == 1
    assert "1" in said[0] or "bad.bin" in said[0]
    assert not out.exists()
