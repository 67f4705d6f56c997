"""Two checkpoints on disk: a bad one costs the work since the one before. One process uses a directory."""

from __future__ import annotations

import errno
import os

import pytest

from collector.cli import main
from collector.runtime.filesystem import StartError, SystemFiles, Volume
from collector.service.checkpoint import LOCK_NAME, NAME, PREVIOUS_NAME, PROGRESS, CheckpointFiles, Directory, Position
from collector.telemetry.reasons import Restored
from online.state import LEARNERS, StateError, encode
from tests.support.clocks import FakeClock

MIB = 1 << 20


def checkpoint(number):
    return encode({PROGRESS: {"newest": number, "generation": number}, LEARNERS: {}})


def load(directory, refuse=()):
    seen = []

    def restore(tree):
        newest = tree[PROGRESS]["newest"]
        if newest in refuse:
            raise StateError("does not fit")
        seen.append(newest)
        return Position(newest, newest), []

    files = CheckpointFiles(directory)
    position, generation = files.load(restore)
    assert (seen or [0]) == [position.newest] == [generation]
    return files, files.restored, seen


@pytest.fixture
def written(tmp_path):
    files = CheckpointFiles(tmp_path)
    files.write(checkpoint(10), Position(10, 10))
    assert files.covered() is None, "one checkpoint alone frees nothing of the log"
    files.write(checkpoint(20), Position(20, 20))
    assert files.covered() == Position(10, 10), "the older one may still be needed"
    return tmp_path


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda _: b"", lambda b: b[:60] + b"?" + b[61:], lambda _: b"x"])
def test_a_corrupt_newest_falls_back_and_is_kept_beside(written, damage):
    path = written / NAME
    bad = damage(path.read_bytes())
    path.write_bytes(bad)
    files, outcome, seen = load(written)
    assert (outcome, seen) == (Restored.PREVIOUS, [10])
    assert NAME in files.problem
    assert (written / f"{NAME}.corrupt").read_bytes() == bad
    files.write(checkpoint(30), Position(30, 30))
    assert load(written)[2] == [30]
    assert (written / f"{NAME}.corrupt").exists(), "kept for inspection"


def test_the_newest_is_read_also_after_a_death_between_the_two_renames(written):
    for outcome in (Restored.NEWEST, Restored.PREVIOUS):
        files, *read = load(written)
        assert (read, files.problem) == ([outcome, [20]], "")
        if outcome is Restored.NEWEST:
            (written / NAME).replace(written / PREVIOUS_NAME)


def test_a_checkpoint_that_does_not_fit_is_like_a_corrupt_one(written):
    assert load(written, refuse=(20,))[1:] == (Restored.PREVIOUS, [10])


def test_both_unusable_is_a_cold_start_and_said_so(written, caplog):
    (written / NAME).write_bytes(b"x")
    (written / PREVIOUS_NAME).write_bytes(b"y")
    files, outcome, _ = load(written)
    assert outcome is Restored.COLD
    assert files.problem.startswith(f"{NAME}: ")
    assert f"; {PREVIOUS_NAME}: " in files.problem
    assert caplog.messages[-1].startswith("cold start")
    assert caplog.messages[-1].endswith(files.problem)


def test_nothing_there_is_an_empty_start_and_no_fault(tmp_path, caplog):
    assert load(tmp_path)[1] is Restored.EMPTY
    assert caplog.text == ""


@pytest.mark.parametrize("call", ["open", "write", "sync", "replace"])
def test_a_write_that_fails_leaves_a_readable_checkpoint(written, call, monkeypatch):
    class Failing(SystemFiles):
        pass

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Failing, call, fail)
    with pytest.raises(OSError, match="No space"):
        CheckpointFiles(written, Failing()).write(checkpoint(30), Position(30, 30))
    assert load(written)[2] == [20]
    CheckpointFiles(written).write(checkpoint(40), Position(40, 40))
    assert load(written)[2] == [40]


def test_the_older_checkpoint_is_removed_only_beside_a_whole_newest_one(written):
    files, *_ = load(written)
    assert files.remove_previous()
    assert not files.remove_previous(), "there is none any more"
    again, outcome, _ = load(written)
    assert outcome is Restored.NEWEST
    again.write(checkpoint(30), Position(30, 30))
    (written / NAME).write_bytes(b"x")
    damaged, outcome, seen = load(written)
    assert (outcome, seen) == (Restored.PREVIOUS, [20])
    assert not damaged.remove_previous()
    assert (written / PREVIOUS_NAME).exists()


def test_check_config_says_what_a_start_here_would_do_and_nothing_where_the_directory_is_not(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TRACEFIT_DURABILITY", "log")
    monkeypatch.setenv("TRACEFIT_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(SystemFiles, "volume", lambda *_: Volume(64 * MIB, 64 * MIB))
    assert main(["config", "check"]) == 0
    said = capsys.readouterr()
    assert "warning: the log has 16 MiB instead of 256 (log_capacity_mib)" in said.err
    assert "warning" not in said.out
    monkeypatch.undo()
    monkeypatch.setenv("TRACEFIT_DURABILITY", "log")
    monkeypatch.setenv("TRACEFIT_DIRECTORY", str(tmp_path / "elsewhere"))
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().err == ""


# --- the directory --------------------------------------------------------------------------------------------------


def taken(path):
    directory = Directory(path, FakeClock())
    directory.take()
    return directory


def test_the_second_process_is_told_who_has_the_directory(tmp_path):
    first = taken(tmp_path / "made")
    first.note(spans=3)
    with pytest.raises(StartError, match=rf"another process uses .*made: process {os.getpid()} on .*, since .* UTC$"):
        taken(tmp_path / "made")
    first.release()
    taken(tmp_path / "made").release()


def test_a_process_that_stopped_in_order_is_not_taken_for_a_killed_one(tmp_path):
    first = taken(tmp_path)
    assert first.killed == "", "there was none"
    first.note(spans=7, rows=5)
    first.note(spans=1234567, rows=12)
    first.note(spans=3, rows=2)
    first.release()
    second = taken(tmp_path)
    assert (second.killed, second.unsaved) == ("", {})
    second.note(spans=3, rows=2)
    os.close(second._descriptor)  # as the kernel does when it is killed
    third = taken(tmp_path)
    assert third.killed.startswith(f"process {os.getpid()} on ")
    assert third.unsaved == {"spans": 3, "rows": 2}


def test_what_a_killed_process_left_half_written_goes_and_nothing_else(tmp_path):
    left = [".snapshot.json.tmp.123", ".0123456789ab.blis.yaml.tmp.7", ".state.bin.tmp", "..snapshot.json.probe.tmp.9"]
    kept = ["snapshot.json", ".mine.tmp.5", "notes.tmp", "state.bin", "0123456789ab.blis.yaml", ".snapshot.json"]
    for name in left + kept:
        (tmp_path / name).write_text("x")
    directory = taken(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, LOCK_NAME])
    directory.release()


def test_a_directory_that_cannot_be_written_to_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"cannot write to directory .*file"):
        taken(tmp_path / "file")
