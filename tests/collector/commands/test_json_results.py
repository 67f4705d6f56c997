"""``--json``: one document on standard output, and what was for eyes on standard error."""

from __future__ import annotations

import json

import yaml

from collector.cli import main
from online.snapshot import SCHEMA
from tests.support.paths import DATA

RECORDING = DATA / "c7_async_sim" / "otlp.pb.gz"


def said(capsys, *words):
    """The document, and what else was said."""
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_a_checked_configuration_is_the_same_in_both_forms(capsys):
    told, _ = said(capsys, "config", "check", "--json")
    assert main(["config", "check"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == told


def test_what_writes_files_prints_the_snapshot_of_them(tmp_path, capsys):
    state, merged, fleet = tmp_path / "state.bin", tmp_path / "m.json", tmp_path / "fleet"
    for written, words, eyes in (
        (tmp_path / "s.json", ["replay", RECORDING, "-o", tmp_path / "s.json", "--state", state], "identified"),
        (merged, ["lab", "merge", state, "-o", tmp_path / "m.bin", "--snapshot", merged], ""),
        (fleet / "snapshot.json", ["fleet", "pull", state, "-o", fleet], "1 source: 1 merged"),
    ):
        told, for_eyes = said(capsys, *words, "--json")
        assert told == json.loads(written.read_text())
        assert told["schema"] == SCHEMA
        assert eyes in for_eyes
    told, _ = said(capsys, "lab", "donors", state, "--json")
    (donor,) = told["donors"]
    assert donor["rows"] > 100
    assert (donor["nearest_other"], told["measure_next"]) == (None, [])
