"""Two checkpoints on disk: a bad one costs the work since the one before. One process uses a directory."""

import errno
import os
from unittest.mock import Mock

import pytest

from collector.config import ConfigError
from collector.runtime.filesystem import StartError, SystemFiles
from collector.service.checkpoint import LOCK_NAME, NAME, PREVIOUS_NAME, PROGRESS, CheckpointFiles, Directory, Position
from collector.telemetry.reasons import Restored
from online.state import LEARNERS, StateError, encode
from tests.support.clocks import FakeClock


def checkpoint(number):
    return encode({PROGRESS: {"newest": number}, LEARNERS: {}})


def load(directory, *, refuse=0):
    """The files as a start finds them, with what it began; a checkpoint of a number may be refused."""

    def restore(tree):
        newest = tree[PROGRESS]["newest"]
        if newest == refuse:
            raise StateError("does not fit")
        return Position(newest, newest), []

    files = CheckpointFiles(directory)
    newest = files.load(restore).newest
    return files, files.restored, newest


@pytest.fixture
def written(tmp_path):
    files = CheckpointFiles(tmp_path)
    files.write(checkpoint(10), Position(10, 10))
    assert files.covered() is None, "one checkpoint alone frees nothing of the log"
    files.write(checkpoint(20), Position(20, 20))
    assert files.covered() == Position(10, 10), "the older one may still be needed"
    return tmp_path


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda _: b"", lambda b: b[:60] + b"?" + b[61:], lambda b: b])
def test_a_corrupt_newest_falls_back_and_is_kept_beside(written, damage):
    """One that does not fit, too."""
    path = written / NAME
    bad = damage(path.read_bytes())
    path.write_bytes(bad)
    files, *read = load(written, refuse=20)
    assert read == [Restored.PREVIOUS, 10]
    assert NAME in files.problem
    assert (written / f"{NAME}.corrupt").read_bytes() == bad
    files.write(checkpoint(30), Position(30, 30))
    assert load(written)[2] == 30
    assert (written / f"{NAME}.corrupt").exists(), "kept for inspection"


def test_a_named_pipe_in_the_place_of_a_checkpoint_is_put_aside_and_hangs_no_start(written):
    (written / NAME).unlink()
    os.mkfifo(written / NAME)
    files, *read = load(written)
    assert (read, files.problem) == ([Restored.PREVIOUS, 10], f"{NAME}: is a named pipe")
    assert (written / f"{NAME}.corrupt").is_fifo()


def test_the_newest_is_read_also_after_a_death_between_the_two_renames(written):
    for outcome in (Restored.NEWEST, Restored.PREVIOUS):
        files, *read = load(written)
        assert (read, files.problem) == ([outcome, 20], "")
        if outcome is Restored.NEWEST:
            (written / NAME).replace(written / PREVIOUS_NAME)


@pytest.mark.parametrize("call", ["open", "write", "sync", "replace"])
def test_a_write_that_fails_leaves_a_readable_checkpoint(written, call):
    failing = SystemFiles()
    setattr(failing, call, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        CheckpointFiles(written, failing).write(checkpoint(30), Position(30, 30))
    assert load(written)[2] == 20
    CheckpointFiles(written).write(checkpoint(40), Position(40, 40))
    assert load(written)[2] == 40


def test_the_older_checkpoint_is_removed_only_beside_a_whole_newest_one(written):
    (written / NAME).write_bytes(b"x")
    damaged, *read = load(written)
    assert (read, damaged.remove_previous()) == ([Restored.PREVIOUS, 10], False)
    damaged.write(checkpoint(30), Position(30, 30))
    files, *_ = load(written)
    assert files.remove_previous()
    assert not files.remove_previous(), "there is none any more"
    assert load(written)[1:] == (Restored.NEWEST, 30)


# --- the directory --------------------------------------------------------------------------------------------------


def test_the_next_process_reads_the_last_note_of_a_killed_one_although_an_earlier_one_was_longer(tmp_path):
    killed, after = Directory(tmp_path / "killed", FakeClock()), Directory(tmp_path / "after", FakeClock())
    killed.take()
    for spans in (10**9, 7):
        killed.note(spans=spans)
    (tmp_path / "after").mkdir()
    (tmp_path / "after" / LOCK_NAME).write_bytes((tmp_path / "killed" / LOCK_NAME).read_bytes())
    after.take()
    assert (after.killed.split()[:2], after.unsaved) == (["process", str(os.getpid())], {"spans": 7})
    for directory in (killed, after):
        directory.release()
    after.take()
    assert (after.killed, after.unsaved) == ("", {"spans": 7}), "the one before stopped in order"


@pytest.mark.parametrize(
    ("path", "error", "sentence"),
    [
        ("file", ConfigError, "OUT: .*/file is a file, and a directory is wanted"),
        ("file/below", StartError, "cannot write to OUT .*/file/below: Not a directory"),
        ("x" * 300, StartError, "cannot write to OUT .*/x+: File name too long"),
        ("piped", StartError, "cannot write to OUT .*/piped: tracefit.lock is no file"),
    ],
)
def test_a_directory_that_cannot_be_written_to_is_one_sentence(tmp_path, path, error, sentence):
    (tmp_path / "file").write_text("")
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / LOCK_NAME)
    with pytest.raises(error, match=sentence):
        Directory(tmp_path / path, FakeClock(), "OUT").take()
