"""Recordings: told by content, merged by event time, damage survived and told."""

import errno
import gzip
import io
import itertools
import random

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.recordings import Recording, merged
from collector.runtime.filesystem import StartError
from tests.support.step_exports import delimited, make_export, otlp_json, write_recording

EXPORTS = [make_export(first_step=first) for first in (1, 11, 21)]


@pytest.fixture
def read(tmp_path):
    """Exports of a file with this content, and what is said of it."""

    def reading(content):
        said, path = [], tmp_path / "whatever.txt"
        path.write_bytes(content)
        exports = [each.item.payload for each in Recording(path, said.append)]
        return [*map(ExportTraceServiceRequest.FromString, exports)], [text.removeprefix(f"{path}: ") for text in said]

    return reading


LINES = [otlp_json(export) for export in EXPORTS]


CONTENTS = {
    "delimited": delimited(*EXPORTS),
    "json lines": b"".join(LINES),
    "json lines with empty ones": b"\n" + b"\n\n".join(LINES),
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_either_kind_gives_the_same_exports_whatever_its_name(read, content, pack):
    assert read(pack(content)) == (EXPORTS, [])


def test_bad_lines_are_counted_and_the_good_ones_kept(read):
    bad = [b"{nonsense\n", b'{"payload_b64": 5}\n', b'{"payload_b64":"AAAA","seq":0}\n', b"[]\n"]
    content = LINES[0] + b"".join(bad) + LINES[1]
    assert read(content) == (EXPORTS[:2], ["4 entries are no OTLP traces"])


def test_a_line_without_end_is_read_in_pieces_that_are_no_exports(read, monkeypatch):
    monkeypatch.setattr("collector.recordings.EXPORT_BYTES_MAX", 1 << 20)
    endless = LINES[0] + b'{"x": "' + b"0" * (1 << 22) + b"\n" + LINES[1]
    assert read(gzip.compress(endless)) == (EXPORTS[:2], ["5 entries are no OTLP traces"])


def test_pages_that_cannot_be_learned_from_are_said_with_what_they_lack(read):
    lacking = b'{"unix_ns": 5, "page": "vllm:generation_tokens_total 1"}\n'
    exports, (lacks, html) = read(lacking + lacking + b'{"unix_ns": 6, "page": "<html>"}\n')
    assert exports == []
    assert lacks.startswith("2 pages cannot be learned from (missing_families: vllm:iteration_tokens_total_count, ")
    assert html == "1 pages cannot be learned from (unexpected)"


@pytest.mark.parametrize("cut_bytes", [1, 10, 700])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_file_cut_short_gives_what_precedes_the_cut(read, cut_bytes, pack):
    noisy = [make_export(first_step=first, instance=random.Random(first).randbytes(400).hex()) for first in (1, 11, 21)]
    exports, (warning,) = read(pack(delimited(*noisy))[:-cut_bytes])
    assert exports == noisy[: len(exports)]
    assert "damaged" in warning or len(exports) == 3


def test_the_order_on_the_command_line_does_not_matter(tmp_path):
    firsts = {"a": (1, 41), "b": (21, 31), "c": (21,)}
    paths = [
        write_recording(tmp_path / name, *(make_export(first_step=first, instance=name) for first in steps))
        for name, steps in firsts.items()
    ]
    orders = [
        [(timed.unix_nano, timed.item.recording) for timed in merged(Recording(path, print) for path in order)]
        for order in itertools.permutations(paths)
    ]
    assert orders[0] == sorted(orders[0])
    assert all(order == orders[0] for order in orders)


def test_an_error_of_the_disk_ends_the_reading_with_the_name_of_the_file(tmp_path):
    class Disk(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, _):
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error") as caught:
        list(Recording(tmp_path / "a.pb", print, stream=Disk()))
    assert caught.value.filename == str(tmp_path / "a.pb")


def test_an_absent_file_is_one_clear_sentence(tmp_path):
    with pytest.raises(StartError, match=r"cannot read .*absent: No such file"):
        Recording(tmp_path / "absent", print)
