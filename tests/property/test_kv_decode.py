"""No bytes can stop the reading of KV events, and whatever is read is finite and in range."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from collector.decode.kv.batches import KvBatch
from collector.decode.kv.messages import read_frames, read_line, read_payload
from collector.telemetry.reasons import KvSkip
from tests.support.kv_batches import FIELDS, payload, stored

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=40)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
tags = st.sampled_from([*FIELDS, "Unheard"])
by_position = st.tuples(tags, st.lists(values, max_size=9)).map(lambda pair: [pair[0], *pair[1]])
by_name = st.tuples(
    tags, st.dictionaries(st.sampled_from(sorted({f for fs in FIELDS.values() for f in fs})), values)
).map(lambda pair: {"type": pair[0]} | pair[1])
events = st.lists(by_position | by_name | values, max_size=5)


def check(read):
    if isinstance(read, KvBatch):
        assert 0 <= read.foreign <= read.events
        assert 0 <= read.rank < 2**16
        assert 0 <= read.block_size <= 2**20
        assert min(read.stored_blocks, read.removed_blocks, read.removed_below) >= 0
        assert all(0 <= move.blocks <= 2**31 and len(move.request) <= 16 for move in read.moves)
        assert 946_684_800 * 10**9 <= read.ts_unix_ns <= 4_102_444_800 * 10**9
    else:
        assert read is None or isinstance(read, KvSkip)


@given(st.binary(max_size=400), st.integers(0, 2**64 - 1))
def test_any_bytes_are_a_batch_or_a_reason(data, seq):
    check(read_payload(data, "kv", seq))
    check(read_line(data, "kv"))


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_frames_are_a_batch_or_a_reason(frames):
    check(read_frames(frames, "kv"))


@given(events, scalars, scalars, st.booleans())
def test_any_msgpack_is_a_batch_or_a_reason(found, ts_s, rank, as_map):
    keys = ("ts", "events", "data_parallel_rank")
    body = dict(zip(keys, (ts_s, found, rank), strict=True)) if as_map else [ts_s, found, rank]
    check(read_payload(msgspec.msgpack.encode(body), "kv", 0))


@given(st.data())
def test_a_damaged_batch_is_a_batch_or_a_reason(data):
    whole = bytearray(payload(stored(3), ["TransferInitiated", 1, "r", "GPU", "CPU", 8, 7]))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    check(read_payload(bytes(whole[: data.draw(st.integers(0, len(whole)))]), "kv", 0))
