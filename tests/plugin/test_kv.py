"""KV events pass as counts and kinds; nothing that tells what was said leaves the engine."""

from __future__ import annotations

import random
import time
import types

import msgspec
from tracefit_vllm.exporter import Exporter
from tracefit_vllm.items import KvBatch
from tracefit_vllm.kv import plain
from tracefit_vllm.settings import Settings
from tracefit_vllm.tap import Tap

from tests.plugin.fakes import Publisher, Request, Scheduler, drive
from tests.plugin.receiver import attributes


class BlockStored(msgspec.Struct):
    """As of vLLM 0.32."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[object] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class TransferCompleted(msgspec.Struct):
    """As of the instrumented fork."""

    transfer_id: int
    request_id: str
    source_medium: str
    dest_medium: str
    block_count: int
    success: bool
    scheduler_step: int


class AllBlocksCleared(msgspec.Struct):
    pass


SECRET = 424242
STORED = BlockStored([1, 2, b"x"], SECRET, [SECRET] * 48, 16, None, "GPU", None, [("salt",)], 0, "full_attention", "me")
MOVED = TransferCompleted(1, "a", "GPU", "CPU", 8, success=True, scheduler_step=2)


def test_a_stored_block_is_counted_and_its_content_left_out():
    name, fields = plain(STORED)
    assert name == "BlockStored"
    assert fields == {
        "block_count": 3,
        "block_size": 16,
        "medium": "GPU",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_events_of_a_step_arrive_with_their_step_and_without_token_ids(receiver):
    scheduler = Scheduler()
    scheduler.kv_event_publisher = Publisher()
    settings = Settings(target=receiver.target, interval_s=0.02)
    tap = Tap(scheduler, settings, Exporter(settings, {}), random.Random(1))
    assert tap.attach()
    scheduler.add_request(Request("a", 20, 3))
    drive(scheduler, 1)
    batch = types.SimpleNamespace(ts=time.time(), events=[STORED, MOVED, AllBlocksCleared()], data_parallel_rank=1)
    scheduler.kv_batches.append(batch)
    drive(scheduler, 3)
    scheduler.shutdown()
    receiver.wait(lambda r: r.events(scope="vllm.kv_events"))
    stored, moved, cleared = receiver.events(scope="vllm.kv_events")
    assert (stored.name, moved.name, cleared.name) == ("BlockStored", "TransferCompleted", "AllBlocksCleared")
    assert attributes(stored)["step.id"] == 2
    assert attributes(stored)["data_parallel_rank"] == 1
    assert (
        attributes(moved).items()
        >= {"block_count": 8, "success": True, "scheduler_step": 2, "dest_medium": "CPU"}.items()
    )
    assert abs(stored.time_unix_nano - batch.ts * 1e9) < 1e6
    for request in receiver.requests:
        assert str(SECRET) not in str(request)
    assert scheduler.kv_event_publisher.published == [batch]


def test_batches_are_numbered_from_zero_as_the_engines_own_publisher_does(sink):
    scheduler = Scheduler()
    scheduler.kv_event_publisher = Publisher()
    assert Tap(scheduler, Settings(), sink, random.Random(1)).attach()
    for _ in range(3):
        scheduler.kv_batches.append(types.SimpleNamespace(ts=1.0, events=[STORED], data_parallel_rank=None))
    drive(scheduler, 4)
    assert [item.sequence for item in sink.items if isinstance(item, KvBatch)] == [0, 1, 2]


def test_kv_events_can_be_switched_off(sink):
    scheduler = Scheduler()
    scheduler.kv_event_publisher = Publisher()
    assert Tap(scheduler, Settings(kv_events=False), sink, random.Random(1)).attach()
    scheduler.kv_batches.append(types.SimpleNamespace(ts=1.0, events=[STORED], data_parallel_rank=None))
    drive(scheduler, 2)
    assert not any(isinstance(item, KvBatch) for item in sink.items)
