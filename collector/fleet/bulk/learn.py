"""Rows of a shard, learned or as a table.

Rows as Parquet: what was learned from, for pandas, polars or DuckDB (docs/fleet.md has the schema).

    OUT/config=<config_id>/target=step_time/<engine>.parquet

One file for each engine, configuration and target, in event-time order. All have the same columns. Raw features are
summed over the steps of a row; one that the telemetry did not tell, or that rows of this target have not, is null. The
same recordings give the same files.

The second half of a replay in bulk: the engines of one bucket, one after the other, each as `tracefit replay` would.

An engine's pipeline gets what shards hold of it in event-time order, the API spans that its requests wait for, and all
KV events; then its state is taken and its memory is free. The states of a bucket are added in the order of event time.

Guarantee: what is learned of an engine is what a replay of its telemetry alone learns, bit by bit, wherever and how
often it is done.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from collector.config import Config
from collector.fleet.pull import NEVER_NS, Examined, add, choose, examine
from collector.fleet.state_fetch import Fetched, StatePlace, open_store
from collector.ingest import BATCH_BYTES
from collector.join import Event, Renamed, Rows
from collector.recordings import Timed, TimedExport, TimedKv, TimedPage, in_batches
from collector.runtime import StartError
from collector.service import Pipeline, make_pipeline
from online import PHASES, Quality, RowBlock, Target

from .shards import EngineKey, Run, Shard, merge_when_due, read_header, read_places, read_run

BUFFERED_ROWS: Final = 100_000
FEATURES: Final = tuple(
    dict.fromkeys([*Target.STEP_TIME.vocabulary, *Target.API_QUEUEING.vocabulary, *Target.QUEUE_WAIT.vocabulary])
)
_T = TypeVar("_T")


def check_rows_place(place: str) -> None:
    """StartError if rows cannot be written there, before anything is learned."""
    try:
        import pyarrow as pa  # noqa: F401, PLC0415
    except ImportError:
        raise StartError("--rows needs packages that are not installed: install tracefit's extra fleet") from None
    if "://" in place:
        open_store(place)


class RowTable:
    """The rows of one engine, from its pipeline's events."""

    def __init__(self, engine: str, recording: str) -> None:
        self._engine = engine
        self._recording = recording
        self._blocks: dict[tuple[str, Target], list[Rows]] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="tracefit-rows-")
        self._written: dict[tuple[str, Target], list[Path]] = {}
        self._held = 0

    def record(self, event: Event) -> None:
        """Take what concerns rows."""
        if isinstance(event, Renamed):
            _rename(self._blocks, event.old, event.new)
            _rename(self._written, event.old, event.new)
        elif isinstance(event, Rows):
            self._blocks.setdefault((event.config_id, event.target), []).append(event)
            self._held += len(event.rows)
            if self._held >= BUFFERED_ROWS:
                self._spill()

    def write(self, place: str) -> None:
        """Write all of it below a directory or a URL; the engine's files are replaced as one step each."""
        from pyarrow import parquet  # noqa: PLC0415

        self._spill()
        name = hashlib.sha256(f"{self._recording}\0{self._engine}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
        for (config_id, target), pieces in sorted(self._written.items()):
            folder = f"{place.rstrip('/')}/config={config_id}/target={target.value}"
            whole = Path(self._scratch.name, "whole")
            with parquet.ParquetWriter(whole, _schema(), compression="zstd") as writer:
                for piece in pieces:
                    writer.write_table(parquet.read_table(piece))
            _put(whole, folder, f"{name}.parquet")
        self._scratch.cleanup()

    def _spill(self) -> None:
        from pyarrow import parquet  # noqa: PLC0415

        for key, blocks in self._blocks.items():
            pieces = self._written.setdefault(key, [])
            path = Path(self._scratch.name, f"{key[0]}-{key[1].value}-{len(pieces)}")
            columns = [_columns(block.rows, key[1], block.engines, self._recording) for block in blocks]
            joined = {name: np.concatenate([block[name] for block in columns]) for name in columns[0]}
            parquet.write_table(_table(joined), path)
            pieces.append(path)
        self._blocks, self._held = {}, 0


def _rename(known: dict[tuple[str, Target], list[_T]], old: str, new: str) -> None:
    for key in [key for key in known if key[0] == old]:
        known[new, key[1]] = known.pop(key) + known.get((new, key[1]), [])


def _columns(rows: RowBlock, target: Target, engines: Mapping[int, str], recording: str) -> dict[str, Any]:
    steps = np.diff(rows.offsets)
    sums = np.add.reduceat(rows.raw, rows.offsets[:-1], axis=0)
    return {
        "engine": np.array([engines.get(number, "") for number in rows.engine.tolist()], object),
        "recording": np.array([recording] * len(rows), object),
        "end_unix_nano": rows.end_ns,
        "elapsed_us": rows.elapsed_us,
        "steps": steps,
        "weight": rows.weight,
        "quality": np.array([Quality(each).label for each in rows.quality.tolist()], object),
        **{f"phase_{name}": rows.phase[:, column] for column, name in enumerate(PHASES)},
        **dict.fromkeys(FEATURES, np.full(len(rows), np.nan)),
        **{name: sums[:, column] for column, name in enumerate(target.vocabulary)},
    }


def _schema() -> Any:
    import pyarrow as pa  # noqa: PLC0415

    text = pa.dictionary(pa.int32(), pa.string())
    known = {
        "engine": text,
        "recording": text,
        "end_unix_nano": pa.int64(),
        "elapsed_us": pa.float64(),
        "steps": pa.int64(),
        "weight": pa.float64(),
        "quality": text,
    }
    floats = [*(f"phase_{name}" for name in PHASES), *FEATURES]
    return pa.schema([*known.items(), *((name, pa.float64()) for name in floats)])


def _table(columns: dict[str, Any]) -> Any:
    import pyarrow as pa  # noqa: PLC0415

    schema = _schema()
    arrays = [
        pa.array(columns[field.name], from_pandas=True).cast(field.type)
        if pa.types.is_floating(field.type)
        else pa.array(columns[field.name], type=field.type.value_type if pa.types.is_dictionary(field.type) else None)
        for field in schema
    ]
    arrays = [
        array.dictionary_encode() if pa.types.is_dictionary(field.type) else array
        for array, field in zip(arrays, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _put(file: Path, folder: str, name: str) -> None:
    if "://" in folder:
        storage, path = open_store(folder)
        storage.put_file(str(file), f"{path}/{name}")
        return
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    temporary = target / f".{name}.tmp"
    temporary.write_bytes(file.read_bytes())
    temporary.replace(target / name)


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
