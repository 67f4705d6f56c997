"""``--json``: one document on standard output, and what was for eyes on standard error."""

from __future__ import annotations

import json

import pytest
import yaml

from collector.cli import main
from online.snapshot import SCHEMA
from tests.support.paths import DATA

RECORDING = DATA / "c7_async_sim" / "otlp.pb.gz"


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A directory with what a replay wrote."""
    directory = tmp_path_factory.mktemp("replayed")
    written = ("--snapshot", str(directory / "replayed.json"), "--state", str(directory / "state.bin"))
    assert main(["replay", str(RECORDING), *written, "--json"]) == 0
    return directory


def said(capsys, *words):
    """The document, and what else was said."""
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_a_checked_configuration_is_the_same_in_both_forms(capsys):
    told, _ = said(capsys, "config", "check", "--json")
    assert main(["config", "check"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == told


def test_a_replay_prints_the_snapshot_that_it_writes(tmp_path, capsys):
    written = tmp_path / "s.json"
    told, for_eyes = said(capsys, "replay", RECORDING, "--snapshot", written, "--json")
    assert told == json.loads(written.read_text())
    assert told["schema"] == SCHEMA
    assert "identified" in for_eyes


def test_a_merge_and_a_pull_print_theirs(replayed, tmp_path, capsys):
    state = replayed / "state.bin"
    merged, _ = said(
        capsys, "lab", "merge", state, "-o", tmp_path / "m.bin", "--snapshot", tmp_path / "m.json", "--json"
    )
    assert merged == json.loads((tmp_path / "m.json").read_text())
    pulled, for_eyes = said(capsys, "fleet", "pull", state, "-o", tmp_path / "fleet", "--json")
    assert pulled == json.loads((tmp_path / "fleet" / "snapshot.json").read_text())
    assert "1 source: 1 merged" in for_eyes


def test_donors_are_told_as_a_document(replayed, capsys):
    told, _ = said(capsys, "lab", "donors", replayed, "--json")
    (donor,) = told["donors"]
    assert donor["rows"] > 100
    assert donor["nearest_other"] is None
    assert told["measure_next"] == []
