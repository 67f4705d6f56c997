"""KV events in the join: whose they are, block columns, and no trace of the order of arrival."""

import msgspec
import numpy as np

from collector.config.schema import Config
from collector.decode.kv import Move
from collector.join.inferred.kv import MOVES_MAX, KvSources
from collector.join.joiner import Joiner
from collector.telemetry import table
from collector.telemetry.reasons import Skip
from online.rows import STEP_FEATURES, Target
from tests.support.kv_batches import TS_S, batch, kv_batches, stored
from tests.support.kv_joins import joined, rows_of, sequences, telemetry
from tests.support.pipelines import by_label, total_of

SETTINGS = Config()
BLOCK_COLUMNS = [STEP_FEATURES.index(name) for name in ("offload_blocks", "restore_blocks", "evicted_blocks")]


def no_step(_step):
    return False


def feed(joiner, items):
    """Telemetry and batches in their order."""
    for one in items:
        joiner.add(one) if hasattr(one, "core") else joiner.kv.add(one)
    return joiner


# --- block columns ----------------------------------------------------------------------------------------------------


def step_rows(rows):
    return [one.rows for one in rows if one.target is Target.STEP_TIME]


def test_offloads_restores_and_evictions_become_features_of_their_steps():
    for unsaid in ([], kv_batches("c5_offload")[::2]):  # between batches of which one is missing nothing is known
        _, without = joined("c5_offload", unsaid)
        assert np.isnan(np.concatenate([block.raw for block in step_rows(without)])[:, BLOCK_COLUMNS]).mean() > 0.99
    _, rows = joined("c5_offload", kv_batches("c5_offload"))
    raw = np.concatenate([block.raw for block in step_rows(rows)])[:, BLOCK_COLUMNS]
    known = np.isfinite(raw).all(axis=1)
    assert known.mean() > 0.5  # from grace_s after the first batch on
    late = [(m.move, blocks) for one in kv_batches("c5_offload") for m, blocks in one.moves.items() if m.step > 1200]
    offloads, restores = (sum(n for each, n in late if each is move) for move in (Move.OFFLOADED, Move.RESTORED))
    offloaded, restored, evicted = raw[known].sum(axis=0)
    assert offloaded >= 0.8 * offloads > 0
    assert restored >= 0.8 * 2 * restores > 0
    assert evicted > 100


def test_the_block_size_of_events_is_the_tokens_per_block_where_nothing_else_tells():
    """Steps without journeys: context comes from blocks in use, and nobody but BlockStored says how large they are."""

    def contexts(batches):
        told = telemetry("c5_offload")
        for one in told:
            one.core, one.api, one.snapshots = [], [], one.snapshots[:0]
        joiner = feed(Joiner(SETTINGS), [*batches, *told])
        raw = np.concatenate([block.raw for block in step_rows(rows_of(joiner.drain(flush=True)))])
        decoding = raw[:, STEP_FEATURES.index("decode_requests")] > 0
        return raw[decoding, STEP_FEATURES.index("decode_context_tokens")]

    assert np.isnan(contexts([])).all()
    assert np.isfinite(contexts(kv_batches("c5_offload"))).mean() > 0.5


def test_steps_wait_for_the_kv_events_of_their_time_as_long_as_anything_may_be_late():
    reached = []
    for batches in ([], kv_batches("c5_offload")[:1]):
        joiner = feed(Joiner(SETTINGS), [*batches, *telemetry("c5_offload")])
        joiner.drain()
        (one,) = sequences(joiner).values()
        reached.append(one.emitted_step)
    assert 0 < reached[1] < reached[0]


# --- whose they are ---------------------------------------------------------------------------------------------------


def test_a_publisher_belongs_to_the_engine_that_the_configuration_names():
    instances = sorted(sequences(joined("c9_dp2", [], no_step)[0]))
    told = kv_batches("c9_dp2")
    named = [msgspec.structs.replace(one, instance=instances[one.rank], block_size=32 + one.rank) for one in told]
    joiner, _ = joined("c9_dp2", named, no_step)
    own = {name: one.kv.block_size for name, one in sequences(joiner).items()}
    assert own == {name: 32 + number for number, name in enumerate(instances)}
    assert joiner.kv.unbound == 0


def test_a_publisher_without_a_name_belongs_to_the_only_engine_until_there_is_another():
    alone, two = telemetry("c5_offload", no_step), telemetry("c9_dp2", no_step)
    joiner = feed(Joiner(SETTINGS), [*kv_batches("c5_offload"), *alone])
    joiner.drain()
    assert all(one.kv is not None for one in sequences(joiner).values())
    for found in (feed(joiner, two), feed(Joiner(SETTINGS), [*kv_batches("c5_offload"), *two, *alone])):
        found.drain()
        assert not any(one.kv is not None for one in sequences(found).values())
        assert found.kv.unbound == 1


def test_a_publisher_that_restarts_goes_on_and_what_comes_again_is_left_out():
    first = [batch(stored(), seq=i, ts_s=TS_S + i) for i in range(5)]
    second = [batch(stored(), seq=i, ts_s=TS_S + 100 + i) for i in range(5)]
    sources = KvSources(SETTINGS)
    for one in [*first, first[-1], *second, first[0]]:
        sources.add(one)
    counts = sources.take_counts()
    assert by_label(counts, table.KV_BATCHES) == {table.ACCEPTED: 10, Skip.DUPLICATE: 1, Skip.LATE: 1}
    assert total_of(counts, table.KV_EVENTS) == 12


def test_of_a_publisher_a_bounded_number_of_moves_is_held_and_what_comes_of_forgotten_times_is_late():
    sources, one = KvSources(SETTINGS), batch(["BlockRemoved", [1], "GPU"])
    for number in range(MOVES_MAX + 1):
        sources.add(msgspec.structs.replace(one, seq=number, ts_unix_ns=one.ts_unix_ns + number))
    sources.add(one)
    counts = sources.take_counts()
    assert counts[table.SIZE, "kv_moves"] == MOVES_MAX
    assert by_label(counts, table.KV_BATCHES) == {table.ACCEPTED: MOVES_MAX + 1, Skip.LATE: 1}


def test_publishers_are_bounded_as_engines_are():
    sources = KvSources(Config(engines_max=3))
    for number in range(50):
        sources.add(batch(stored(), source=f"tcp://host:{number}"))
    assert sources.by_engine([]) == {}
    assert sources.unbound == 3


# --- nothing shows the order of arrival -------------------------------------------------------------------------------
