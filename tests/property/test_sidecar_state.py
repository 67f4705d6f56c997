"""Stop and restart from saved state is no restart: for every bundled recording, cut anywhere, bitwise."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collector.config.schema import Config
from collector.durable import image as state_image
from collector.durable import state
from collector.durable.codec import Kind, attributes
from collector.recordings.reader import Recording, TimedKv, merged
from collector.telemetry import table
from collector.worker.build import make_pipeline
from online.state import StateError
from tests.support.paths import DATA

CAPTURES = sorted(path.parent.name for path in DATA.glob("*/otlp.pb.gz") if path.parent.name != "c4_abort_errors")
KNOWN: dict[str, list] = {}


def stream_of(capture):
    if capture not in KNOWN:
        files = [path for path in (DATA / capture).iterdir() if path.name in ("otlp.pb.gz", "kv.jsonl.gz")]
        KNOWN[capture] = list(merged([Recording(path, print) for path in files]))
    return KNOWN[capture]


def feed(pipeline, stream):
    for timed in stream:
        if isinstance(timed, TimedKv):
            pipeline.process_kv([timed.batch])
        else:
            pipeline.process([timed.export])


def restarted(pipeline, config):
    """What a new process makes of the bytes that the old one left."""
    made = make_pipeline(config)
    assert made.restore(state_image.decode(state_image.sealed(pipeline.whole_state(generation=7)))) == []
    return made


def fresh(config=None):
    return make_pipeline(config or Config(learners=("rls", "river:linear")))


@pytest.mark.parametrize("capture", CAPTURES)
@given(data=st.data())
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_a_restart_anywhere_in_a_recording_changes_no_bit(capture, data):
    stream = stream_of(capture)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), min_size=1, max_size=3)))
    config = Config(learners=("rls", "river:linear"))
    straight, halting = fresh(config), fresh(config)
    feed(straight, stream)
    begin = 0
    for cut in cuts:
        feed(halting, stream[begin:cut])
        halting, begin = restarted(halting, config), cut
    feed(halting, stream[begin:])
    assert halting.whole_state() == straight.whole_state()
    straight.flush()
    halting.flush()
    assert halting.snapshot(1, 1).to_json() == straight.snapshot(1, 1).to_json()
    assert straight.learned_rows > 0
    assert halting.learned_rows == straight.learned_rows


def test_repeats_are_still_told_after_a_restart():
    stream = stream_of("c1_mixed")
    pipeline = fresh()
    feed(pipeline, stream)
    again = restarted(pipeline, Config(learners=("rls", "river:linear")))
    before = again.whole_state()
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


@pytest.mark.parametrize("capture", CAPTURES)
def test_every_attribute_of_what_is_held_is_listed(capture):
    """An attribute that nobody listed would be lost by a restart: adding one to a class fails here."""
    pipeline = fresh()
    stream = stream_of(capture)
    feed(pipeline, stream[: len(stream) // 2])
    made = restarted(pipeline, Config(learners=("rls", "river:linear")))
    for root, codec in ((pipeline.joiner, state._JOIN), (pipeline._correlator.span_window, state._SPANS)):
        other = made.joiner if root is pipeline.joiner else made._correlator.span_window
        seen = {}
        walk(root, codec._by_class, seen)
        restored = {}
        walk(other, codec._by_class, restored)
        assert seen == restored
        assert len(seen) >= 2


def walk(value, kinds, found):
    """Attribute names of every listed class that can be reached, by class."""
    todo, done = [value], set()
    while todo:
        one = todo.pop()
        if id(one) in done:
            continue
        done.add(id(one))
        kind: Kind | None = kinds.get(type(one))
        if kind is not None:
            names = attributes(one)
            found.setdefault(kind.name, set()).update(names)
            assert set(kind.fields) <= names, kind.name
            todo += [getattr(one, name) for name in kind.fields]
        elif isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set) or type(one).__name__ == "deque":
            todo += one


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_file_cut_or_flipped_anywhere_is_refused(data):
    whole = KNOWN.setdefault("file", [state_image.sealed(learned().whole_state())])[0]
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    with pytest.raises(StateError):
        state_image.decode(damaged)


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
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_wellsealed_state_with_wrong_values_is_refused_whole_or_restored_whole(data):
    body = KNOWN.setdefault("body", [learned().whole_state()])[0]
    tree = mutated(data.draw, msgspec.msgpack.decode(body))
    pipeline = fresh()
    before = pipeline.whole_state()
    try:
        pipeline.restore(state_image.decode(state_image.sealed(msgspec.msgpack.encode(tree))))
    except StateError:
        assert pipeline.whole_state() == before, "half of a state is worse than none"


def test_of_another_versions_layout_what_was_learned_goes_on_and_is_said_so(caplog):
    old = learned()
    feed(old, stream_of("c1_mixed")[12:])
    image = state_image.decode(state_image.sealed(old.whole_state()))
    image.joiner["kinds"]["Engine"].append("something_new")
    made = fresh()
    assert made.restore(image) == []
    assert made.learned_rows == old.learned_rows > 0
    assert made.joiner.config_ids() == []
    assert "only what was learned is continued" in caplog.text
