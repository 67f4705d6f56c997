"""The command line as one program: exit codes, options of ``run``, ``--json``, completion; Ctrl-C is no traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import collector.app
import collector.commands.replay
from collector.cli import EPILOG, main
from collector.runtime import filesystem as exits
from online.snapshot import SCHEMA
from tests.support.paths import DATA, DOCS, ROOT
from tests.support.processes import tracefit

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
    assert capsys.readouterr().err == "stopped\n"


def test_a_full_disk_under_the_output_is_one_sentence():
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "collector", "config", "schema"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == exits.EXIT_FAILED
    assert ended.stderr == b"error: cannot write: No space left on device\n"


def test_a_standard_input_that_is_closed_is_needed_by_nobody(tmp_path):
    command = f"{sys.executable} -m collector replay /dev/null -o {tmp_path}/s.json <&-"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: nothing was learned")


def test_a_terminal_without_the_signs_gets_the_numbers():
    done = tracefit("show", DATA / "golden_snapshot.json", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "16,800 +/- 510      us " in done.stdout
    assert "?" not in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tracefit exp", {"export"}),
        ("tracefit export --forma", {"--format"}),
        ("tracefit fleet p", {"pull"}),
        ("tracefit export --format blis-", {"blis-yaml", "blis-flags", "blis-trace"}),
    ],
)
def test_the_shell_is_offered_what_fits(words, expected, monkeypatch, capsys):
    for name, value in (("_TRACEFIT_COMPLETE", "bash_complete"), ("COMP_WORDS", words), ("COMP_CWORD", "-1")):
        monkeypatch.setenv(name, str(len(words.split()) - 1) if name == "COMP_CWORD" else value)
    assert main() == 0
    assert {line.partition(",")[2] for line in capsys.readouterr().out.split()} == expected


@pytest.fixture
def started(monkeypatch):
    """What would have been started."""
    seen = []

    def serve(loaded, _clock, _stop):
        seen.append(loaded)
        return True

    monkeypatch.setattr(collector.app, "run", serve)
    return seen


OPTIONS = ["--listen", "127.0.0.1:5317", "--pages", "[::1]:5464", "--dir", "my: files", "--scrape", "h:8000"]


def test_options_win_over_the_file_and_the_environment(started, monkeypatch, tmp_path):
    file = tmp_path / "tracefit.yaml"
    file.write_text("listen: 127.0.0.1:1\npages: 127.0.0.1:2\ndirectory: d\nscrape: [http://a/metrics]\nitl_ms: [30]")
    monkeypatch.setenv("TRACEFIT_LISTEN", "127.0.0.1:3")
    assert main(["run", "--config", str(file), *OPTIONS]) == 0
    config = started[0].config
    assert (config.listen, config.pages, config.directory) == ("127.0.0.1:5317", "[::1]:5464", "my: files")
    assert (config.scrape, config.itl_ms) == (("http://a/metrics", "h:8000"), (30.0,))


def test_options_hold_where_the_file_is_broken_and_the_process_must_run(started, monkeypatch, tmp_path):
    file = tmp_path / "tracefit.yaml"
    file.write_text("{ not: [yaml")
    monkeypatch.setenv("TRACEFIT_ON_ERROR", "degrade")
    assert main(["run", "--config", str(file), *OPTIONS]) == 0
    assert started[0].config.listen == "127.0.0.1:5317"
    assert "the defaults hold" in str(started[0].fallback)


def test_help_shows_how_a_variable_sets_a_key_and_the_options_of_a_question_under_headings(capsys):
    assert main(["run", "--help"]) == main(["predict", "--help"]) == 0
    text = capsys.readouterr().out
    assert "TRACEFIT_ITL_MS=30 tracefit run" in text
    step, load = text.index("What one step costs:"), text.index("What requests see at a load:")
    assert step < text.index("--prefill") < load < text.index("--concurrency")


def said(capsys, *words):
    """The document, and what else was said."""
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_a_checked_configuration_is_the_same_in_both_forms_with_a_mark_at_what_is_not_the_default(monkeypatch, capsys):
    monkeypatch.setenv("TRACEFIT_SCRAPE", "[h:8000]")
    told, _ = said(capsys, "config", "check", "--profile", "gateway", "--json")
    assert main(["config", "check", "--profile", "gateway"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "#" in line] == ["scrape:  # not the default"]
    assert yaml.safe_load("\n".join(lines)) == told
    assert told["scrape"] == ["h:8000"]


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
