"""Which files are one source: directories, standard input, files in rotation."""

from __future__ import annotations

import errno
import gzip
import io

import pytest
import zstandard

from collector.fleet.sources import look
from collector.recordings import STDIN, by_source, merged, open_recordings, source_of
from collector.runtime.filesystem import StartError
from tests.support.pipelines import coefficients, new_pipeline
from tests.support.recordings import messages, otlp_file
from tests.support.step_exports import delimited, make_export, otlp_json

EXPORTS = [make_export(first_step=first) for first in (1, 11, 21)]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("traces.json", "traces.json"),
        ("traces-2026-11-22T05-02-14.173.json", "traces.json"),
        ("traces-2026-11-22T05-02-14.173-size.json", "traces.json"),
        ("traces-2026-11-22T05-02-14.173.json.gz", "traces.json"),
        ("traces-2026-11-22T05-02-14.173", "traces"),
        ("traces.json.1", "traces.json"),
        ("traces.json.12.gz", "traces.json"),
        ("traces.json-20261122", "traces.json"),
        ("traces.json-20261122-1700000000.zst", "traces.json"),
        ("otlp.pb.gz", "otlp.pb.gz"),
        ("capture-2.pb", "capture-2.pb"),
        ("c10_long", "c10_long"),
        ("x.7z", "x.7z"),
        ("year=2026/month=11/day=22/hour=05/minute=02/traces_483920175.binpb.gz", "traces"),
        ("2026/11/22/05/traces_7.json", "traces"),
        ("2026/11/22/traces_05_02_14.json", "traces"),
        ("year=2026/other/traces_1.json", "year=2026/other/traces_1.json"),
    ],
)
def test_a_rotation_is_told_by_the_names(name, source):
    assert source_of(f"dir/{name}") == f"dir/{source}"


def learned(paths):
    pipeline = new_pipeline()
    for timed in merged(open_recordings(paths, print)):
        pipeline.process([timed.said])
    pipeline.flush()
    return len(pipeline.snapshot(1, 1).configs), sorted(coefficients(pipeline).items(), key=lambda item: item[0][1:])


def test_three_files_of_a_rotation_are_one_configuration_with_the_coefficients_of_one_file(tmp_path):
    exports = list(messages(otlp_file("c1_mixed")))
    third = len(exports) // 3
    names = ("t-2026-11-22T05-02-14.173.pb", "t-2026-11-22T06-02-14.173.pb.gz", "t.pb")
    for number, (name, pack) in enumerate(zip(names, (bytes, gzip.compress, bytes), strict=True)):
        part = exports[number * third : (number + 1) * third if number < 2 else None]
        (tmp_path / name).write_bytes(pack(b"".join(len(one).to_bytes(4, "big") + one for one in part)))
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "t.pb").write_bytes(b"".join(len(one).to_bytes(4, "big") + one for one in exports))
    configs, in_parts = learned([tmp_path / name for name in names[::-1]])
    assert configs == 1
    in_one = learned([whole])[1]
    assert [key[1:] for key, _ in in_parts] == [key[1:] for key, _ in in_one]
    assert [value for _, value in in_parts] == pytest.approx([value for _, value in in_one], rel=1e-9)


def test_files_that_are_no_rotation_stay_sources_of_their_own(tmp_path):
    for name in ("a.pb", "b.pb", "c.pb.1", "c.pb"):
        (tmp_path / name).write_bytes(delimited(*EXPORTS))
    recordings = open_recordings([tmp_path], print)
    assert [[one.path.name for one in source] for source in by_source(recordings)] == [
        ["a.pb"], ["b.pb"], ["c.pb", "c.pb.1"],
    ]  # fmt: skip
    assert {timed.said.recording for timed in merged(recordings)} == {
        str(tmp_path / name) for name in ("a.pb", "b.pb", "c.pb")
    }


def test_a_directory_is_every_file_in_it_once_but_for_hidden_ones(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("deep/a.pb", "b.pb", ".hidden", ".git/c.pb"):
        (tmp_path / name).write_bytes(delimited(*EXPORTS))
    recordings = open_recordings([tmp_path, tmp_path / "b.pb"], print)
    assert len([*merged(recordings)]) == 2 * len(EXPORTS)
    assert [str(one.path.relative_to(tmp_path)) for one in recordings] == ["b.pb", "deep/a.pb"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartError, match="there is no file in it"):
        open_recordings([tmp_path / "empty"], print)


def test_a_directory_that_may_not_be_read_is_not_one_without_files(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refused)
    with pytest.raises(PermissionError):
        open_recordings([tmp_path], print)
    (place,) = look([str(tmp_path)])
    assert place.problem == "Permission denied"


class Pipe(io.RawIOBase):
    """Gives a few bytes at a time and cannot go back."""

    def __init__(self, data):
        self._data = io.BytesIO(data)

    def readable(self):
        return True

    def readinto(self, buffer):
        return self._data.readinto(memoryview(buffer)[:7])


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
@pytest.mark.parametrize("content", [delimited(*EXPORTS), b"".join(map(otlp_json, EXPORTS))])
def test_standard_input_is_read_as_a_file_is(pack, content):
    (recording,) = open_recordings([STDIN], print, io.BufferedReader(Pipe(pack(content))))
    payloads = [timed.said.payload for timed in recording]
    assert payloads == [export.SerializeToString() for export in EXPORTS]
    assert recording.position_bytes == recording.size_bytes == 0
