"""What KV events cost, in CPU time: generous limits, the figure itself is printed."""

from __future__ import annotations

import random
import time

import msgspec

from collector.config.learning_config import JoinConfig
from collector.decode.kv.messages import read_payload
from collector.join.kv.owners import KvSources
from tests.support.kv_batches import FIELDS, TS_S, kv_batches
from tests.support.kv_joins import joined, sequences

EVENTS, ROUNDS, REPEATS = 10, 9, 300


def best_cpu_us(work):
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.process_time()
        work()
        best_s = min(best_s, time.process_time() - start_s)
    return best_s * 1e6


def batch_bytes(by_name):
    rng = random.Random(1)
    events = []
    for _ in range(EVENTS):
        hashes = [rng.randbytes(32) for _ in range(4)]
        event = [
            "BlockStored",
            hashes,
            rng.randbytes(32),
            [rng.randrange(128_000) for _ in range(64)],
            16,
            None,
            "GPU",
            None,
        ]
        events.append({"type": event[0]} | dict(zip(FIELDS[event[0]], event[1:], strict=True)) if by_name else event)
    return msgspec.msgpack.encode([TS_S, events, 0, None])


def test_an_event_of_four_blocks_is_read_in_about_a_microsecond(record_property):
    for by_name in (False, True):
        data = batch_bytes(by_name)
        us = best_cpu_us(lambda data=data: [read_payload(data, "kv", 0) for _ in range(REPEATS)]) / REPEATS / EVENTS
        record_property("us_per_event", us)
        print(f"{'by name' if by_name else 'by position'}: {us:.2f} us per event of 4 blocks")
        assert us < 4


def test_reading_without_the_tokens_costs_less_than_reading_everything():
    data = batch_bytes(by_name=False)
    ours = best_cpu_us(lambda: [read_payload(data, "kv", 0) for _ in range(REPEATS)])
    everything = best_cpu_us(lambda: [msgspec.msgpack.decode(data) for _ in range(REPEATS)])
    assert ours < everything


def test_the_join_of_a_batch_costs_microseconds():
    batches = kv_batches("c5_offload")

    def add():
        sources = KvSources(JoinConfig())
        for one in batches:
            sources.add(one)

    us = best_cpu_us(add) / len(batches)
    (sequence,) = sequences(joined("c5_offload", batches)[0]).values()
    print(f"{us:.1f} us per batch, {sequence.kv.prefills.hit_tokens:.0f} tokens subtracted")
    assert us < 100
