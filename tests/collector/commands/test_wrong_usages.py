"""Wrong usages of the command line: no traceback, the right exit code, the wrong word named, the near one suggested."""

import os
from pathlib import Path

import pytest

from collector.cli import main

USAGES = Path(__file__).with_name("wrong_usages.txt").read_text(encoding="utf-8").splitlines()
"""What is typed, and in the next line its exit code and the words that have to be said."""
SNAPSHOT, RECORDING = "tests/data/golden_snapshot.json", "tests/data/c8_stock_0.32.0/otlp.pb.gz"
CONFIGS = {
    "directory": "dirctory: /tmp",
    "detector": "detector: cusim",
    "durability": "durability: lok",
    "learners": "learners: [rsl]",
    "itl_ms": "itl_ms: fast",
    "model_config": "model_config: /nowhere",
}


@pytest.fixture
def places(tmp_path):
    junk, empty = tmp_path / "j" / "junk", tmp_path / "empty"
    junk.parent.mkdir()
    junk.write_bytes(b"\x00\xffnothing of ours")
    empty.mkdir()
    published, newer = tmp_path / "published", tmp_path / "newer.json"
    published.mkdir()
    (published / "snapshot.json").write_bytes(Path(SNAPSHOT).read_bytes())
    newer.write_text('{"schema": "tracefit.snapshot/2", "configs": []}')
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    configs = {name: tmp_path / f"{name}.yaml" for name in CONFIGS}
    for name, file in configs.items():
        file.write_text(CONFIGS[name])
    known = {"snapshot": SNAPSHOT, "recording": RECORDING, "tmp": empty, "junk": junk, "stdout": tmp_path / "stdout"}
    return {**known, "published": published, "newer": newer, "pipe": tmp_path / "pipe", **configs}


@pytest.mark.parametrize(("typed", "told"), [*zip(USAGES[::2], USAGES[1::2], strict=True)], ids=USAGES[::2])
def test_a_wrong_usage_ends_with_its_code_and_names_the_word(typed, told, places, capsys):
    code, _, words = told.format(**places).partition(" ")
    ended = main(typed.removeprefix("$ tracefit").format(**places).split())
    printed = capsys.readouterr().err
    assert str(ended) == code, printed
    assert [word for word in ("Traceback", *words.strip().split(" | ")) if word not in printed] == ["Traceback"]


def test_a_wrong_variable_is_named_as_it_was_written(monkeypatch, capsys):
    monkeypatch.setenv("TRACEFIT_JOIN_TIMEOUT", "1")
    assert main(["config", "check"]) == 78
    assert "TRACEFIT_JOIN_TIMEOUT: unknown key; did you mean 'TRACEFIT_JOIN_TIMEOUT_S'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("join_timeout_s", ["journeys", "180.0", "TRACEFIT_JOIN_TIMEOUT_S"]),
        ("log_level", ["info", "Least important"]),
        ("rules[].match", ["pattern"]),
    ],
)
def test_explain_says_what_a_key_means_and_what_holds_without_it(name, words, capsys):
    assert main(["config", "explain", name]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed
