"""The checkpoint on disk: a whole one is there, and one that is bad is put aside. One process uses a directory."""

import errno
import os
from unittest.mock import patch

import pytest

from collector.runtime.filesystem import StartError
from collector.service.checkpoint import LOCK_NAME, NAME, PROGRESS, CheckpointFile, Directory, Position
from collector.telemetry.reasons import Restored
from online.state import LEARNERS, StateError, encode


def checkpoint(number):
    return encode({PROGRESS: {"newest": number}, LEARNERS: {"large": "x" * 2000}})


def load(directory, *, refuse=0, configs_max=1):
    """The file as a start finds it, with what it began; a checkpoint of a number may be refused."""

    def restore(tree):
        newest = tree[PROGRESS]["newest"]
        if newest == refuse:
            raise StateError("does not fit")
        return Position(newest, newest)

    file = CheckpointFile(directory, configs_max)
    newest = file.load(restore).newest
    return file, file.restored, newest


@pytest.fixture
def written(tmp_path):
    CheckpointFile(tmp_path, 1).write(checkpoint(20))
    return tmp_path


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda _: b"", lambda b: b[:60] + b"?" + b[61:], lambda b: b])
def test_a_bad_checkpoint_is_kept_beside_and_everything_is_learned_anew(written, damage):
    """One that does not fit, too."""
    path = written / NAME
    bad = damage(path.read_bytes())
    path.write_bytes(bad)
    file, *read = load(written, refuse=20)
    assert read == [Restored.COLD, 0]
    assert file.problem.startswith(f"{NAME}: ")
    assert (written / f"{NAME}.corrupt").read_bytes() == bad
    assert load(written)[1:] == (Restored.EMPTY, 0)
    file.write(checkpoint(30))
    assert load(written)[1:] == (Restored.CHECKPOINT, 30)
    assert (written / f"{NAME}.corrupt").exists(), "kept for inspection"


def test_a_checkpoint_has_room_for_every_configuration_that_may_be_learned(written, monkeypatch):
    monkeypatch.setattr("collector.service.checkpoint.STATE_BYTES_MAX", 10)
    monkeypatch.setattr("collector.service.checkpoint.CONFIGURATION_BYTES_MAX", 10)
    assert load(written, configs_max=500)[2] == 20
    assert "unpacks to more" in load(written)[0].problem


@pytest.mark.parametrize("call", ["os.open", "os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_a_readable_checkpoint(written, call):
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch(call, side_effect=full), pytest.raises(OSError, match="No space"):
        CheckpointFile(written, 1).write(checkpoint(30))
    assert load(written)[2] == 20
    CheckpointFile(written, 1).write(checkpoint(40))
    assert load(written)[2] == 40


# --- the directory --------------------------------------------------------------------------------------------------


def test_the_next_process_learns_who_was_killed_before_it(tmp_path):
    killed, after = Directory(tmp_path / "killed"), Directory(tmp_path / "after")
    killed.take()
    (tmp_path / "after").mkdir()
    os.mkfifo(tmp_path / "after" / "of another program")
    (tmp_path / "after" / LOCK_NAME).write_bytes((tmp_path / "killed" / LOCK_NAME).read_bytes())
    after.take()
    assert after.killed.split()[:2] == ["process", str(os.getpid())]
    for directory in (killed, after):
        directory.release()
    after.take()
    assert after.killed == "", "the one before stopped in order"
    after.release()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("file", "cannot write to OUT .*/file: File exists"),
        ("file/below", "cannot write to OUT .*/file/below: Not a directory"),
        ("x" * 300, "cannot write to OUT .*/x+: File name too long"),
        ("", "cannot use OUT .*: state.bin is not a file"),
    ],
)
def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path, path, sentence):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "state.bin")
    with pytest.raises(StartError, match=sentence):
        Directory(tmp_path / path, "OUT").take()
