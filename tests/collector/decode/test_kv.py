"""KV events: both encodings, counts only, nothing of the tokens."""

import gc
import json
from base64 import b64encode

import msgspec
import pytest

from collector.decode.kv import BlockMove, KvBatch, Move, count_batch, read_line, read_payload
from collector.telemetry import Counts, table
from collector.telemetry.reasons import Skip
from tests.support.kv_batches import FIELDS, TS_S, batch, named, payload, stored
from tests.support.pipelines import by_label

EVENTS = [
    stored(3),
    stored(2, 64, "CPU", []),
    ["BlockRemoved", [1, 2], "GPU"],
    ["BlockRemoved", [b"x" * 32], "CPU"],
    ["AllBlocksCleared"],
    ["TransferInitiated", 1, "req", "GPU", "CPU", 8, 7],
    ["TransferCompleted", 1, "req", "GPU", "CPU", 8, False, 7],
    ["TransferInitiated", 2, "req", "CPU", "GPU", 4, 9],
    ["CacheLoadCommitted", "req", "CPU", 4, 8],
    ["CacheStoreCommitted", "req", "CPU", 4, 6],
    ["CacheEviction", "CPU", 1, "lru", 7, None],
    ["RemoteTransferInitiated", 3, "req", "NIXL", 0, 1, 5],
    ["RemoteTransferCompleted", 3, "req", "NIXL", 0, 1, 5, True],
]
MOVES = {
    BlockMove(Move.EVICTED): 2,
    BlockMove(Move.EVICTED, is_below=True): 1,
    BlockMove(Move.OFFLOADED, 7): 8,
    BlockMove(Move.RESTORED, 9, is_below=True): 4,
}


@pytest.mark.parametrize("encode", [list, named], ids=["by position", "by name"])
def test_every_event_is_counted_in_either_encoding(encode):
    assert {event[0] for event in EVENTS} == set(FIELDS)
    assert batch(*map(encode, EVENTS), seq=7) == KvBatch(
        source="kv",
        rank=0,
        seq=7,
        ts_unix_ns=round(TS_S * 1e9),
        block_size=32,
        offload_block_size=64,
        moves=MOVES,
        events=13,
    )


LONGER = [*stored(2), ["extra"], "group", {"more": 1}]
WIDER = named(stored(3)) | {"extra_keys": [None], "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
SECOND_GROUP = named(stored(4, size=48)) | {"group_idx": 1}
"""Of a hybrid cache the first one stands for all."""
UNKNOWN = [["BlockPainted", 1, 2], {"type": "BlockPainted", "colour": "red"}]
OLD = [["BlockStored", [b"h" * 32], None, [1], 16, None], ["BlockRemoved", [5]]]


@pytest.mark.parametrize(
    ("message", "blocks", "events", "rank"),
    [
        ({"ts": TS_S, "events": [named(stored()), stored()], "data_parallel_rank": 3}, (0, 32), (2, 0), 3),
        ([TS_S, [LONGER, WIDER, SECOND_GROUP, *UNKNOWN], 0, None, "one", "more"], (0, 32), (5, 2), 0),
        ([TS_S, OLD], (1, 16), (2, 0), 0),
    ],
    ids=["both encodings in a map", "what newer versions add", "without rank, step and medium"],
)
def test_batches_of_every_version_are_read_and_unknown_events_are_counted(message, blocks, events, rank):
    read = read_payload(msgspec.msgpack.encode(message), "kv", 0)
    assert (read.moves.get(BlockMove(Move.EVICTED), 0), read.block_size) == blocks
    assert ((read.events, read.unknown), read.rank) == (events, rank)


def transfer(blocks, step=1):
    return ["TransferInitiated", 1, "r", "GPU", "CPU", blocks, step]


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", 5, None, [], 32, None, "GPU", None],
        ["BlockStored", [1], None, [], 0, None, "GPU", None],
        ["BlockStored", [1], None, [], 2**40, None, "GPU", None],
        ["BlockRemoved", "all", "GPU"],
        transfer(-4),
        transfer(2**40),
        transfer(4, step=-7),
    ],
)
def test_a_senseless_event_is_left_out_alone(event):
    read = batch(event, stored(2), transfer(4))
    assert (read.block_size, len(read.moves), read.events, read.unknown) == (32, 1, 3, 1)


@pytest.mark.parametrize(("events", "found"), [(16_384, 16_384), (16_385, Skip.UNDECODABLE)])
def test_a_batch_of_more_events_than_a_step_can_have_is_refused(events, found):
    read = read_payload(payload(*[transfer(4)] * events), "kv", 0)
    assert (sum(read.moves.values()) / 4 if isinstance(read, KvBatch) else read) == found


GOOD = payload(stored())
SENSELESS = {
    Skip.UNDECODABLE: [(7, body) for body in (b"", b"garbage", msgspec.msgpack.encode({"ts": "soon"}))],
    Skip.INVALID: [
        *((7, body) for body in (payload(ts_s=0.0), payload(ts_s=float("nan")), payload(rank=-1))),
        (int.from_bytes(b"\xfe" * 8, "big"), GOOD),
    ],
}


@pytest.mark.parametrize(("found", "message"), [(found, each) for found in SENSELESS for each in SENSELESS[found]])
def test_a_message_that_makes_no_sense_is_left_out_by_reason(message, found):
    seq, body = message
    assert read_payload(GOOD, "kv", 7).seq == 7
    assert read_payload(body, "kv", seq) == found


def test_neither_tokens_nor_hashes_survive_the_reading():
    secret = [987_654_321 + i for i in range(64)]
    text = b"the prompt's own words"
    read = read_payload(payload(["BlockStored", [text, text], text, secret, 32, None, "GPU", None]), "kv", 0)
    gc.collect()
    encoded = msgspec.msgpack.encode(read)
    assert text not in encoded
    assert not any(msgspec.msgpack.encode(token) in encoded for token in secret)
    assert read.block_size == 32


def test_a_recorded_line_gives_what_its_message_gave_and_a_decoded_copy_is_not_read():
    encoded = b64encode(payload(stored(2))).decode()
    line = {"topic": "", "seq": 5, "payload_b64": encoded, "decoded": ["not even looked at"]}
    assert read_line(json.dumps(line).encode(), "kv") == batch(stored(2), seq=5)
    for bad in (b"", b"{}", b"[1]", b'{"seq": 1, "payload_b64": "%%%"}', b'{"seq": "x", "payload_b64": ""}'):
        assert read_line(bad, "kv") is Skip.UNDECODABLE


def test_the_counts_account_for_every_message_and_event():
    counts = Counts()
    count_batch(counts, batch(stored(), ["Painted"]), None)
    count_batch(counts, batch(stored(), stored()), Skip.DUPLICATE)
    assert by_label(counts, table.KV_BATCHES) == {table.ACCEPTED: 1, Skip.DUPLICATE: 1}
    assert by_label(counts, table.KV_EVENTS) == {table.ACCEPTED: 1, Skip.UNKNOWN_SCOPE: 1, Skip.DUPLICATE: 2}
