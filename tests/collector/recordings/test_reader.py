"""Recordings: told by content, merged by event time, damage survived and told."""

from __future__ import annotations

import gzip
import random

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.recordings.reader import Recording, merged
from collector.runtime.exits import StartError
from tests.support.step_exports import delimited, make_export, otlp_json, write_recording

EXPORTS = [make_export(first_step=first) for first in (1, 11, 21)]


def read(path, warnings=None):
    said = [] if warnings is None else warnings
    return [ExportTraceServiceRequest.FromString(timed.export.payload) for timed in Recording(path, said.append)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    "content",
    [delimited(*EXPORTS), b"".join(map(otlp_json, EXPORTS)), b"\n" + b"\n\n".join(map(otlp_json, EXPORTS))],
    ids=["delimited", "json lines", "json lines with empty ones"],
)
def test_either_kind_gives_the_same_exports_whatever_its_name(tmp_path, content, pack):
    file = tmp_path / "whatever.txt"
    file.write_bytes(pack(content))
    assert read(file) == EXPORTS


def test_bad_lines_are_counted_and_the_good_ones_kept(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(otlp_json(EXPORTS[0]) + b"{nonsense\n" + otlp_json(EXPORTS[1]))
    warnings = []
    assert read(file, warnings) == EXPORTS[:2]
    assert warnings == [f"{file}: 1 entries are no OTLP traces"]


@pytest.mark.parametrize("cut_bytes", [1, 10, 700])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_file_cut_short_gives_what_precedes_the_cut(tmp_path, cut_bytes, pack):
    file = tmp_path / "x"
    noisy = [make_export(first_step=first, instance=random.Random(first).randbytes(400).hex()) for first in (1, 11, 21)]
    file.write_bytes(pack(delimited(*noisy))[:-cut_bytes])
    warnings = []
    exports = read(file, warnings)
    assert exports == noisy[: len(exports)]
    assert len(warnings) == 1
    assert "damaged" in warnings[0] or len(exports) == 3


def test_the_order_on_the_command_line_does_not_matter(tmp_path):
    paths = [
        write_recording(tmp_path / "a", make_export(first_step=1), make_export(first_step=41)),
        write_recording(tmp_path / "b", make_export(first_step=21), make_export(first_step=31)),
        write_recording(tmp_path / "c", make_export(first_step=21, instance="other")),
    ]

    def order(of):
        return [(timed.export.recording, timed.unix_nano) for timed in merged(Recording(path, print) for path in of)]

    forward = order(paths)
    assert [time for _, time in forward] == sorted(time for _, time in forward)
    assert forward == order(paths[::-1]) == order([paths[1], paths[2], paths[0]])


def test_the_order_within_a_file_stays_as_recorded(tmp_path):
    late = [make_export(first_step=101), make_export(first_step=1), make_export(first_step=51)]
    assert read(write_recording(tmp_path / "x", *late)) == late


def test_each_file_is_a_source_of_its_own(tmp_path):
    paths = [write_recording(tmp_path / name, EXPORTS[0]) for name in ("a", "b")]
    exports = [timed.export for timed in merged(Recording(path, print) for path in paths)]
    assert {export.recording for export in exports} == {str(path) for path in paths}
    assert {export.transport for export in exports} == {"file"}


def test_an_absent_file_is_one_clear_sentence(tmp_path):
    with pytest.raises(StartError, match=r"cannot read .*absent: No such file"):
        Recording(tmp_path / "absent", print)


def test_the_position_reaches_the_size(tmp_path):
    recording = Recording(write_recording(tmp_path / "x", *EXPORTS), print)
    assert recording.position_bytes == 0
    assert len(list(recording)) == 3
    assert recording.position_bytes == recording.size_bytes > 0
