"""Donors: states in, priors out; coverage and what to measure next on the terminal."""

import json

import numpy as np
import pytest

from collector.cli import main
from collector.config.schema import Config
from collector.evaluate.donors import read_states
from online.bank import Bank
from online.features import build
from online.features.systems import PHYSICS
from online.rows import Target
from tests.support.command_lines import spoken
from tests.support.configurations import CONFIGS, rows_of

STEP = Target.STEP_TIME
SETTINGS = Config(learners=("rls",))


def _state(name, seed=0, n=1200):
    bank = Bank(SETTINGS)
    bank.describe(name, CONFIGS[name] | {"model": name})
    bank.learn(name, STEP, rows_of(PHYSICS, name, n, seed)[0])
    return bank.state()


@pytest.fixture(scope="module")
def states():
    return {name: _state(name, i) for i, name in enumerate(("7b", "70b", "70b-tp8"))}


def _error(bank, name, model, rows):
    features = build(model, STEP, CONFIGS[name])
    found = {f.name: f.coefficient for f in bank.targets(name)["step_time"].models[model].features}
    x = features.evaluate(rows)
    prediction = x @ np.array([found.get(column, 0.0) for column in features.names])
    return float(np.mean(np.abs(prediction / rows.elapsed_us - 1)))


@pytest.mark.parametrize("model", ["physics", "portable"])
def test_a_new_model_starts_from_donors_of_other_models(states, model):
    cold, warm = Bank(SETTINGS), Bank(SETTINGS)
    for data in states.values():
        assert warm.add_donors(data) == 1
    test, _ = rows_of(PHYSICS, "mixtral", 600, seed=21)
    for bank in (cold, warm):
        bank.describe("mixtral", CONFIGS["mixtral"] | {"model": "mixtral"})
        bank.learn("mixtral", STEP, rows_of(PHYSICS, "mixtral", 12, seed=20)[0])
    assert _error(warm, "mixtral", model, test) < _error(cold, "mixtral", model, test) + 0.005
    assert _error(warm, "mixtral", model, test) < (0.08 if model == "physics" else 0.35)


def test_the_command_pools_covers_and_says_what_to_measure_next(states, tmp_path, capsys):
    for name, data in states.items():
        (tmp_path / f"{name}.bin").write_bytes(data)
    (tmp_path / "broken.bin").write_bytes(b"no state")
    assert main(["lab", "donors", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "physics: 3 donors pooled" in printed.out
    assert "Measure next" in printed.out
    assert "broken.bin" in printed.err
    assert "on 8 x " in printed.out
    assert main(["lab", "donors", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [donor["config_id"] for donor in told["donors"]] == ["70b", "70b-tp8", "7b"]
    assert told["pooled"]["physics"]["donors"] == 3
    assert all(each["coverage"] > 0.0 for each in told["measure_next"])


def test_nothing_usable_is_a_failure(tmp_path, capsys):
    assert main(["lab", "donors", str(tmp_path)]) == 1
    assert main(["lab", "donors", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_state_and_its_own_past_are_one_donor_and_that_is_said(tmp_path):
    rows, _ = rows_of(PHYSICS, "7b", 900)
    learned = Bank(SETTINGS)
    learned.describe("7b", CONFIGS["7b"])
    for number, part in enumerate((rows.slice(0, 600), rows.slice(600, 900))):
        learned.learn("7b", STEP, part, engines={int(rows.engine[0]): "pod-1"})
        (tmp_path / f"{number}.bin").write_bytes(learned.state())
    found, _, noted = spoken(read_states, [tmp_path], Bank(SETTINGS))
    assert max(donor.rows for donor in found["7b"][1]) < 650
    assert len(noted) == 1
    assert f"1.bin: engine 'pod-1' of configuration 7b is in {tmp_path / '0.bin'} too" in noted[0]


def test_donors_in_the_configuration_must_be_states(tmp_path, capsys):
    config = tmp_path / "tracefit.yaml"
    broken = tmp_path / "x.bin"
    broken.write_bytes(b"no")
    for path in (broken, tmp_path / "none.bin"):
        config.write_text(f"donors: [{path}]")
        assert main(["config", "check", "--config", str(config)]) == 78
        assert "donors[0]" in capsys.readouterr().err


def test_a_replay_saves_what_donors_read(data_dir, tmp_path, capsys):
    recording = str(data_dir / "c1_mixed" / "otlp.pb.gz")
    state = tmp_path / "c1.bin"
    assert main(["replay", recording, f"--snapshot={tmp_path / 's.json'}", f"--state={state}"]) == 0
    bank = Bank(SETTINGS)
    found = read_states([state], bank)
    (facts, known) = next(iter(found.values()))
    assert facts["recording"] == recording
    assert {donor.features.name for donor in known} == {"portable"}
    capsys.readouterr()
