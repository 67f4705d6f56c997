"""``tracefit evaluate`` learns from KV events that were recorded beside the telemetry."""

from __future__ import annotations

import numpy as np

from collector.config import JoinConfig
from collector.evaluate.captures import load
from collector.evaluate.kv_beside import with_kv_beside
from collector.identity import Knowledge
from collector.recordings import by_source, open_recordings
from online import STEP_FEATURES, Target
from tests.support.paths import DATA

MOVED = [STEP_FEATURES.index(name) for name in ("offload_blocks", "restore_blocks", "evicted_blocks")]


def sources(*files, note=print):
    return list(with_kv_beside(by_source(open_recordings([DATA / file for file in files], note)), note))


def moved_blocks(source):
    """By step of the whole recording, and of what was known at the cut."""
    recordings, kv = source
    (capture,) = load(recordings, Knowledge(), JoinConfig(), 0.6, kv=kv)
    rows = capture.full[Target.STEP_TIME].rows, capture.learned[Target.STEP_TIME]
    return [block.raw[:, MOVED] for block in rows]


def test_steps_know_the_blocks_that_moved():
    (alone,) = sources("c5_offload/otlp.pb.gz")
    (beside,) = sources("c5_offload/otlp.pb.gz", "c5_offload/kv.jsonl.gz")
    assert not any(np.isfinite(blocks).any() for blocks in moved_blocks(alone))
    for blocks in moved_blocks(beside):
        known = np.isfinite(blocks).all(axis=1)
        assert known.mean() > 0.4  # the events' recording began later
        assert (blocks[known].sum(axis=0) > 0).all()


def test_events_of_another_folder_are_of_other_servers():
    said = []
    found = sources("c1_mixed/otlp.pb.gz", "c5_offload/kv.jsonl.gz", note=said.append)
    assert said == [f"{DATA / 'c5_offload'}: KV events without telemetry in the same folder are left out"]
    assert [kv for _, kv in found] == [[]]
    assert sum(len(list(recording)) for recordings, _ in found for recording in recordings) > 0
