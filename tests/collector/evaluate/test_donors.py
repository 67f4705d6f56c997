"""``lab donors``: states in, what they know together, how far it reaches, and what to measure next."""

import json

import pytest

from collector.cli import main
from collector.config import Config
from collector.evaluate.donors import read_states
from collector.service import state_files
from online.bank import Bank
from online.features.systems import PHYSICS
from online.rows import Target
from tests.support.command_lines import spoken
from tests.support.configurations import CONFIGS, rows_of

SETTINGS = Config(learners=("rls",))


def bank_of(name):
    bank = Bank(SETTINGS)
    bank.describe(name, CONFIGS[name] | {"model": name})
    return bank


def test_states_are_pooled_and_the_farthest_configuration_is_to_be_measured_next(tmp_path, capsys):
    for seed, name in enumerate(("7b", "70b", "70b-tp8")):
        bank = bank_of(name)
        bank.learn(name, Target.STEP_TIME, rows_of(PHYSICS, name, 600, seed)[0])
        (tmp_path / f"{name}.bin").write_bytes(bank.state())
    (tmp_path / "broken.bin").write_bytes(b"no state")
    assert main(["lab", "donors", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    for text in ("physics: 3 donors pooled", "Measure next", "on 8 x "):
        assert text in printed.out
    assert "broken.bin" in printed.err
    assert main(["lab", "donors", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [donor["config_id"] for donor in told["donors"]] == ["70b", "70b-tp8", "7b"]
    assert told["donors"][0]["nearest_other"] < told["donors"][2]["nearest_other"]
    assert told["pooled"]["physics"]["donors"] == 3
    assert all(each["coverage"] > 0.0 for each in told["measure_next"])


def test_nothing_usable_is_a_failure(tmp_path, capsys):
    assert main(["lab", "donors", str(tmp_path)]) == 1
    assert main(["lab", "donors", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_state_and_its_own_past_are_one_donor_and_that_is_said(tmp_path):
    rows, learned = rows_of(PHYSICS, "7b", 900)[0], bank_of("7b")
    for number, part in enumerate((rows.slice(0, 600), rows.slice(600, 900))):
        learned.learn("7b", Target.STEP_TIME, part, engines={int(rows.engine[0]): "pod-1"})
        (tmp_path / f"{number}.bin").write_bytes(learned.state())
    found, _, noted = spoken(read_states, [tmp_path], Bank(SETTINGS))
    assert max(donor.rows for donor in found["7b"][1]) < 650
    assert len(noted) == 1
    assert f"1.bin: engine 'pod-1' of configuration 7b is in {tmp_path / '0.bin'} too" in noted[0]


def test_a_directory_is_all_states_in_it_but_those_that_a_pull_has_pooled_of_others(tmp_path, capsys):
    learned = bank_of("7b")
    learned.learn("7b", Target.STEP_TIME, rows_of(PHYSICS, "7b", 600)[0])
    for folder in ("fleet/states", "fleet/all/states", "fleet/small/states"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "7b.bin").write_bytes(learned.state())
    assert state_files(tmp_path) == [tmp_path / "fleet" / of / "7b.bin" for of in ("small/states", "states")]
    assert state_files(tmp_path / "fleet" / "all") == [tmp_path / "fleet" / "all" / "states" / "7b.bin"]
    (tmp_path / "tracefit.yaml").write_text(f"donors: [{tmp_path}]")
    assert main(["config", "check", "--config", str(tmp_path / "tracefit.yaml")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["broken.bin", "none.bin", "empty"])
def test_donors_in_the_configuration_must_be_states(name, tmp_path, capsys):
    (tmp_path / "broken.bin").write_bytes(b"no")
    (tmp_path / "empty").mkdir()
    (tmp_path / "tracefit.yaml").write_text(f"donors: [{tmp_path / name}]")
    assert main(["config", "check", "--config", str(tmp_path / "tracefit.yaml")]) == 78
    assert "donors[0]" in capsys.readouterr().err
