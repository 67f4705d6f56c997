"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from exporters.snapshot_file import write_atomically
from online.snapshot import Snapshot
from tests import exporter_cases as cases


def test_the_snapshot_is_the_golden_snapshot():
    cases.assert_golden("golden_snapshot.json", cases.snapshot().to_json())


def test_a_snapshot_survives_the_way_through_its_file(tmp_path):
    path = tmp_path / "snapshot.json"
    write_atomically(path, cases.snapshot().to_json())
    assert Snapshot.from_json(path.read_bytes()) == cases.snapshot()


def test_the_file_is_readable_for_others_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "snapshot.json", b"{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "snapshot.json").stat().st_mode) == 0o644


def test_nothing_but_the_file_stays_in_the_directory(tmp_path):
    path = tmp_path / "snapshot.json"
    for data in (b"one", b"two"):
        write_atomically(path, data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot.json"]
    assert path.read_bytes() == b"two"


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "snapshot.json"
    versions = [bytes([48 + i]) * 200_000 for i in range(10)]
    write_atomically(path, versions[0])
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            seen.append(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for version in versions:
        write_atomically(path, version)
    done.set()
    reader.join()
    assert set(seen) <= set(versions)


def test_a_missing_directory_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "gone" / "snapshot.json", b"{}")


def test_a_failing_rename_leaves_the_old_file_and_no_debris(tmp_path, monkeypatch):
    path = tmp_path / "snapshot.json"
    write_atomically(path, b"old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot.json"]


def test_a_full_disk_is_an_os_error_and_the_old_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "snapshot.json"
    write_atomically(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_writing_goes_on_when_the_directory_comes_back(tmp_path):
    directory = tmp_path / "shared"
    with pytest.raises(OSError):
        write_atomically(directory / "snapshot.json", b"{}")
    directory.mkdir()
    write_atomically(directory / "snapshot.json", b"{}")
    assert (directory / "snapshot.json").read_bytes() == b"{}"
