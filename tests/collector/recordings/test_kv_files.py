"""Recorded KV events beside recorded exports: told by content, merged by event time, learned from."""

from __future__ import annotations

import gzip
import itertools
import json

from collector.commands.replay import replay
from collector.config.load import load
from collector.config.schema import Config
from collector.decode.kv import KvBatch
from collector.ingest import Export
from collector.recordings import Recording, by_kind, merged
from collector.runtime.tasks import SystemClock
from collector.service.pipeline import Pipeline
from tests.support.command_lines import spoken
from tests.support.paths import DATA
from tests.support.recordings import kv_lines

C5 = DATA / "c5_offload"
FILES = (C5 / "kv.jsonl.gz", C5 / "otlp.pb.gz")


def test_recorded_kv_lines_are_batches_whatever_the_file_is_called(tmp_path):
    lines = b"".join(kv_lines("c5_offload"))
    for name, content in (("plain", lines), ("packed", gzip.compress(lines))):
        (tmp_path / name).write_bytes(content)
        timed = list(Recording(tmp_path / name, print))
        assert len(timed) == 520
        assert all(isinstance(one.said, KvBatch) for one in timed)
        assert {one.said.source for one in timed} == {str(tmp_path / name)}
        assert list(Recording(tmp_path / name, print).exports()) == []


def test_both_streams_come_in_event_time_whatever_the_order_of_the_files():
    orders = [
        [(type(one.said), one.unix_nano) for one in merged(Recording(path, print) for path in order)]
        for order in itertools.permutations(FILES)
    ]
    assert orders[0] == orders[1]
    assert [time for _, time in orders[0]] == sorted(time for _, time in orders[0])
    assert {kind for kind, _ in orders[0]} == {Export, KvBatch}


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path):
    good, *_ = kv_lines("c5_offload")
    bad = [b'{"payload_b64": 5}\n', b'{"payload_b64":"AAAA","seq":0}\n', b"[]\n"]
    (tmp_path / "x").write_bytes(good + b"".join(bad) + good)
    said = []
    assert len(list(Recording(tmp_path / "x", said.append))) == 2
    assert len(said) == 1
    assert said[0].endswith("3 entries are no OTLP traces")


def replayed(paths, tmp_path, name):
    out = tmp_path / name
    code, _, noted = spoken(replay, paths, out, load(None, {}), SystemClock())
    assert code == 0
    return json.loads(out.read_text()), noted


def test_a_replay_takes_kv_lines_beside_exports_in_either_order(tmp_path):
    one, said = replayed(FILES, tmp_path, "one.json")
    other, _ = replayed(FILES[::-1], tmp_path, "other.json")
    assert one == other
    assert any("520 batches of KV events" in line for line in said)


def test_restores_of_a_custom_feature_set_are_learned_from():
    """What no feature set but a custom one asks for still reaches the learner: the columns are there."""
    settings = Config(learners=("rls",), feature_sets=("custom",), custom={"step_time": ("requests", "offload_blocks")})

    def rows(paths):
        pipeline = Pipeline(settings, "test")
        for timed in merged(Recording(path, print) for path in paths):
            pipeline.process(**by_kind([timed]))
        pipeline.flush()
        (config,) = pipeline.snapshot(1, 1).configs
        target = config.targets.get("step_time")
        custom = target.models.get("custom") if target else None
        return custom.rows if custom else 0

    assert rows(FILES[1:]) == 0
    assert rows(FILES) > 500
