"""The second half of a replay in bulk: the engines of one bucket, one after the other, each as `tracefit replay` would.

An engine's pipeline gets what shards hold of it in event-time order, the API spans that its requests wait for, and all
KV events; then its state is taken and its memory is free. The states of a bucket are added in the order of event time.

Guarantee: what is learned of an engine is what a replay of its telemetry alone learns, bit by bit, wherever and how
often it is done.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from collector.config import Config
from collector.fleet.fold import NEVER_NS, Examined, add, choose, examine
from collector.fleet.state_fetch import Fetched
from collector.fleet.state_places import StatePlace
from collector.receive import BATCH_BYTES
from collector.recordings import Timed, TimedExport, TimedKv, TimedPage, in_batches
from collector.worker import Pipeline, make_pipeline

from .row_table import RowTable
from .shards import EngineKey, Run, Shard, merge_when_due, read_header, read_places, read_run

ENGINES_MAX: Final = 10_000
ID: Final = np.dtype("<u8")
"""Of a span, and of a place in a shard."""


class Learned(NamedTuple):
    """What a bucket came to; ``state`` is empty if nothing was learned."""

    state: bytes
    engines: int
    rows: int
    refused: tuple[str, ...] = ()
    """Engines that are in it already, by other recordings."""


class _Wanted(NamedTuple):
    """Entries of a shared shard that an engine needs, from one turn of its order."""

    first_unix_nano: int
    shard: Shard
    places: list[int]


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
            read = examine(Fetched(place, path), path, whole, NEVER_NS)
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
    wanted = _find_wanted({key: [run for _, run in own] for key, own in runs.items()}, shared)
    for key in sorted(runs):
        pipeline = make_pipeline(config)
        table = RowTable(key.instance, key.recording) if rows_place else None
        pipeline.on_event = table.record if table is not None else None
        for batch in in_batches(merge_when_due(_streams(runs.pop(key), wanted.pop(key, ()))), BATCH_BYTES):
            pipeline.process_kv([timed.batch for timed in batch if isinstance(timed, TimedKv)])
            pipeline.process_pages([timed.page for timed in batch if isinstance(timed, TimedPage)])
            pipeline.process([timed.export for timed in batch if isinstance(timed, TimedExport)])
        pipeline.flush()
        if table is not None:
            table.write(rows_place)
        yield key, pipeline


def _find_wanted(runs: Mapping[EngineKey, Sequence[Run]], shared: Sequence[Shard]) -> dict[EngineKey, list[_Wanted]]:
    """Whose requests wait for which API spans; one shard at a time, since there may be thousands."""
    keys = list(runs)
    parents = [np.unique(np.frombuffer(b"".join(run.parents for run in runs[key]), ID)) for key in keys]
    known = np.concatenate([*parents, np.empty(0, ID)])
    owners = np.repeat(np.arange(len(keys)), [len(each) for each in parents])
    order = known.argsort(kind="stable")
    known, owners = known[order], owners[order]
    out: dict[EngineKey, list[_Wanted]] = {}
    for shard in shared:
        header = read_header(shard())
        ids, places = np.frombuffer(header.ids, ID), np.frombuffer(header.places, ID).astype(np.int64)
        first, last = np.searchsorted(known, ids, "left"), np.searchsorted(known, ids, "right")
        found = last - first
        at = np.repeat(first - np.cumsum(found) + found, found) + np.arange(int(found.sum()))
        whose, where = owners[at], np.repeat(places, found)
        for number, key in enumerate(keys):
            own = np.union1d(where[whose == number], np.array(header.for_all, np.int64))
            turns = np.array([start for start, _ in header.turns])
            for turn, part in enumerate(np.split(own, np.searchsorted(own, turns[1:]))):
                if len(part):
                    out.setdefault(key, []).append(_Wanted(header.turns[turn][1], shard, part.tolist()))
    return out


def _streams(runs: Sequence[tuple[Shard, Run]], wanted: Sequence[_Wanted]) -> Iterator[tuple[int, Iterator[Timed]]]:
    for shard, run in runs:
        yield run.first_unix_nano, read_run(shard, run)
    for each in wanted:
        yield each.first_unix_nano, read_places(each.shard, each.places)
