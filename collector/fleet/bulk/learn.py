"""The second half of a replay in bulk: the engines of one bucket, one after the other, each as `tracefit replay` would.

An engine's pipeline gets what shards hold of it in event-time order, the API spans that its requests wait for, and all
KV events; then its state is taken and its memory is free. The states of a bucket are added in the order of event time.

Guarantee: what is learned of an engine is what a replay of its telemetry alone learns, bit by bit, wherever and how
often it is done.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from collector.config import Config
from collector.fleet.fold import Examined, add, choose, examine
from collector.fleet.state_fetch import Fetched
from collector.fleet.state_places import StatePlace
from collector.recordings import Timed, TimedExport, TimedKv, TimedPage, in_batches
from collector.worker import Pipeline, make_pipeline

from .row_table import RowTable
from .shards import EngineKey, Header, Run, Shard, merge_when_due, read_header, read_places, read_run

ENGINES_MAX: Final = 10_000
_ID: Final = np.dtype("<u8")
_NEVER_NS: Final = 1 << 62
"""Recordings may be of any time."""


class Learned(NamedTuple):
    """What a bucket came to; ``state`` is empty if nothing was learned."""

    state: bytes
    engines: int
    rows: int
    refused: tuple[str, ...] = ()
    """Engines that are in it already, by other recordings."""


class _Shared(NamedTuple):
    shard: Shard
    header: Header
    ids: np.ndarray


def learn_bucket(config: Config, shards: Sequence[Shard], shared: Sequence[Shard], rows_place: str = "") -> Learned:
    """Learn and merge every engine of some shards; ``shared`` holds what may belong to any of them."""
    whole = for_merging(config)
    rows = 0
    with tempfile.TemporaryDirectory(prefix="tracefit-bucket-") as scratch:
        examined = []
        for number, (key, pipeline) in enumerate(learn_engines(config, shards, shared, rows_place)):
            if not pipeline.learned_rows:
                continue
            rows += pipeline.learned_rows
            path = Path(scratch, f"{number}.bin")
            path.write_bytes(pipeline.state())
            place = StatePlace(f"{key.recording}: {key.instance}", path=path)
            read = examine(Fetched(place, path), path, whole, _NEVER_NS)
            if isinstance(read, Examined):
                examined.append(read)
        chosen, refused = choose(examined)
        state = add(chosen, whole).state() if chosen else b""
    return Learned(state, len(chosen), rows, tuple(f"{each.place.name}: {each.detail}" for each in refused))


def for_merging(config: Config) -> Config:
    """The same, with room for the configurations of a fleet."""
    return msgspec.structs.replace(config, bank=msgspec.structs.replace(config.bank, configs_max=ENGINES_MAX))


def learn_engines(
    config: Config, shards: Sequence[Shard], shared: Sequence[Shard], rows_place: str = ""
) -> Iterator[tuple[EngineKey, Pipeline]]:
    """Each engine with the pipeline that has learned it, flushed."""
    runs: dict[EngineKey, list[tuple[Shard, Run]]] = {}
    for shard in shards:
        for run in read_header(shard()).runs:
            runs.setdefault(run.key, []).append((shard, run))
    common = [_Shared(shard, header, np.frombuffer(header.ids, _ID)) for shard, header in _headers(shared)]
    for key in sorted(runs):
        pipeline = make_pipeline(config)
        table = RowTable(key.instance, key.recording) if rows_place else None
        pipeline.on_event = table.record if table is not None else None
        for batch in in_batches(merge_when_due(_streams(runs[key], common)), config.queue.batch_bytes):
            pipeline.process_kv([timed.batch for timed in batch if isinstance(timed, TimedKv)])
            pipeline.process_pages([timed.page for timed in batch if isinstance(timed, TimedPage)])
            pipeline.process([timed.export for timed in batch if isinstance(timed, TimedExport)])
        pipeline.flush()
        if table is not None:
            table.write(rows_place)
        yield key, pipeline


def _headers(shards: Sequence[Shard]) -> Iterator[tuple[Shard, Header]]:
    for shard in shards:
        yield shard, read_header(shard())


def _streams(runs: Sequence[tuple[Shard, Run]], common: Sequence[_Shared]) -> Iterator[tuple[int, Iterator[Timed]]]:
    for shard, run in runs:
        yield run.first_unix_nano, read_run(shard, run)
    parents = np.unique(np.frombuffer(b"".join(run.parents for _, run in runs), _ID))
    for shared in common:
        wanted = np.array(shared.header.places, np.int64)[np.isin(shared.ids, parents)]
        places = np.union1d(wanted, np.array(shared.header.for_all, np.int64))
        turns = np.array([start for start, _ in shared.header.turns])
        for number, own in enumerate(np.split(places, np.searchsorted(places, turns[1:]))):
            if len(own):
                yield shared.header.turns[number][1], read_places(shared.shard, own.tolist())
