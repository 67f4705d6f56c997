"""Recorded KV events beside recorded exports: told by content, merged by event time, learned from."""

import gzip

import pytest

from collector.decode.kv import KvBatch
from collector.recordings import Recording, merged_with_progress
from collector.runtime.tasks import SystemClock
from tests.support.paths import DATA
from tests.support.pipelines import fed, new_pipeline
from tests.support.recordings import kv_lines

FILES = [DATA / "c5_offload" / name for name in ("kv.jsonl.gz", "otlp.pb.gz")]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_recorded_kv_lines_are_batches_whatever_the_file_is_called(pack, tmp_path):
    path = tmp_path / "whatever"
    path.write_bytes(pack(b"".join(kv_lines("c5_offload"))))
    said = [timed.said for timed in Recording(path, print)]
    assert len(said) == 520
    assert all(isinstance(batch, KvBatch) and batch.source == str(path) for batch in said)


def test_both_streams_come_in_event_time_and_what_was_read_is_said():
    said = []
    times = [
        timed.unix_nano
        for timed in merged_with_progress([Recording(path, print) for path in FILES], SystemClock(), said.append)
    ]
    assert times == sorted(times)
    exports = len(times) - 520
    assert len(said) == 1
    assert said[0].startswith(f"read {exports} exports, ")
    assert " and 520 batches of KV events in " in said[0]


def test_restores_of_a_custom_feature_set_are_learned_from():
    """What no feature set but a custom one asks for still reaches the learner: the columns are there."""

    def rows(paths):
        custom = {"step_time": ("requests", "offload_blocks")}
        (config,) = fed(new_pipeline(feature_sets=("custom",), custom=custom), paths).snapshot(1, 1).configs
        models = [target.models for target in config.targets.values() if "custom" in target.models]
        return sum(each["custom"].rows for each in models)

    assert rows(FILES[1:]) == 0
    assert rows(FILES) > 500
