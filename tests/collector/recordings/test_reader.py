"""Recordings: told by content, merged by event time, damage survived and told."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import sys

import pytest
import zstandard
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.recordings import Recording, merged
from collector.runtime.filesystem import StartError
from tests.support.step_exports import delimited, make_export, otlp_json, write_recording

EXPORTS = [make_export(first_step=first) for first in (1, 11, 21)]


def read(path, warnings=None):
    said = [] if warnings is None else warnings
    return [ExportTraceServiceRequest.FromString(export.payload) for export in Recording(path, said.append).exports()]


def prefixed(entries):
    """As the Collector's file exporter frames what is no line of JSON."""
    return b"".join(len(entry).to_bytes(4, "big") + entry for entry in entries)


RAW = [export.SerializeToString() for export in EXPORTS]
LINES = [otlp_json(export) for export in EXPORTS]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize(
    "content",
    [
        delimited(*EXPORTS),
        b"".join(LINES),
        b"\n" + b"\n\n".join(LINES),
        prefixed(RAW),
        prefixed(map(zstandard.compress, RAW)),
        prefixed(map(zstandard.compress, LINES)),
        prefixed(LINES),
    ],
    ids=[
        "delimited",
        "json lines",
        "json lines with empty ones",
        "proto",
        "proto, zstd",
        "json, zstd",
        "json, prefixed",
    ],
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


def test_a_line_without_end_is_read_in_pieces_that_are_no_exports(tmp_path, monkeypatch):
    monkeypatch.setattr("collector.recordings.EXPORT_BYTES_MAX", 1 << 20)
    endless = otlp_json(EXPORTS[0]) + b'{"x": "' + b"0" * (1 << 22) + b"\n" + otlp_json(EXPORTS[1])
    (tmp_path / "x").write_bytes(gzip.compress(endless))
    warnings = []
    assert read(tmp_path / "x", warnings) == EXPORTS[:2]
    assert warnings == [f"{tmp_path / 'x'}: 5 entries are no OTLP traces"]


def test_pages_that_cannot_be_learned_from_are_said_with_what_they_lack(tmp_path):
    file = tmp_path / "pages.jsonl"
    lacking = b'{"unix_ns": 5, "page": "vllm:generation_tokens_total 1"}\n'
    file.write_bytes(lacking + lacking + b'{"unix_ns": 6, "page": "<html>"}\n')
    warnings = []
    assert read(file, warnings) == []
    lacks, html = warnings
    assert lacks.startswith(f"{file}: 2 pages cannot be learned from (missing_families: vllm:prompt_tokens_total, ")
    assert html == f"{file}: 1 pages cannot be learned from (unexpected)"


@pytest.mark.parametrize("first_bytes", [*range(100, 140), 2570, 16383, 16384, 1 << 20, 1 << 24])
def test_the_two_kinds_of_lengths_are_told_apart_whatever_they_are(tmp_path, first_bytes):
    body = first_bytes - 20
    first = make_export()
    first.resource_spans[0].schema_url = "u" * max(0, body - first.ByteSize())
    for content in (delimited(first, EXPORTS[1]), prefixed([first.SerializeToString(), RAW[1]])):
        (tmp_path / "x").write_bytes(content)
        assert read(tmp_path / "x") == [first, EXPORTS[1]]


def test_frames_of_zstd_one_after_the_other_are_one_file(tmp_path):
    (tmp_path / "x").write_bytes(b"".join(map(zstandard.compress, LINES)))
    assert read(tmp_path / "x") == EXPORTS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bz2.compress(LINES[0]), "bzip2 is not read, only plain files, gzip and zstd"),
        (lzma.compress(LINES[0]), "xz is not read, only plain files, gzip and zstd"),
        (b"PAR1" + bytes(40), "Parquet is not read, only plain files, gzip and zstd"),
        (b'{"resourceMetrics":[]}\n{"resourceLogs":[]}\n', "2 entries are metrics or logs, which are not read"),
        (b'{\n  "resourceSpans": []\n}\n', "JSON over several lines is not read, only one object a line (jq -c .)"),
        (zstandard.compress(b"x" * 10_000 + LINES[0])[:-4], None),
        (prefixed([zstandard.compress(RAW[0])[:-3]]), "damaged after"),
        (prefixed([b"\x28\xb5\x2f\xfd" + bytes(20)]), "damaged after"),
    ],
)
def test_what_is_not_read_is_said_in_one_sentence(tmp_path, content, said):
    (tmp_path / "x").write_bytes(content)
    warnings = []
    assert read(tmp_path / "x", warnings) == []
    assert len(warnings) == 1
    assert said is None or said in warnings[0]


def test_without_its_package_zstd_is_said_to_need_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "x").write_bytes(zstandard.compress(LINES[0]))
    warnings = []
    assert read(tmp_path / "x", warnings) == []
    assert warnings == [f"{tmp_path / 'x'}: zstd needs a package that is not installed: install tracefit's extra zstd"]


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
        return [(timed.said.recording, timed.unix_nano) for timed in merged(Recording(path, print) for path in of)]

    forward = order(paths)
    assert [time for _, time in forward] == sorted(time for _, time in forward)
    assert forward == order(paths[::-1]) == order([paths[1], paths[2], paths[0]])


def test_the_order_within_a_file_stays_as_recorded(tmp_path):
    late = [make_export(first_step=101), make_export(first_step=1), make_export(first_step=51)]
    assert read(write_recording(tmp_path / "x", *late)) == late


def test_each_file_is_a_source_of_its_own(tmp_path):
    paths = [write_recording(tmp_path / name, EXPORTS[0]) for name in ("a", "b")]
    exports = [timed.said for timed in merged(Recording(path, print) for path in paths)]
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
