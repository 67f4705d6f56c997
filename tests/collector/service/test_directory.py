"""One directory, one process: who has it, who had it, and what a killed one left in it."""

from __future__ import annotations

import os

import pytest

from collector.runtime.filesystem import StartError
from collector.service.store import LOCK_NAME, Directory
from tests.support.clocks import FakeClock


def taken(path):
    directory = Directory(path, FakeClock())
    directory.take()
    return directory


def test_the_second_process_is_told_who_has_the_directory(tmp_path):
    first = taken(tmp_path / "made")
    with pytest.raises(StartError, match=rf"another process uses .*made: process {os.getpid()} on .*, since \d{{4}}-"):
        taken(tmp_path / "made")
    first.release()
    taken(tmp_path / "made").release()


def test_a_process_that_stopped_in_order_is_not_taken_for_a_killed_one(tmp_path):
    first = taken(tmp_path)
    assert first.killed == "", "there was none"
    first.release()
    second = taken(tmp_path)
    assert second.killed == ""
    os.close(second._descriptor)  # as the kernel does when it is killed
    assert taken(tmp_path).killed.startswith(f"process {os.getpid()} on ")


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
    with pytest.raises(StartError, match=r"cannot write to snapshot.directory .*file"):
        taken(tmp_path / "file")
