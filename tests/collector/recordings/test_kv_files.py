"""Recorded KV events beside recorded exports: told by content, merged by event time, learned from."""

import gzip

import pytest

from collector.decode.kv import KvBatch
from collector.recordings import Recording, merged_with_progress
from tests.support.paths import DATA
from tests.support.recordings import kv_lines

FILES = [DATA / "c5_offload" / name for name in ("kv.jsonl.gz", "otlp.pb.gz")]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_recorded_kv_lines_are_batches_whatever_the_file_is_called(pack, tmp_path):
    path = tmp_path / "whatever"
    path.write_bytes(pack(b"".join(kv_lines("c5_offload"))))
    said = [timed.item for timed in Recording(path, print)]
    assert len(said) == 520
    assert all(isinstance(batch, KvBatch) and batch.source == str(path) for batch in said)


def test_both_streams_come_in_event_time():
    times = [timed.unix_nano for timed in merged_with_progress([Recording(path, print) for path in FILES])]
    assert times == sorted(times)
    assert len(times) > 520
