"""Files are replaced whole or not at all."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from exporters.snapshot_file import write_atomically, write_snapshot
from tests.support import exporter_cases as cases
from tests.support.paths import ROOT


def test_the_snapshot_is_the_golden_snapshot():
    cases.assert_golden("golden_snapshot.json", cases.snapshot().to_json())


def test_the_file_is_readable_for_others_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "snapshot.json", b"{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "snapshot.json").stat().st_mode) == 0o644


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


FILL = """
import resource, sys
from pathlib import Path
from exporters.snapshot_file import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_atomically(Path(sys.argv[1]), b"x" * 100_000)
except OSError as error:
    print(error.strerror)
"""


def test_a_file_system_that_really_takes_no_more_leaves_the_old_file_and_no_debris(tmp_path):
    path = tmp_path / "snapshot.json"
    write_atomically(path, b"old")
    done = subprocess.run([sys.executable, "-c", FILL, path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot.json"]


def test_the_directory_holds_the_snapshot_and_a_blis_file_for_each_configuration_that_fits(tmp_path):
    half_written = [".cccccccccccc.blis.yaml.tmp.7", ".snapshot.json.tmp.4711"]
    for name in ("cccccccccccc.blis.yaml", *half_written, "mine.blis.yaml", "notes.txt"):
        (tmp_path / name).write_text("old")
    known, unknown = cases.config_for_blis("aaaaaaaaaaaa"), cases.config("bbbbbbbbbbbb")
    report = write_snapshot(tmp_path, cases.snapshot(known, unknown))
    written = ["aaaaaaaaaaaa.blis.yaml", "snapshot.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*written, "mine.blis.yaml", "notes.txt"])
    assert sorted(report.written) == written
    assert report.errors == ()


@pytest.mark.parametrize("config_id", ["../../etc/cron", "", "UPPER", "a/b", "x" * 300])
def test_a_strange_config_id_never_becomes_a_file_name(tmp_path, config_id):
    directory = tmp_path / "inner" / "shared"
    directory.mkdir(parents=True)
    report = write_snapshot(directory, cases.snapshot(cases.config_for_blis(config_id)))
    assert (report.written, report.errors) == (("snapshot.json",), ())
    assert [path.name for path in directory.iterdir()] == ["snapshot.json"]
