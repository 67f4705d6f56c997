"""Which files are one source: directories, standard input, files in rotation."""

import gzip
import io

import pytest

from collector.recordings import STDIN, merged, open_recordings, source_of
from collector.runtime.filesystem import StartError
from tests.support.step_exports import delimited, make_export

EXPORTS = [make_export(first_step=first) for first in (1, 11, 21)]


NAMES = """
traces.json traces.json
traces-2026-11-22T05-02-14.173.json traces.json
traces-2026-11-22T05-02-14.173-size.json traces.json
traces-2026-11-22T05-02-14.173.json.gz traces.json
traces-2026-11-22T05-02-14.173 traces
traces.json.1 traces.json
traces.json.12.gz traces.json
traces.json-20261122 traces.json
traces.json-20261122-1700000000.gz traces.json
otlp.pb.gz otlp.pb.gz
capture-2.pb capture-2.pb
c10_long c10_long
x.7z x.7z
year=2026/month=11/day=22/hour=05/minute=02/traces_483920175.binpb.gz traces
2026/11/22/05/traces_7.json traces
2026/11/22/traces_05_02_14.json traces
year=2026/other/traces_1.json year=2026/other/traces_1.json
"""
"""Files, and what they are called after the files of their rotation, or folders of their exporter, are one."""


@pytest.mark.parametrize(("name", "source"), [line.split() for line in NAMES.strip().splitlines()])
def test_a_rotation_is_told_by_the_names(name, source):
    assert source_of(f"dir/{name}") == f"dir/{source}"


def test_three_files_of_a_rotation_are_one_source_in_the_order_of_one_file(tmp_path):
    exports = [make_export(first_step=first) for first in range(1, 100, 10)]
    names = ("t-2026-11-22T05-02-14.173.pb", "t-2026-11-22T06-02-14.173.pb.gz", "t.pb")
    parts = (exports[:3], exports[3:6], exports[6:])
    for name, part, pack in zip(names, parts, (bytes, gzip.compress, bytes), strict=True):
        (tmp_path / name).write_bytes(pack(delimited(*part)))
    said = [timed.item for timed in merged(open_recordings([tmp_path / name for name in names[::-1]], print))]
    assert [export.payload for export in said] == [export.SerializeToString() for export in exports]
    assert {export.recording for export in said} == {str(tmp_path / "t.pb")}


def test_a_directory_is_every_file_in_it_once_but_for_hidden_ones(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("deep/a.pb", "b.pb", ".hidden", ".git/c.pb"):
        (tmp_path / name).write_bytes(delimited(*EXPORTS))
    for name in ("here", "deep/up"):
        (tmp_path / name).symlink_to(tmp_path)
    recordings = open_recordings([tmp_path, tmp_path / "b.pb"], print)
    assert len([*merged(recordings)]) == 2 * len(EXPORTS)
    assert [str(one.path.relative_to(tmp_path)) for one in recordings] == ["b.pb", "deep/a.pb"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartError, match="there is no file in it"):
        open_recordings([tmp_path / "empty"], print)


class Pipe(io.BytesIO):
    """Gives a few bytes at a time and cannot go back."""

    def seek(self, *_):
        raise io.UnsupportedOperation

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:7])


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_is_read_as_a_file_is(pack):
    (recording,) = open_recordings([STDIN], print, io.BufferedReader(Pipe(pack(delimited(*EXPORTS)))))
    payloads = [timed.item.payload for timed in recording]
    assert payloads == [export.SerializeToString() for export in EXPORTS]
    assert recording.position_bytes == recording.size_bytes == 0
