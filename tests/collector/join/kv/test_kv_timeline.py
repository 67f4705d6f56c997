"""One publisher's life: what is certain, what is unknown, what is remembered."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collector.join.kv.timeline import KvTimeline
from collector.join.window import REBUILT_DTYPE
from collector.telemetry.reasons import KvSkip
from tests.support.kv_batches import TS_S, batch, stored

T0 = round(TS_S * 1e9)
MS = 1_000_000


def life(batches, batches_max=1000, grace_ms=0):
    out = KvTimeline("kv", 0, grace_ms * MS, batches_max)
    for one in batches:
        out.add(one)
    return out


def at(ms, *events, seq):
    return batch(*events, seq=seq, ts_s=(T0 + ms * MS) / 1e9)


def ns(ms):
    return T0 + round(ms * MS)


def test_blocks_of_a_time_are_summed_and_so_is_the_batch_of_the_step_that_ends_it():
    one = life([at(0, stored(1), seq=0), at(10, stored(2), seq=1), at(20.1, stored(4), seq=2), at(30, seq=3)])
    assert one.stored(ns(5), ns(20), own=True) == 6
    assert one.stored(ns(5), ns(20), own=False) == 2
    assert one.stored(ns(12), ns(18), own=False) == 0


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_next_to_a_lost_batch_nothing_is_certain(lost):
    batches = [at(10 * i, stored(1), seq=i) for i in range(6)]
    one = life([b for b in batches if b.seq != lost])
    assert one.missing == 1
    assert one.stored(ns(10 * lost - 5), ns(10 * lost + 5), own=False) is None
    assert one.stored(ns(41), ns(45), own=False) == 0


def test_behind_the_last_batch_and_before_the_first_nothing_is_certain():
    one = life([at(10 * i, stored(1), seq=i + 5) for i in range(3)])
    assert one.stored(ns(21), ns(25), own=False) is None
    assert one.stored(ns(-5), ns(5), own=False) is None
    assert one.stored(ns(5), ns(15), own=False) == 1
    from_the_start = life([at(10 * i, stored(1), seq=i) for i in range(3)])
    assert from_the_start.stored(ns(-5), ns(5), own=False) == 1


def test_a_publisher_that_was_silent_for_long_says_nothing_about_that_time():
    one = life([at(0, stored(1), seq=0), at(60_000, stored(1), seq=1)])
    assert one.stored(ns(20_000), ns(20_010), own=False) is None
    assert one.stored(ns(55_000), ns(55_010), own=False) == 0


def test_a_batch_counts_once_and_an_old_one_not_at_all():
    one = life([at(10 * i, seq=i) for i in range(20)])
    assert one.add(at(50, seq=5)) is KvSkip.DUPLICATE
    one.forget_before(ns(95))
    assert len(one) == 10
    assert one.add(at(50, seq=5)) is KvSkip.LATE
    assert one.add(at(200, seq=20)) is None


def test_memory_is_bounded_by_count():
    one = life([], batches_max=100)
    for seq in range(5000):
        one.add(at(seq, stored(1), ["TransferInitiated", 1, f"r{seq}", "CPU", "GPU", 4, seq], seq=seq))
    one.forget_before(0)
    assert len(one) <= 100
    assert len(one._loads) <= 125
    assert len(one._seqs) <= 125


def starts(steps):
    return np.array([ns(10 * i) for i in range(steps + 1)])


def columns(one, steps=6, first_step=100):
    cells = np.zeros(steps, REBUILT_DTYPE)
    one.fill(cells, starts(steps), first_step)
    return [cells[name].tolist() for name in ("offload_blocks", "restore_blocks", "evicted_blocks")]


def test_blocks_go_to_the_step_an_event_names_else_to_the_step_its_batch_ends():
    one = life(
        [
            at(-10, stored(1, 32), stored(1, 64, "CPU", []), seq=0),
            at(9, ["BlockRemoved", [1, 2, 3], "GPU"], ["TransferInitiated", 1, "r", "GPU", "CPU", 8, 102], seq=1),
            at(
                20,
                ["TransferInitiated", 2, "r", "CPU", "GPU", 4, 103],
                ["CacheLoadCommitted", "r", "CPU", 4, 102],
                seq=2,
            ),
            at(41, ["CacheEviction", "CPU", 5, "lru", 105, None], ["BlockRemoved", [b"h"] * 5, "CPU"], seq=3),
            at(70, seq=4),
        ]
    )
    assert columns(one) == [
        [0, 0, 8, 0, 0, 0],
        [0, 0, 0, 8, 0, 0],  # 4 offload blocks of 64 tokens are 8 GPU blocks of 32
        [3, 0, 0, 0, 0, 10],  # the eviction and the removal are the same five blocks
    ]


def test_evictions_below_the_gpu_that_only_come_as_removals_go_by_time():
    one = life(
        [at(-10, stored(1, 32), stored(1, 64, "CPU", []), seq=0), at(15, ["BlockRemoved", [b"h"] * 3, "CPU"], seq=1)]
    )
    assert columns(one)[2] == [0, 6, 0, 0, 0, 0]


def test_steps_of_another_process_with_the_same_ids_are_not_meant():
    old = at(-120_000, ["TransferInitiated", 1, "r", "GPU", "CPU", 8, 102], seq=0)
    assert columns(life([old, at(90, seq=1)]))[0] == [0] * 6


def test_steps_within_the_grace_time_of_the_first_batch_and_in_a_gap_are_unknown_not_zero():
    one = life([at(-10, seq=0), at(25, seq=1), at(45, seq=4), at(90, seq=5)], grace_ms=20)
    assert np.isnan(columns(one)[0]).tolist() == [True, False, True, True, True, False]


def test_the_order_of_arrival_does_not_show():
    rng = random.Random(3)
    batches = [
        at(7 * i, stored(i % 4), ["TransferInitiated", 1, "r", "GPU", "CPU", i, 100 + i % 6], seq=i) for i in range(40)
    ]
    ordered = life(batches)
    for _ in range(5):
        shuffled = life([*rng.sample(batches, len(batches)), *rng.sample(batches, 10)])
        assert columns(shuffled) == columns(ordered)
        assert [shuffled.stored(ns(a), ns(a + 30), own=True) for a in range(0, 200, 5)] == [
            ordered.stored(ns(a), ns(a + 30), own=True) for a in range(0, 200, 5)
        ]
