"""The command line as one program: exit codes, options of ``run``, ``--json``, completion; Ctrl-C is no traceback."""

import json
import os
import re

import pytest
import yaml

import collector.app
import collector.commands.replay
from collector.cli import EPILOG, main
from collector.runtime import filesystem as exits
from online.snapshot import SCHEMA
from tests.support.paths import DATA, DOCS

RECORDING = DATA / "c1_mixed" / "otlp.pb.gz"


def test_help_and_documents_list_every_exit_code():
    codes = {value for name, value in vars(exits).items() if name.startswith("EXIT_")}
    listed = re.findall(r"^\| (\d+) \|", (DOCS / "runbooks.md").read_text(), re.MULTILINE)
    assert {int(code) for code in listed} == codes
    assert {int(code) for code in re.findall(r"\b(\d+) [a-z]", EPILOG.splitlines()[1])} == codes


def test_ctrl_c_ends_a_command_with_one_word(monkeypatch, capsys, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(collector.commands.replay, "replay", interrupted)
    assert main(["replay", str(RECORDING), "--snapshot", str(tmp_path / "s.json")]) == exits.EXIT_INTERRUPTED
    assert capsys.readouterr().err.split() == ["stopped"]


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Starts with the options and a file of some text: what would have been served."""
    seen, file = [], tmp_path / "tracefit.yaml"
    monkeypatch.setattr(collector.app, "run", lambda loaded, _clock: seen.append(loaded) or True)

    def start(text):
        file.write_text(text)
        assert main(["run", "--config", str(file), *OPTIONS]) == 0
        return seen[0]

    return start


OPTIONS = ["--listen", "127.0.0.1:5317", "--pages", "[::1]:5464", "--dir", "my: files", "--scrape", "h:8000"]


def test_options_win_over_the_file_and_the_environment(started, monkeypatch):
    monkeypatch.setenv("TRACEFIT_LISTEN", "127.0.0.1:3")
    text = "listen: 127.0.0.1:1\npages: 127.0.0.1:2\ndirectory: d\nscrape: [http://a/metrics]\nitl_ms: [30]"
    config, _ = started(text)
    assert (config.listen, config.pages, config.directory) == ("127.0.0.1:5317", "[::1]:5464", "my: files")
    assert (config.scrape, config.itl_ms) == (("http://a/metrics", "h:8000"), (30.0,))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{ not: [yaml", "the defaults hold"), ("scrape_token_file: /nope", "the defaults hold: scrape_token_file")],
)
def test_files_and_pages_are_where_the_options_say_if_the_file_is_broken_and_the_process_must_run(
    started, monkeypatch, text, problem
):
    monkeypatch.setenv("TRACEFIT_ON_ERROR", "degrade")
    config, why = started(text)
    assert (config.listen, config.pages, config.directory) == ("127.0.0.1:4317", "[::1]:5464", "my: files")
    assert problem in why


def said(capsys, *words):
    """The document, and what else was said."""
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_a_checked_configuration_is_the_same_in_both_forms(monkeypatch, capsys):
    monkeypatch.setenv("TRACEFIT_SCRAPE", "[h:8000]")
    told, _ = said(capsys, "config", "check", "--profile", "gateway", "--json")
    assert main(["config", "check", "--profile", "gateway"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == told
    assert main(["config", "check", "--changed"]) == 0
    assert capsys.readouterr().out == "scrape:  # TRACEFIT_SCRAPE\n- h:8000\n"


def test_a_configuration_that_can_be_read_once_is_checked_with_what_sets_its_keys(capfd):
    read, write = os.pipe()
    os.write(write, b"idle_timeout_s: 3\n")
    os.close(write)
    path = f"/dev/fd/{read}"
    assert main(["config", "check", "--changed", "--config", path]) == 0
    os.close(read)
    assert capfd.readouterr().out == f"idle_timeout_s: 3.0  # {path}\n"


def test_what_writes_files_prints_the_snapshot_of_them(tmp_path, capsys):
    state, fleet = tmp_path / "state.bin", tmp_path / "fleet"
    for written, words, eyes in (
        (tmp_path / "s.json", ["replay", RECORDING, "-o", tmp_path / "s.json", "--state", state], "identified"),
        (fleet / "snapshot.json", ["fleet", "pull", state, "-o", fleet], "1 source: 1 merged"),
    ):
        told, for_eyes = said(capsys, *words, "--json")
        assert told == json.loads(written.read_text())
        assert told["schema"] == SCHEMA
        assert eyes in for_eyes
    assert main(["show", str(written), "-o", str(fleet / "shown")]) == 0
    assert "identified" in (fleet / "shown").read_text()
    capsys.readouterr()
    told, _ = said(capsys, "lab", "donors", state, "--json")
    (donor,) = told["donors"]
    assert (donor["nearest_other"], told["measure_next"]) == (None, [])
