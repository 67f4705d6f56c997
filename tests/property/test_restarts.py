"""A restart anywhere in a recording: with the log nothing is lost and nothing learned twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.config.schema import Config
from collector.decode.kv import KvBatch
from collector.decode.pages import ScrapedPage
from collector.join import Rows
from collector.recordings import Recording, merged
from collector.service.pipeline import make_pipeline
from online import Target
from online.state import LEARNERS, decode, encode
from tests.support.paths import DATA

SAME_KINDS = {"c10_long", "c2_long_prefill_mp", "c6_saturated", "f1_fork_parity"}
"""Recordings that have no kind of telemetry which the others do not have."""
CAPTURES = sorted({path.parent.name for path in DATA.glob("*/otlp.pb.gz")} - SAME_KINDS)
KNOWN: dict[str, list] = {}
CONFIG = Config(learners=("rls", "river:residual"))


def stream_of(capture):
    """What a sidecar would have been sent, numbered and stamped as the log has it."""
    if capture not in KNOWN:
        files = [path for path in (DATA / capture).iterdir() if path.name in {"otlp.pb.gz", "kv.jsonl.gz"}]
        timed = merged([Recording(path, print) for path in files])
        timed = [one for one in timed if not isinstance(one.item, ScrapedPage)]
        KNOWN[capture] = [
            one.item
            if isinstance(one.item, KvBatch)
            else one.item._replace(seq=1 + number, recording="", arrived_unix_ns=one.unix_nano + 10**9)
            for number, one in enumerate(timed)
        ]
    return KNOWN[capture]


class Life:
    """One process after the other; what reaches the learners in all of them."""

    def __init__(self):
        self.rows: dict[tuple[str, str], list] = {}
        self.pipeline = self.started()

    def started(self):
        pipeline = make_pipeline(CONFIG)
        pipeline.on_event = self.record
        return pipeline

    def record(self, event):
        if isinstance(event, Rows):
            self.rows.setdefault((event.config_id, event.target), []).append(event.rows.end_ns)

    def feed(self, stream):
        for one in stream:
            if isinstance(one, KvBatch):
                self.pipeline.process(kv=[one])
            else:
                self.pipeline.process([one])

    def restart(self, stream):
        """As after a kill right behind a checkpoint: what it does not know is read from the log again."""
        tree, position = self.pipeline.to_checkpoint()
        self.pipeline = self.started()
        assert self.pipeline.from_checkpoint(decode(encode(tree))) == position
        learners = self.pipeline.to_checkpoint()[0][LEARNERS]
        assert encode({LEARNERS: learners}) == encode({LEARNERS: tree[LEARNERS]}), "bit for bit"
        self.feed(one for one in stream if not isinstance(one, KvBatch) and position.read_from <= one.seq)

    def ends_ns(self):
        return {name: np.concatenate(blocks) for name, blocks in self.rows.items()}


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_restart_with_the_log_loses_no_step_and_learns_none_twice(capture):
    stream = stream_of(capture)
    straight, halting = Life(), Life()
    straight.feed(stream)
    begin = 0
    for cut in sorted(random.Random(capture).choices(range(len(stream) + 1), k=3)):
        halting.feed(stream[begin:cut])
        halting.restart(stream[:cut])
        begin = cut
    halting.feed(stream[begin:])
    straight.pipeline.flush()
    halting.pipeline.flush()
    for (config_id, target), ends_ns in straight.ends_ns().items():
        found_ns = halting.ends_ns().get((config_id, target), np.empty(0, np.int64))
        if target is Target.STEP_TIME:
            _, times = np.unique(found_ns, return_counts=True)
            _, straight_times = np.unique(ends_ns, return_counts=True)
            assert times.max(initial=0) <= straight_times.max(initial=0), "none twice"
            assert abs(len(found_ns) - len(ends_ns)) <= 2 + 0.005 * len(ends_ns)
        assert len(found_ns) <= len(ends_ns) * 1.01 + 2
    assert halting.pipeline.learned_rows > 0


def test_a_checkpoint_that_is_encoded_while_learning_goes_on_is_that_of_the_moment_it_was_taken():
    stream, life = stream_of("c3_preempt"), Life()
    half = len(stream) // 2
    life.feed(stream[:half])
    tree, _ = life.pipeline.to_checkpoint()
    at_once = encode(tree)
    life.feed(stream[half:])
    assert encode(tree) == at_once
