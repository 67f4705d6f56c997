"""Exit codes are the same everywhere, in the code, in --help and in the documents; Ctrl-C is no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import collector.commands.replay
from collector.cli import EPILOG, main
from collector.runtime import filesystem as exits
from tests.support.paths import DATA, DOCS, ROOT


def test_help_and_documents_list_every_exit_code():
    codes = {value for name, value in vars(exits).items() if name.startswith("EXIT_")}
    listed = re.findall(r"^\| (\d+) \|", (DOCS / "runbooks.md").read_text(), re.MULTILINE)
    assert {int(code) for code in listed} == codes
    assert {int(code) for code in re.findall(r"\b(\d+) [a-z]", EPILOG.splitlines()[1])} == codes


def test_ctrl_c_ends_a_command_with_one_word(monkeypatch, capsys, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(collector.commands.replay, "replay", interrupted)
    assert main(["replay", "x.pb.gz", "--snapshot", str(tmp_path / "s.json")]) == exits.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "stopped\n"


def test_a_full_disk_under_the_output_is_one_sentence():
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "collector", "config", "schema"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == exits.EXIT_FAILED
    assert ended.stderr == b"error: cannot write: No space left on device\n"


def test_a_standard_input_that_is_closed_is_needed_by_nobody(tmp_path):
    command = f"{sys.executable} -m collector replay {DATA / 'c8_stock_0.32.0' / 'otlp.pb.gz'} -o {tmp_path}/s.json <&-"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_terminal_without_the_signs_gets_the_numbers():
    command = [sys.executable, "-m", "collector", "show", str(DATA / "golden_snapshot.json")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "16,800 +/- 510      us " in done.stdout
    assert "?" not in done.stdout
