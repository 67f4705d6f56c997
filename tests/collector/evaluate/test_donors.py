"""``lab donors``: states in, how far their configurations are apart, and what to measure next."""

import json

import pytest

from collector.cli import main
from collector.config import Config
from online.bank import Bank
from online.features.systems import PHYSICS
from online.rows import Target
from tests.support.configurations import CONFIGS, rows_of

SETTINGS = Config(learners=("rls",))


def bank_of(name):
    bank = Bank(SETTINGS)
    bank.describe(name, CONFIGS[name] | {"model": name})
    return bank


def test_the_farthest_configuration_is_to_be_measured_next(tmp_path, capsys):
    for seed, name in enumerate(("7b", "70b", "70b-tp8")):
        bank = bank_of(name)
        bank.learn(name, Target.STEP_TIME, rows_of(PHYSICS, name, 60, seed)[0])
        (tmp_path / f"{name}.bin").write_bytes(bank.state())
    (tmp_path / "broken.bin").write_bytes(b"no state")
    assert main(["lab", "donors", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    for text in ("Measure next", "on 8 x "):
        assert text in printed.out
    assert "broken.bin" in printed.err
    assert main(["lab", "donors", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [donor["config_id"] for donor in told["donors"]] == ["70b", "70b-tp8", "7b"]
    assert told["donors"][0]["nearest_other"] < told["donors"][2]["nearest_other"]
    coverages = [each["coverage"] for each in told["measure_next"]]
    assert coverages == sorted(coverages, reverse=True)
    assert coverages[-1] > 0.0


@pytest.mark.parametrize("name", ["broken.bin", "none.bin", "empty"])
def test_donors_in_the_configuration_must_be_states(name, tmp_path, capsys):
    (tmp_path / "broken.bin").write_bytes(b"no")
    (tmp_path / "empty").mkdir()
    (tmp_path / "tracefit.yaml").write_text(f"donors: [{tmp_path / name}]")
    assert main(["config", "check", "--config", str(tmp_path / "tracefit.yaml")]) == 78
    assert "donors[0]" in capsys.readouterr().err
