"""Stop and restart from saved state is no restart: for every bundled recording, cut anywhere, bitwise."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collector.config.schema import Config
from collector.recordings import Recording, TimedKv, TimedPage, merged
from collector.service import read_image
from collector.service.build import make_pipeline
from collector.telemetry import table
from online.state import StateError, decode, encode, sealed
from tests.support.paths import DATA

RECORDED = ("otlp.pb.gz", "kv.jsonl.gz", "pages.jsonl.gz")
CAPTURES = sorted({path.parent.name for name in RECORDED for path in DATA.glob(f"*/{name}")} - {"c10_long"})
"""The long one says nothing that the others do not."""
KNOWN: dict[str, list] = {}


def stream_of(capture):
    if capture not in KNOWN:
        files = [path for path in (DATA / capture).iterdir() if path.name in RECORDED]
        KNOWN[capture] = list(merged([Recording(path, print) for path in files]))
    return KNOWN[capture]


def feed(pipeline, stream):
    for timed in stream:
        if isinstance(timed, TimedKv):
            pipeline.process_kv([timed.batch])
        elif isinstance(timed, TimedPage):
            pipeline.process_pages([timed.page])
        else:
            pipeline.process([timed.export])


def restarted(pipeline, config):
    """What a new process makes of the bytes that the old one left."""
    made = make_pipeline(config)
    assert made.restore(read_image(sealed(pipeline.whole_state(generation=7).body()))) == []
    return made


def fresh(config=None):
    return make_pipeline(config or Config(learners=("rls", "river:residual")))


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_restart_anywhere_in_a_recording_changes_no_bit(capture):
    stream = stream_of(capture)
    cuts = sorted(random.Random(capture).choices(range(len(stream) + 1), k=3))
    config = Config(learners=("rls", "river:residual"))
    straight, halting = fresh(config), fresh(config)
    feed(straight, stream)
    begin = 0
    for cut in cuts:
        feed(halting, stream[begin:cut])
        halting, begin = restarted(halting, config), cut
    feed(halting, stream[begin:])
    assert halting.whole_state().body() == straight.whole_state().body()
    straight.flush()
    halting.flush()
    assert halting.snapshot(1, 1).to_json() == straight.snapshot(1, 1).to_json()
    assert straight.learned_rows > 0
    assert halting.learned_rows == straight.learned_rows


def test_repeats_are_still_told_after_a_restart():
    stream = stream_of("c1_mixed")
    pipeline = fresh()
    feed(pipeline, stream)
    again = restarted(pipeline, Config(learners=("rls", "river:residual")))
    before = again.whole_state().body()
    again.take_counts()
    feed(again, stream)
    counts = again.take_counts()
    assert counts[table.DECODED_SPANS_OK] == 0
    assert set(counts.by_label(table.SKIPPED_SPANS)) <= {
        "duplicate",
        "late",
        "foreign_scope",
        "foreign_span",
        "not_a_request",
    }
    assert again.learned_rows == pipeline.learned_rows
    assert len(before) > 1000


@pytest.mark.parametrize("capture", ["c3_preempt", "c7_async_sim", "m1_pages"])
def test_a_state_encoded_while_learning_goes_on_is_that_of_the_moment_it_was_taken(capture):
    stream = stream_of(capture)
    pipeline = fresh()
    begin = 0
    for share in (0.2, 0.5, 0.8):
        cut = int(share * len(stream))
        feed(pipeline, stream[begin:cut])
        at_once, taken = pipeline.whole_state(7).body(), pipeline.whole_state(7)
        begin = min(cut + 8, len(stream))
        feed(pipeline, stream[cut : begin - 4])
        pieces = taken.pieces()
        body = next(pieces)
        feed(pipeline, stream[begin - 4 : begin])
        assert body + b"".join(pieces) == at_once


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_file_cut_or_flipped_anywhere_is_refused(data):
    whole = KNOWN.setdefault("file", [sealed(learned().whole_state().body())])[0]
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    with pytest.raises(StateError):
        read_image(damaged)


def learned():
    pipeline = fresh()
    feed(pipeline, stream_of("c1_mixed")[:12])
    return pipeline


def mutated(draw, node):
    """The same plain data with one value somewhere replaced by one of another kind."""
    odd = st.sampled_from([None, -1, 2**63, 1.5, "x", b"", [], {}, [[]], {"a": 1}])
    place = node
    for _ in range(draw(st.integers(1, 12))):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = draw(st.sampled_from(keys[:200]))
        if not isinstance(place[key], dict | list) or draw(st.integers(0, 9)) == 0:
            place[key] = draw(odd)
            break
        place = place[key]
    return node


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_wellsealed_state_with_wrong_values_is_refused_whole_or_restored_whole(data):
    whole = KNOWN.setdefault("file", [sealed(learned().whole_state().body())])[0]
    tree = mutated(data.draw, decode(whole))
    pipeline = fresh()
    before = pipeline.whole_state().body()
    try:
        pipeline.restore(read_image(encode(tree)))
    except StateError:
        assert pipeline.whole_state().body() == before, "half of a state is worse than none"
